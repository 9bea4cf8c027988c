"""Print the CPU seconds of parts of kvcore, and of what they are measured against.

    python tests/bench/inner.py PART [ARGUMENT]...

Each part runs once, in a process that `targets.py` starts for each measurement: with
`KVCORE_PURE=1` in Python alone, else with the core in C. Stdout has the figures, in the order
in which the docstring of the part names them.
"""

# ruff: noqa: PLC0415 - a part imports what it alone needs: peers may not be there

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

import orjson
from bench.harness import KEY_TOKENS, POOL, POOL_TOKENS, bundled, cache_lru, flat_lru

from kvcore import Job, KVCache, Scheduler, Trace
from kvcore.plugins import resolve
from kvcore.serving import simulate
from kvcore_plugins.prefix import Radix

SMALL_BLOCKS = 32
"""Blocks of 16 tokens in a key of the bundled trace."""

LEAVES = 20_000


def cpu() -> float:
    """Return the CPU seconds of this process so far, and of those that it has waited for."""
    return sum(os.times()[:4])


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds that `work` takes."""
    before = cpu()
    work()
    return cpu() - before


class ByPrompt(Scheduler):
    """Serve the shortest prompt first: a scheduler that no core knows."""

    name = "by-prompt"

    def priority(self, job: Job, now: int) -> int:
        """Return the tokens of the prompt."""
        return job.request.prompt_tokens


def serve(
    block_size: int,
    *,
    eviction: str = "lru",
    scheduler: Scheduler | None = None,
    trace: Path | None = None,
    ids: bool = False,
) -> float:
    """Return the CPU seconds in which the loop serves the bundled trace from memory."""
    requests = bundled()

    def run() -> None:
        recorder = None if trace is None else Trace(trace)
        cache = KVCache(
            POOL_TOKENS // block_size,
            block_size,
            eviction=resolve("eviction", eviction),
            prefix=Radix(),
            accounting="tokens",
            key_tokens=KEY_TOKENS,
            trace=recorder,
            ids=ids,
        )
        simulate(requests, cache=cache, scheduler=scheduler, residency=False)
        if recorder is not None:
            recorder.close()

    return cpu_seconds(run)


def loop(policy: str) -> list[float]:
    """Measure the loop alone at block 512, with an eviction policy or with `ByPrompt`."""
    if policy == ByPrompt.name:
        return [serve(512, scheduler=ByPrompt())]
    return [serve(512, eviction=policy)]


def tracing(block_size: str) -> list[float]:
    """Measure a traced run, an untraced one with ids, and the encoding of the trace."""
    size = int(block_size)
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        traced = serve(size, trace=path)
        lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]

        def encode() -> None:
            with Path(folder, "again.jsonl").open("wb", buffering=1 << 20) as file:
                option = orjson.OPT_APPEND_NEWLINE
                file.writelines(orjson.dumps(line, None, option) for line in lines)

        encoding = cpu_seconds(encode)
    return [traced, serve(size, ids=True), encoding]


def replay(block_size: str) -> list[float]:
    """Measure an LRU of blocks in an `OrderedDict`, and LRU over spans, once pools are full."""
    requests, ratio = bundled(), KEY_TOKENS // int(block_size)
    flat, _ = flat_lru(requests, ratio, POOL * ratio)
    spans, _ = cache_lru(requests, ratio, POOL * ratio, ids=False)
    return [flat, spans]


def libcachesim() -> list[float]:
    """Measure libcachesim's LRU on a binary trace of blocks of 16 tokens, and LRU over spans.

    libcachesim is GPL-3.0. It is a peer that is measured, and nothing of kvcore imports it.
    """
    import libcachesim as peer

    requests = bundled()
    with TemporaryDirectory() as folder:
        path = Path(folder, "blocks.bin")
        with path.open("wb") as file:
            for request in requests:
                for key in request.keys:
                    first = key * SMALL_BLOCKS
                    blocks = range(first, first + SMALL_BLOCKS)
                    file.writelines(struct.pack("<IQIq", 0, block, 1, -2) for block in blocks)
        reader = peer.TraceReader(str(path), peer.TraceType.ORACLE_GENERAL_TRACE)
        lru = peer.LRU(POOL * SMALL_BLOCKS)
        theirs = cpu_seconds(lambda: lru.process_trace(reader))
    ours = partial(cache_lru, requests, SMALL_BLOCKS, POOL * SMALL_BLOCKS, ids=False)
    return [theirs, cpu_seconds(ours)]


def curve() -> list[float]:
    """Measure 30 sizes of LRU in kvcache-simulator's C++, and all sizes here.

    Compiled before in both, requests in memory, as in `test_curves.py`.
    """
    from bench import test_curves as curves
    from kvcache_sim.cpp_backend import ensure_cpp_simulator

    requests = bundled()
    trace, sizes = curves.peer_trace(requests), curves.pool_sizes(requests)
    ensure_cpp_simulator()
    curves.curve(requests)
    theirs = cpu_seconds(partial(curves.by_peer_in_cpp, trace, sizes))
    return [theirs, cpu_seconds(partial(curves.curve, requests))]


def vllm() -> list[float]:
    """Measure vLLM's cache manager with its own order of blocks, and with `lru` in it.

    Both serve the first 3,000 requests of the bundled trace in 8,192 blocks of 512 tokens.
    """
    from helpers.block_pools import conversations, serve
    from helpers.vllm_pool import VllmPool

    requests = list(conversations(3_000))
    pools = (VllmPool(eviction, 8_192, watched=False) for eviction in (None, "lru"))
    return [serve(pool, requests).seconds for pool in pools]


def policies() -> list[float]:
    """Measure an admission with an eviction among 20,000 leaves, for each of `POLICIES`."""
    from bench.test_no_cliff import POLICIES, eviction_seconds

    return [eviction_seconds(policy, LEAVES) for policy in POLICIES]


def proxy() -> list[float]:
    """Measure a request sent directly, by a bare proxy on aiohttp, and by `kvcore route`.

    Client, servers and proxies share the process, so the first figure is what they need
    without any proxy. Prompts have 4 kB; `route` follows them with the router `dynamo`.
    """
    import aiohttp
    from bench.test_proxy import passing, timed
    from helpers.upstreams import routed

    async def run() -> list[float]:
        options = {"router": "dynamo", "health_interval": 60}
        async with (
            routed(4, **options) as (_, servers, client),
            passing(servers[0].url) as bare,
            aiohttp.ClientSession(servers[0].url) as direct,
        ):
            clients, used = (direct, bare, client), [0.0, 0.0, 0.0]
            for turn in range(21):  # in the first, connections are made
                for place, each in enumerate(clients):
                    before = cpu()
                    for number in range(100):
                        await timed(each, turn * 100 + number, stream=False)
                    if turn > 0:
                        used[place] += cpu() - before
                for server in servers:
                    server.calls.clear()
                    server.headers.clear()
            return [seconds / 2_000 for seconds in used]

    return asyncio.run(run())


PARTS: dict[str, Callable[..., list[float]]] = {
    part.__name__: part
    for part in (loop, tracing, replay, libcachesim, curve, vllm, policies, proxy)
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    sys.stdout.write(orjson.dumps(PARTS[name](*arguments)).decode())
