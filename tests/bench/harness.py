"""Helpers of the benchmarks: the bundled trace, a flat LRU, medians of alternating runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from time import process_time

import attrs
import orjson
import pytest

from kvcore import KVCache, Request, Workload
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix
from kvcore_plugins.workload import Mooncake

POOL = 5_859
POOL_TOKENS = 3_000_000
KEY_TOKENS = 512

# The installed package, not the checkout in the working directory.
KVCORE = sys.executable, "-P", "-m", "kvcore"

# The peak of a process includes that of the one it was forked from, so a small process
# stands between the command and the tests.
MEASURE = """
import json, resource, subprocess, sys
from time import perf_counter
start = perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, text=True)
seconds = perf_counter() - start
used = resource.getrusage(resource.RUSAGE_CHILDREN)
cpu, peak = used.ru_utime + used.ru_stime, used.ru_maxrss
peak *= 1 if sys.platform == "darwin" else 1024
found = {"seconds": seconds, "cpu": cpu, "peak_mb": peak / 1e6, "output": done.stdout}
json.dump(found, sys.stdout)
sys.exit(done.returncode)
"""

# Arguments: the trace, the file for the report, options as JSON. By default each request that
# is routed is logged.
REPLAY = """
import json, os, sys
os.environ["DYN_LOG"] = "error"
from dynamo._core import run_mocker_trace_replay
trace, report, options = sys.argv[1:]
result = run_mocker_trace_replay([trace], **json.loads(options))
with open(report, "w") as file:
    json.dump(dict(result.summary), file)
"""


@attrs.frozen
class Measured:
    """The time of a process, its CPU time, its peak memory and its output on stdout."""

    seconds: float
    cpu: float
    peak_mb: float
    output: str


def measured(*command: str, **variables: str) -> Measured:
    """Run a process with these variables in its environment, and measure it.

    Raises CalledProcessError if it fails.
    """
    program = [sys.executable, "-c", MEASURE, *command]
    # Let Python write bytecode, so that an installed package is compiled only once.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **variables}
    done = subprocess.run(program, check=True, stdout=subprocess.PIPE, env=env)
    return Measured(**orjson.loads(done.stdout))


def simulation(workload: str, block_size: int, *options: str) -> list[str]:
    """Return the command of a simulation with a pool of 3 M tokens."""
    pool = ["--blocks", str(POOL_TOKENS // block_size), "--block-size", str(block_size)]
    return [*KVCORE, "simulate", workload, *pool, "--json", *options]


def bundled() -> list[Request]:
    """Return the bundled trace as a list in memory, so that reading it is not measured."""
    return list(Mooncake())


def flat_lru(requests: Sequence[Request], ratio: int, blocks: int) -> tuple[float, int]:
    """Run an `OrderedDict` LRU over the same blocks, without prefixes.

    Returns the CPU seconds and the requests from the request at which the pool first was full.
    """
    order: OrderedDict[int, None] = OrderedDict()
    start, first = 0.0, -1
    hits = 0
    for index, request in enumerate(requests):
        prefix = True
        for key in request.keys:
            for part in range(ratio):
                block = key * ratio + part
                if block in order:
                    order.move_to_end(block)
                    hits += prefix
                else:
                    prefix = False
                    if len(order) >= blocks:
                        if first < 0:
                            start, first = process_time(), index
                        order.popitem(last=False)
                    order[block] = None
    return process_time() - start, len(requests) - first


def cache_lru(
    requests: Sequence[Request], ratio: int, blocks: int, *, ids: bool
) -> tuple[float, int]:
    """Run `KVCache` with LRU: open, commit and close; measured like `flat_lru`."""
    size = KEY_TOKENS // ratio
    cache = KVCache(
        blocks,
        size,
        eviction=LRU(),
        prefix=Radix(),
        accounting="keys",
        key_tokens=KEY_TOKENS,
        ids=ids,
    )
    tree = cache.tree
    start, first = 0.0, -1
    for index, request in enumerate(requests):
        now = request.arrival
        begun = process_time() if first < 0 else 0.0
        seq = cache.open(request, None, now)
        cache.commit(seq, seq.tokens - seq.computed, now)
        cache.close(seq, now)
        if first < 0 and tree.evicted_blocks:
            start, first = begun, index
    return process_time() - start, len(requests) - first


def medians(runs: int, *measures: Callable[[], float]) -> list[float]:
    """Run the measures in turn, `runs` times, and return the median of each."""
    results: list[list[float]] = [[] for _ in measures]
    for _ in range(runs):
        for measure, result in zip(measures, results, strict=True):
            result.append(measure())
    return [median(result) for result in results]


def dynamo_version() -> str:
    """Return the version of the installed Dynamo; skip the test if there is none."""
    try:
        return metadata.version("ai-dynamo-runtime")
    except metadata.PackageNotFoundError:
        pytest.skip("run `tox -e bench-dynamo`")


def peer_rows(workload: Workload) -> list[bytes]:
    """Return the requests in Dynamo's format; requests without keys get unique ones."""
    rows, fresh = [], 0
    for request in workload:
        keys = list(request.keys)
        if not keys:
            keys = list(range(fresh, fresh - (-request.prompt_tokens // KEY_TOKENS)))
            fresh += len(keys)
        row = {
            "timestamp": request.arrival / 1e6,
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": keys,
        }
        rows.append(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    return rows


def peer_command(
    trace: Path,
    report: Path,
    block_size: int,
    workers: int = 1,
    router: str = "round_robin",
    *,
    blocks: int = 0,
) -> list[str]:
    """Return the command that replays a trace in Dynamo and writes its report.

    Each worker has `blocks` blocks; without them, blocks for 3 M tokens.
    """
    engine = {"block_size": block_size, "num_gpu_blocks": blocks or POOL_TOKENS // block_size}
    options = {
        "extra_engine_args": {"engine": engine},
        "num_workers": workers,
        "router_mode": router,
        "trace_block_size": KEY_TOKENS,
    }
    return [
        sys.executable,
        "-c",
        REPLAY,
        str(trace),
        str(report),
        orjson.dumps(options).decode(),
    ]
