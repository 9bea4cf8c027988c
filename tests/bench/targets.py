"""Print the table of speeds in `docs/reference/benchmarks.md`: both builds, beside peers.

    python tests/bench/targets.py [ROW]...

A figure is the median of the CPU seconds of whole processes, or of a part that `inner.py`
measures in a process of its own. All figures of a row are measured in turn, so that what else
the machine does falls on each of them. `tox run -e targets` installs the peers; a row whose
peer, or whose trace, is not there says so.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))

import attrs
import orjson
from bench.harness import KVCORE, measured, peer_command, peer_rows, simulation
from bench.test_no_cliff import POLICIES
from bench.test_view import SERVED
from helpers.sessions import write_sessions

from kvcore import Workload
from kvcore.cache.native import core
from kvcore_plugins.workload import Azure, Mooncake

SYNTHETIC = "KVCORE_MOONCAKE_SYNTHETIC"
"""The variable with the path of Mooncake's synthetic trace, 3,993 requests, not shipped."""

AZURE = "KVCORE_AZURE_TRACE"
"""The variable with the path of AzureLLMInferenceTrace_conv.csv, not shipped."""

SESSIONS = 710

Build: TypeAlias = dict[str, str]
"""Environment variables by which a build is chosen."""

BUILDS: tuple[Build, Build] = {"KVCORE_PURE": "1"}, {"KVCORE_PURE": ""}
"""Python alone, and with the core in C."""

INNER = sys.executable, "-P", str(Path(__file__).with_name("inner.py"))


@attrs.frozen
class Row:
    """A row of the table.

    Attributes:
        work: what is measured.
        ours: measures it in a build, and returns its figures.
        cell: returns the text of a cell from the medians of the figures, that of `peer` first.
        aims: what is aimed at, in Python alone and with the core in C.
        beside: what it is measured against, whose median is put in place of `{}`.
        needs: package of a peer.
        peer: measures a peer, and returns its CPU seconds.
        runs: number of measurements of each figure.
    """

    work: str
    ours: Callable[[Build], Sequence[float]]
    cell: Callable[..., str]
    aims: tuple[str, str] = ("", "")
    beside: str = ""
    needs: str = ""
    peer: Callable[[], float] | None = None
    runs: int = 7

    def cells(self) -> list[str]:
        """Measure the row and return its cells."""
        if self.needs and not find_spec(self.needs):
            return [self.work, f"not measured: {self.needs} is not installed", *[""] * 5]
        rounds = [
            ([self.peer()] if self.peer else [], *map(self.ours, BUILDS))
            for _ in range(self.runs)
        ]
        peer, *builds = (
            [*map(median, zip(*each, strict=True))] for each in zip(*rounds, strict=True)
        )
        python, core_in_c = (self.cell(*peer, *figures) for figures in builds)
        beside = self.beside.format(*map(seconds, peer))
        figures = python, self.aims[0], core_in_c, self.aims[1]
        return [self.work, beside, *figures, str(self.runs)]


def seconds(value: float) -> str:
    """Return seconds with two digits, from 100 on with all; below 0.1 s as milliseconds."""
    value, unit = (value, "s") if value >= 0.1 else (value * 1e3, "ms")
    return f"{value:.2g} {unit}" if value < 99 else f"{value:.0f} {unit}"


def times(peer: float, ours: float) -> str:
    """Return our seconds, and how many times as long the peer takes."""
    return f"{seconds(ours)}: {peer / ours:.2g}×"


def faster(peer: float, ours: float) -> str:
    """Return how many times as long the peer takes."""
    return f"{peer / ours:.1f}×"


def dearer(base: float, ours: float) -> str:
    """Return how many times as long ours takes as the base."""
    return f"{ours / base:.2f}×"


def processes(*commands: Sequence[str]) -> Callable[[Build], list[float]]:
    """Return a function that measures the CPU seconds of a process of each command."""
    return lambda build: [measured(*words, **build).cpu for words in commands]


def part(*arguments: str) -> Callable[[Build], list[float]]:
    """Return a function that measures a part of `inner.py`."""
    return lambda build: orjson.loads(measured(*INNER, *arguments, **build).output)


