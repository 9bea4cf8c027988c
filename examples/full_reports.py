"""Stand in for a server that reports every use of its blocks, as vLLM can.

    python examples/full_reports.py REQUESTS.jsonl tcp://127.0.0.1:5557

publishes a stored run for each request of a file in Mooncake's format, reused blocks
included: all of them, from the first subscriber's connection until the last subscriber
leaves. To listen:

    kvcore record --zmq tcp://127.0.0.1:5557 --batches 200 -o events.jsonl.gz
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcore_events.formats import encode
from kvcore_events.model import BlockStored, EventBatch
from kvcore_events.publisher import Publisher
from kvcore_plugins.workload import Mooncake


def payloads(workload: Mooncake) -> Iterator[bytes]:
    """Yield what is published: a batch a request, of the full blocks of its prompt."""
    size = workload.key_tokens
    for request in workload:
        hashes: tuple[Any, ...] = tuple(request.keys[: request.prompt_tokens // size])
        # Such a file has no token ids: the numbers of the blocks stand in.
        tokens = tuple(value for value in hashes for _ in range(size))
        run = BlockStored(hashes=hashes, tokens=tokens, block_size=size, medium="GPU")
        yield encode(EventBatch(request.arrival / 1e9, (run,), 0))


def main(requests: str, address: str) -> None:
    """Publish the requests at the address."""
    with Publisher(address) as publisher:
        print(f"publishing at {publisher.address}", flush=True)
        publisher.serve_all(payloads(Mooncake(Path(requests))))


if __name__ == "__main__":
    main(*sys.argv[1:])
