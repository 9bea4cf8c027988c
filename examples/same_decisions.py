"""One policy, four places: replayed, simulated, on real tensors, and inside vLLM.

Run it with `python examples/same_decisions.py` (needs torch; vLLM's own scheduler is the fourth
place where `vllm` and `kvcore_vllm` can be imported, and needs no GPU).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs

import kvcore
from kvcore import KVCache, Request, Trace
from kvcore.analysis import replay
from kvcore.trace import check_trace
from kvcore_plugins.workload import Mooncake

BLOCKS, SIZE = 500, 16


def requests(limit: int = 100) -> list[Request]:
    """Return requests of the bundled trace, one after the other, and 32 times shorter."""
    return [
        attrs.evolve(
            request,
            arrival=place * 60_000_000_000,
            prompt_tokens=len(request.keys) * SIZE,
            output_tokens=1,
            key_tokens=SIZE,
        )
        for place, request in enumerate(islice(Mooncake(), limit))
    ]


def cache(policy: str, trace: Trace) -> KVCache:
    """Return a cache whose spans are single blocks, as those of engines are."""
    return KVCache(BLOCKS, SIZE, eviction=policy, prefix="hashed:spans=block", trace=trace)


def replayed(policy: str, file: Path) -> None:
    """Open, compute and close one request after the other."""
    with Trace(file) as trace:
        replay(requests(), cache(policy, trace))


def simulated(policy: str, file: Path) -> None:
    """Serve them in simulated time, by the rules of vLLM's scheduler."""
    with Trace(file) as trace:
        kvcore.simulate(requests(), cache=cache(policy, trace))


def computed(policy: str, file: Path) -> None:
    """Compute them: K/V of a tiny transformer, in real blocks on the CPU."""
    with Trace(file) as trace:
        kvcore.run(requests(), cache=cache(policy, trace))


def main(policy: str = "arc") -> None:
    """Print what each place evicts, and the digest of these blocks in order."""
    with TemporaryDirectory() as folder:
        for place, run in STAGES.items():
            file = Path(folder, f"{place}.jsonl.gz")
            run(policy, file)
            evicted = check_trace(file).evictions
            print(f"{place:9} {evicted['blocks']:6,} blocks evicted  {evicted['digest'][:32]}")


STAGES: dict[str, Callable[[str, Path], None]] = {
    "replay": replayed,
    "simulate": simulated,
    "tensors": computed,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