def dynamo(work: str, workload: Workload, name: str, block: int, *aims: str) -> Row:
    """Return the row of a simulation beside Dynamo's replay of the same requests."""
    trace, report = _file(f"{work}.jsonl"), _file("report.json")

    completed: set[int] = set()

    def peer() -> float:
        if not trace.exists():
            trace.write_bytes(b"".join(peer_rows(workload)))
        taken = measured(*peer_command(trace, report, block)).cpu
        completed.add(orjson.loads(report.read_bytes())["completed_requests"])
        return taken

    def ours(build: Build) -> list[float]:
        taken = measured(*simulation(name, block, "--no-residency"), **build)
        completed.add(orjson.loads(taken.output)["completed"])
        if len(completed) > 1:
            sys.exit(f"{work}: not both served the same requests: {completed}")
        return [taken.cpu]

    both = aims or ("", "")
    return Row(f"{work}, block {block}", ours, times, both, "Dynamo 1.6.1: {}", "dynamo", peer)


def loop(policy: str, *aims: str) -> Row:
    """Return the row of the serving loop alone."""
    return Row(
        f"the loop alone, bundled trace, block 512, `{policy}`",
        part("loop", policy),
        seconds,
        aims,
    )


def growth(quarter: float, whole: float) -> str:
    """Return the seconds of all requests, and of a quarter of them."""
    return f"{seconds(whole)}, {whole / quarter:.1f}× a quarter"


def tracing(traced: float, with_ids: float, encoding: float) -> str:
    """Return how many times as long as its necessary work a traced run takes."""
    return f"{traced / (with_ids + encoding):.2f}×"


def dearest(*each: float) -> str:
    """Return how many times as long as by the first, `lru`, evictions take at most."""
    slowest = max(range(len(each)), key=each.__getitem__)
    return f"{each[slowest] / each[0]:.1f}× (`{POLICIES[slowest].name}`)"


def routing(direct: float, bare: float, routed: float) -> str:
    """Return the microseconds of a routed request, and how many times those of the bare."""
    return f"{(routed - direct) * 1e6:.0f} µs: {(routed - direct) / (bare - direct):.2f}×"


def page(build: Build) -> list[float]:
    """Measure CPU seconds and MB of the page of a trace of a million lines."""
    trace = _file("served.jsonl.gz")
    if not trace.exists():
        SERVED.record(SERVED.requests, trace)
    words = "view", str(trace), "-o", str(_file("page.html")), "--events", "2000000"
    taken = measured(*KVCORE, *words, **build)
    return [taken.cpu, taken.peak_mb]


def sessions(build: Build) -> list[float]:
    """Measure CPU seconds and MB of LRU on the sessions of coding agents."""
    path = _file("sessions.jsonl.gz")
    if not path.exists():
        write_sessions(path, SESSIONS)
    words = f"weka:{path}", "--eviction", "lru", "--blocks", "100000", "--json"
    taken = measured(*KVCORE, "compare", *words, **build)
    return [taken.cpu, taken.peak_mb]


def with_memory(cpu: float, peak_mb: float) -> str:
    """Return the seconds and the peak of the memory of a process."""
    return f"{seconds(cpu)}, {peak_mb:.0f} MB"


@cache
def _folder() -> TemporaryDirectory[str]:
    """Return the folder of files that rows share; it goes with the process."""
    return TemporaryDirectory()


def _file(name: str) -> Path:
    return Path(_folder().name, name)


