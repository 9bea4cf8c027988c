"""The suites of the cache and the simulator: decisions per second."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import orjson

from kvcore.cache import KVCache
from kvcore.distributions import version
from kvcore.plugins import Plugins
from kvcore.request import Request
from kvcore.serving.simulate import simulate
from kvcore.workloads import Workload
from kvcore_engine.bench.result import Row, Settings, spread_of

POOL_TOKENS = 3_000_000
KEY_TOKENS = 512
QUICK = 1500
"""Requests of the bundled trace that a quick run takes."""

SIZES = (512, 16)
"""Tokens of a block."""

RUNS = {512: 4, 16: 2}
"""Runs of each, by the tokens of a block: a flat loop takes 32 times as long at 16."""

OBJECT = struct.Struct("<IQIq")
"""A row of a binary trace: time, object, size, next access."""

PEER_SECONDS = 40
"""Seconds that a peer in a process of its own gets."""

# Dynamo's replay: the trace, the file for the report, options as JSON.
REPLAY = """
import json, sys
from dynamo._core import run_mocker_trace_replay
trace, report, options = sys.argv[1:]
result = run_mocker_trace_replay([trace], **json.loads(options))
with open(report, "w") as file:
    json.dump(dict(result.summary), file)
"""


def of_cache(settings: Settings) -> Iterator[Row]:
    """Yield how many blocks a second LRU decides about, with and without ids of blocks."""
    requests = _bundled(settings)
    for size in SIZES:
        ratio = KEY_TOKENS // size
        # A pool that most requests have filled, also in a quick run.
        pool = POOL_TOKENS // size // (8 if settings.quick else 1)
        blocks = sum(len(request.keys) for request in requests) * ratio
        case = f"{len(requests):,} requests, blocks of {size}"
        row: dict[str, Any] = {
            "suite": "cache",
            "operation": "lru",
            "case": case,
            "amount": blocks,
            "unit": "blocks",
        }
        if why := settings.late:
            yield Row(**row, by="KVCache", note=why)
            continue
        measured: list[tuple[str, list[float], dict[str, Any]]] = []
        hits: list[int] = []
        runs: list[tuple[str, Callable[[], tuple[float, int]]]] = [
            ("OrderedDict", partial(_flat, requests, ratio, pool)),
            ("KVCache", partial(_cached, requests, size, pool, ids=False)),
            ("KVCache with ids", partial(_cached, requests, size, pool, ids=True)),
        ]
        for by, run in runs:
            times: list[float] = []
            for _ in range(1 if settings.check or settings.quick else RUNS[size]):
                seconds, counted = run()
                times.append(seconds)
            hits.append(counted)
            # A flat loop drops the beginnings of prompts first, and hits a little less. The
            # cache makes the same decisions with ids and without.
            right = {} if by != "KVCache with ids" else {"error": float(abs(counted - hits[1]))}
            measured.append((by, times, right))
        yield from _beside(row, measured, settings)
        if not settings.check:
            yield _libcachesim(row, requests, ratio, pool, median(measured[0][1]))


def of_sim(settings: Settings) -> Iterator[Row]:
    """Yield how many requests a second are simulated."""
    requests = _bundled(settings)
    for size in SIZES:
        row: dict[str, Any] = {
            "suite": "sim",
            "operation": "simulate",
            "case": f"{len(requests):,} requests, blocks of {size}",
            "amount": len(requests),
            "unit": "requests",
        }
        if why := settings.late:
            yield Row(**row, by="kvcore", note=why)
            continue
        times, missing = [], 0
        for _ in range(1 if settings.check or settings.quick else 3):
            cache = _cache(size, POOL_TOKENS // size, "tokens", ids=False)
            start = perf_counter()
            result = simulate(requests, cache=cache, residency=False)
            times.append(perf_counter() - start)
            missing = len(requests) - result.summary()["completed"]
        right = {"error": float(missing)}
        yield from _beside(row, [("kvcore", times, right)], settings)
        if not settings.check:
            yield _dynamo(row, requests, size, median(times))


def _bundled(settings: Settings) -> list[Request]:
    """Return the bundled trace, in memory; of a quick run its beginning."""
    workload: Workload = Plugins().build("workload", "mooncake")
    requests = list(workload)
    return requests[:QUICK] if settings.quick else requests


def _beside(
    row: dict[str, Any],
    measured: Sequence[tuple[str, list[float], dict[str, Any]]],
    settings: Settings,
) -> Iterator[Row]:
    """Yield rows with their speed as a share of the first row's."""
    base = median(measured[0][1])
    for index, (by, times, right) in enumerate(measured):
        if settings.check:
            yield Row(**row, by=by, **right)
            continue
        seconds = median(times)
        yield Row(
            **row,
            by=by,
            seconds=seconds,
            spread=spread_of(times),
            of=measured[0][0] if index else None,
            share=base / seconds if index else None,
            **right,
        )


