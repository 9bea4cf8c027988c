"""Print the table of speeds in `docs/reference/benchmarks.md`.

    python tests/bench/targets.py [ROW]...

Each row is a time, or a ratio of two times from one run; times are medians of alternating runs.
Rows that need Dynamo print "not measured" if it is not installed. `tox run -e targets` installs
it first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

sys.path.insert(0, str(Path(__file__).parents[1]))

import orjson
from bench.harness import (
    POOL,
    POOL_TOKENS,
    bundled,
    cache_lru,
    flat_lru,
    measured,
    medians,
    peer_command,
    peer_rows,
)
from bench.test_no_cliff import POLICIES, eviction_seconds
from helpers.sessions import write_sessions

from kvcore import KVCache, Request, Trace
from kvcore.serving import simulate
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix
from kvcore_plugins.workload import Mooncake

RUNS = 5
LEAVES = 20_000
SESSIONS = 710
# The installed package, not the checkout in the working directory.
KVCORE = [sys.executable, "-P", "-m", "kvcore"]


def serve(requests: Sequence[Request], block_size: int, **options) -> float:
    """Return the CPU time in which the serving loop handles requests that are in memory."""
    residency, trace = options.pop("residency", False), options.get("trace")
    start = process_time()
    cache = KVCache(
        POOL_TOKENS // block_size,
        block_size,
        eviction=LRU(),
        prefix=Radix(),
        accounting="tokens",
        key_tokens=Mooncake().key_tokens,
        **options,
    )
    simulate(requests, cache=cache, residency=residency)
    if trace is not None:
        trace.close()
    return process_time() - start


def simulation(workload: str, block_size: int) -> list[str]:
    """Return the command of a simulation with a pool of 3 M tokens."""
    pool = ["--blocks", str(POOL_TOKENS // block_size), "--block-size", str(block_size)]
    return [*KVCORE, "simulate", workload, *pool, "--json", "--no-residency"]


def dynamo(block_size: int, runs: int) -> str:
    """Compare the time of a whole process, and of its loop, with Dynamo's."""
    if find_spec("dynamo") is None:
        return "not measured: ai-dynamo-runtime is not installed"
    requests = bundled()
    with TemporaryDirectory() as folder:
        trace, report = Path(folder, "trace.jsonl"), Path(folder, "report.json")
        trace.write_bytes(b"".join(peer_rows(Mooncake())))
        peer = peer_command(trace, report, block_size)
        whole, theirs, their_loop, loop = medians(
            runs,
            lambda: measured(*simulation("mooncake", block_size)).seconds,
            lambda: measured(*peer).seconds,
            lambda: orjson.loads(report.read_bytes())["wall_time_ms"] / 1e3,
            lambda: serve(requests, block_size),
        )
    return f"{theirs / whole:.1f}x ({whole:.2f} s), loop {their_loop / loop:.1f}x"


def lru_replay() -> str:
    """Compare LRU over spans with an `OrderedDict` of blocks."""
    requests, found = bundled(), []
    for ratio in (1, 32):
        blocks = POOL * ratio
        flat, cache = medians(
            RUNS,
            lambda r=ratio, b=blocks: flat_lru(requests, r, b)[0],
            lambda r=ratio, b=blocks: cache_lru(requests, r, b, ids=False)[0],
        )
        found.append(f"{flat / cache:.2f}x")
    return " / ".join(found)


def residency() -> str:
    """Compare a run that measures the residency of blocks with one that does not."""
    requests, found = bundled(), []
    for block_size in (512, 16):
        off, on = medians(
            RUNS,
            lambda b=block_size: serve(requests, b),
            lambda b=block_size: serve(requests, b, residency=True),
        )
        found.append(f"{on / off:.2f}x")
    return " / ".join(found)


def tracing() -> str:
    """Compare a traced run with an untraced one plus the encoding of the trace.

    The untraced run has ids, and the lines of the trace are encoded and written.
    """
    requests, found = bundled(), []
    with TemporaryDirectory() as folder:
        path, again = Path(folder, "trace.jsonl"), Path(folder, "again.jsonl")
        for block_size in (512, 16):
            serve(requests, block_size, trace=Trace(path))
            lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]

            def encode(lines=lines) -> float:
                start = process_time()
                with again.open("wb", buffering=1 << 20) as file:
                    for line in lines:
                        file.write(orjson.dumps(line, None, orjson.OPT_APPEND_NEWLINE))
                return process_time() - start

            with_ids, encoding, traced = medians(
                RUNS,
                lambda b=block_size: serve(requests, b, ids=True),
                encode,
                lambda b=block_size: serve(requests, b, trace=Trace(path)),
            )
            found.append(f"{traced / (with_ids + encoding):.2f}x")
    return " / ".join(found)


def million() -> str:
    """Time a million `zipf` requests, and a quarter of them."""
    quarter, whole = (
        measured(*simulation(f"zipf:requests={requests}", 16))
        for requests in (250_000, 1_000_000)
    )
    growth = whole.cpu / quarter.cpu
    return f"{whole.cpu:.0f} s, {whole.peak_mb:.0f} MB; {growth:.2f}x a quarter"


def sessions() -> str:
    """Time LRU over 94 M references of agentic sessions."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "sessions.jsonl.gz")
        references = write_sessions(path, SESSIONS)
        command = [
            "compare",
            f"weka:{path}",
            "--eviction",
            "lru",
            "--blocks",
            "100000",
            "--json",
        ]
        taken = measured(*KVCORE, *command)
    return f"{taken.cpu:.0f} s, {taken.peak_mb / 1e3:.2f} GB, {references / 1e6:.0f} M"


def dearest() -> str:
    """Compare the slowest policy with `lru`, per admission and eviction."""
    taken = {
        policy.name: median(eviction_seconds(policy, LEAVES) for _ in range(3))
        for policy in POLICIES
    }
    name = max(taken, key=taken.__getitem__)
    return f"{taken[name] / taken['lru']:.1f}x ({name})"


def start() -> str:
    """Time `import kvcore` inside a process, and a whole command with little to do."""
    program = "from time import perf_counter as t; a = t(); import kvcore; print(t() - a)"
    imported, command = medians(
        RUNS,
        lambda: float(measured(sys.executable, "-c", program).output),
        lambda: measured(*KVCORE, "simulate", "zipf:requests=1").seconds,
    )
    return f"{imported * 1e3:.0f} ms / {command:.2f} s"


ROWS: dict[str, tuple[str, Callable[[], str]]] = {
    "dynamo512": ("bundled trace, block 512, against ai-dynamo", lambda: dynamo(512, RUNS)),
    "dynamo16": ("bundled trace, block 16, against ai-dynamo", lambda: dynamo(16, 1)),
    "lru": ("LRU replay against an OrderedDict, block 512 / 16", lru_replay),
    "residency": ("residency on against off, block 512 / 16", residency),
    "tracing": ("traced against untraced with ids and encoding, block 512 / 16", tracing),
    "million": ("a million zipf requests, timed", million),
    "sessions": ("references of 710 sessions, LRU, untimed", sessions),
    "dearest": (f"dearest policy against lru at {LEAVES:,} leaves", dearest),
    "start": ("import kvcore / a command", start),
}


def main(names: Sequence[str]) -> None:
    """Print the rows of these names, or all rows if there are none."""
    print("| work | measured | took |\n|---|---|---|")
    for name in names or ROWS:
        about, measure = ROWS[name]
        begun = perf_counter()
        print(f"| {about} | {measure()} | {perf_counter() - begun:.0f} s |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
