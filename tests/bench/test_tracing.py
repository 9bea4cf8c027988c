"""What a trace costs, against encoding and writing the same lines and nothing else."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import orjson
import pytest
from bench.harness import KEY_TOKENS, POOL, bundled, medians

from kvcore import KVCache, Trace
from kvcore.lab import replay
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix

RUNS = 5
PROMISED = 1.3


@pytest.mark.parametrize("ratio", [1, 32], ids=["block 512", "block 16"])
def test_tracing(ratio: int, tmp_path: Path) -> None:
    """A traced run takes at most 1.3 times the untraced run plus raw encoding and writing."""
    requests = bundled()
    path = tmp_path / "trace.jsonl"

    def run(trace: Trace | None) -> None:
        cache = KVCache(
            POOL * ratio,
            KEY_TOKENS // ratio,
            eviction=LRU(),
            prefix=Radix(),
            count="keys",
            key_tokens=KEY_TOKENS,
            trace=trace,
        )
        replay(requests, cache)

    def untraced() -> float:
        start = perf_counter()
        run(None)
        return perf_counter() - start

    def traced() -> float:
        start = perf_counter()
        with Trace(path) as trace:
            run(trace)
        return perf_counter() - start

    traced()
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]

    def raw() -> float:
        start = perf_counter()
        with (tmp_path / "raw.jsonl").open("wb", buffering=1 << 20) as file:
            write, dumps, option = file.write, orjson.dumps, orjson.OPT_APPEND_NEWLINE
            for line in lines:
                write(dumps(line, option=option))
        return perf_counter() - start

    without, with_trace, encoding = medians(RUNS, untraced, traced, raw)
    ratio_to_bound = with_trace / (without + encoding)
    print(
        f"\ntracing, {KEY_TOKENS // ratio}-token blocks, {len(lines):,} lines: untraced "
        f"{without * 1e3:.0f} ms, raw encoding {encoding * 1e3:.0f} ms, traced "
        f"{with_trace * 1e3:.0f} ms = {ratio_to_bound:.2f} x their sum (promised {PROMISED}), "
        f"{with_trace / without:.2f} x untraced"
    )
    assert ratio_to_bound <= PROMISED