def rows() -> dict[str, Row]:
    """Return the rows of the table by name."""
    bundled = partial(dynamo, "bundled trace, 12,031 requests", Mooncake(), "mooncake")
    listed = {"dynamo-512": bundled(512, "2.5×", "10×"), "dynamo-16": bundled(16, "6×", "25×")}
    if short := os.environ.get(SYNTHETIC):
        requests = Mooncake(path=Path(short))
        shorter = partial(dynamo, "Mooncake's synthetic trace, 3,993 requests", requests, short)
        listed["short-512"] = shorter(512, "1.5×", "4×")
        listed["short-16"] = shorter(16, "3.5×", "10×")
    if azure := os.environ.get(AZURE):
        about = "Azure's conversation trace, 19,366 requests that share nothing"
        conversation = partial(dynamo, about, Azure(path=Path(azure)), azure)
        listed |= {f"azure-{block}": conversation(block) for block in (512, 16)}
    replicas = simulation("mooncake", 512, "--replicas", "64", "--router", "lmetric")
    saturated = [*KVCORE, "simulate", "--json", "--tensor-parallel", "2"]
    compare = [*KVCORE, "compare", "--json"]
    zipf = "zipf:requests=250000", "zipf:requests=1000000"
    million = (simulation(workload, 16, "--no-residency") for workload in zipf)
    return listed | {
        "lru": loop("lru", "150 ms", "10 ms"),
        "lfu": loop("lfu", "", "60 ms"),
        "arc": loop("arc", "", "100 ms"),
        "scheduler": loop("by-prompt", "", "20 ms"),
        "million": Row(
            "a million requests of `zipf`, block 16",
            processes(*million), growth, ("30 s", "4 s"), runs=1,
        ),
        **{
            f"tracing-{block}": Row(
                f"tracing, the loop alone, block {block}",
                part("tracing", block), tracing, ("1.3×", "1.3×"),
                "the loop with ids, and encoding the lines",
            )
            for block in ("512", "16")
        },
        **{
            f"residency-{block}": Row(
                f"residency of blocks, block {block}",
                processes(
                    simulation("mooncake", block, "--no-residency"),
                    simulation("mooncake", block),
                ),
                dearer, ("1.1×", "1.1×"), "`--no-residency`",
            )
            for block in (512, 16)
        },
        "start": Row(
            "start: `simulate` of one request",
            processes([*KVCORE, "simulate", "zipf:requests=1"]), seconds, ("50 ms", "50 ms"),
        ),
        "replicas": Row(
            "64 replicas, `lmetric`", processes(replicas), seconds, ("0.7 s", "0.15 s")
        ),
        "rules": Row(
            "under the rules of vLLM, block 16",
            processes([*KVCORE, "simulate", "--json", "--like", "vllm"]), seconds,
        ),
        "search": Row(
            "a saturated run and the search for the load that it takes",
            processes([*saturated, "--no-search"], saturated), dearer, beside="`--no-search`",
        ),
        "jobs": Row(
            "`compare --jobs 2`", processes(compare, [*compare, "--jobs", "2"]),
            dearer, ("1.1×", "1.1×"), "`--jobs 1`",
        ),
        "view": Row(
            "`view` of a million lines", page, with_memory, ("8 s, 500 MB",) * 2, runs=1
        ),
        "route": Row(
            "`route`, a request with a prompt of 4 kB",
            part("proxy"), routing, ("1.3×", "1.3×"), "a bare proxy on aiohttp",
        ),
        **{
            f"replay-{block}": Row(
                f"LRU replay, block {block}",
                part("replay", block), faster, aims, "LRU of blocks in an `OrderedDict`",
            )
            for block, aims in (("512", ("", "1.3×")), ("16", ("", "25×")))
        },
        "libcachesim": Row(
            "LRU replay, block 16", part("libcachesim"), faster,
            beside="libcachesim 0.3.5, in C", needs="libcachesim",
        ),
        "curve": Row(
            "LRU at all sizes of the pool", part("curve"), faster, ("50×", "50×"),
            "kvcache-simulator 0.1.3, in C++, at 30 sizes", "kvcache_sim",
        ),
        "vllm": Row(
            "`lru` in vLLM's cache manager", part("vllm"), dearer, ("2×", "2×"),
            "vLLM 0.33.0's own order", "vllm",
        ),
        "policies": Row(
            "an eviction among 20,000 leaves by the dearest policy",
            part("policies"), dearest, ("4×", "4×"), "`lru`",
        ),
        "sessions": Row(
            "LRU on 94 M references of sessions of coding agents",
            sessions, with_memory, ("", "20 s, 600 MB"), runs=3,
        ),
    }  # fmt: skip


def machine() -> str:
    """Return the processor, the number of its cores, Python, the day, and the load."""
    model = platform.processor() or platform.machine()
    if (file := Path("/proc/cpuinfo")).exists():
        lines = file.read_text("utf-8").splitlines()
        model = next((line for line in lines if line.startswith("model name")), model)
    return (
        f"{os.cpu_count()} cores of {model.rpartition(': ')[2]}, Python "
        f"{platform.python_version()}, {datetime.now(UTC):%d %B %Y}, load "
        f"{os.getloadavg()[0]:.1f}"
    )


def main(names: Sequence[str]) -> None:
    """Print the rows of these names, or all rows if there are none."""
    if core() is None:
        sys.exit("the core in C is not there: `kvcore --version -v` says why")
    print(f"{machine()}\n")
    heads = "work", "beside", "in Python alone", "aim", "with the core in C", "aim", "runs"
    print("|", " | ".join(heads), "|")
    print("|---" * len(heads) + "|")
    listed = rows()
    for name in names or listed:
        print("|", " | ".join(listed[name].cells()), "|", flush=True)
    print(f"\n{machine()}")


if __name__ == "__main__":
    main(sys.argv[1:])