def _cache(size: int, blocks: int, accounting: Any, *, ids: bool) -> KVCache:
    return KVCache(
        blocks,
        size,
        eviction="lru",
        prefix="radix",
        accounting=accounting,
        key_tokens=KEY_TOKENS,
        ids=ids,
    )


def _cached(
    requests: Sequence[Request], size: int, blocks: int, *, ids: bool
) -> tuple[float, int]:
    """Replay through a cache; return seconds and the blocks that were hit."""
    cache = _cache(size, blocks, "keys", ids=ids)
    hits = 0
    start = perf_counter()
    for request in requests:
        now = request.arrival
        seq = cache.open(request, None, now)
        hits += seq.computed // size
        cache.commit(seq, seq.tokens - seq.computed, now)
        cache.close(seq, now)
    return perf_counter() - start, hits


def _flat(requests: Sequence[Request], ratio: int, blocks: int) -> tuple[float, int]:
    """Run an `OrderedDict` LRU over the same blocks, with no idea of prefixes."""
    order: OrderedDict[int, None] = OrderedDict()
    hits = 0
    start = perf_counter()
    for request in requests:
        prefix = True
        for key in request.keys:
            for part in range(ratio):
                block = key * ratio + part  # type: ignore[operator]
                if block in order:
                    order.move_to_end(block)
                    hits += prefix
                else:
                    prefix = False
                    if len(order) >= blocks:
                        order.popitem(last=False)
                    order[block] = None
    return perf_counter() - start, hits


def _libcachesim(
    row: dict[str, Any], requests: Sequence[Request], ratio: int, pool: int, base: float
) -> Row:
    """Return the row of libcachesim's LRU, which reads the same blocks from a binary trace."""
    by = "libcachesim"
    if find_spec(by) is None:
        return Row(**row, by=by, note="not available: libcachesim is not installed")

    def seconds() -> float:
        libcachesim = import_module(by)
        with TemporaryDirectory() as folder:
            trace = Path(folder) / "blocks.bin"
            with trace.open("wb") as file:
                for request in requests:
                    for key in request.keys:
                        ids = range(key * ratio, (key + 1) * ratio)  # type: ignore[operator]
                        file.write(b"".join(OBJECT.pack(0, block, 1, -2) for block in ids))
            kind = libcachesim.TraceType.ORACLE_GENERAL_TRACE
            reader = libcachesim.TraceReader(str(trace), kind)
            start = perf_counter()
            libcachesim.LRU(pool).process_trace(reader)
            return perf_counter() - start

    return _peer(row, by, "OrderedDict", base, seconds)


def _dynamo(row: dict[str, Any], requests: Sequence[Request], size: int, base: float) -> Row:
    """Return the row of Dynamo's offline replay, a process of its own that reports its time."""
    by, known = "Dynamo's replay", version("ai-dynamo-runtime")
    if known is None:
        return Row(**row, by=by, note="not available: ai-dynamo-runtime is not installed")
    by = f"{by} {known}"
    if find_spec("dynamo") is None:
        note = "not available: ai-dynamo-runtime has no module dynamo here"
        return Row(**row, by=by, note=note)

    def seconds() -> float:
        rows = [
            {
                "timestamp": request.arrival / 1e6,
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(request.keys),
            }
            for request in requests
        ]
        options = {
            "extra_engine_args": {
                "engine": {"block_size": size, "num_gpu_blocks": POOL_TOKENS // size}
            },
            "trace_block_size": KEY_TOKENS,
        }
        with TemporaryDirectory() as folder:
            trace, report = Path(folder) / "trace.jsonl", Path(folder) / "report.json"
            trace.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
            paths = str(trace), str(report)
            command = [sys.executable, "-c", REPLAY, *paths, orjson.dumps(options).decode()]
            done = subprocess.run(  # noqa: S603
                command, capture_output=True, text=True, check=False, timeout=PEER_SECONDS
            )
            if done.returncode:
                raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
            return float(orjson.loads(report.read_bytes())["wall_time_ms"]) / 1e3

    return _peer(row, by, "kvcore", base, seconds)


def _peer(
    row: dict[str, Any], by: str, of: str, base: float, measure: Callable[[], float]
) -> Row:
    """Return the row of a peer and its speed as a share of `of`'s, or why it has none."""
    try:
        seconds = measure()
        return Row(**row, by=by, seconds=seconds, of=of, share=base / seconds)
    except subprocess.TimeoutExpired:
        return Row(**row, by=by, note=f"took more than {PEER_SECONDS} s")
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its own
        return Row(**row, by=by, note=f"failed: {type(error).__name__}: {str(error)[:80]}")
