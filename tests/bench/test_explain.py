"""The cost of classifying misses, against a replay that only checks the same trace."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

from bench.harness import POOL, measured, medians

from kvcore_lab.comparison import compare_policies
from kvcore_plugins.workload import Mooncake
from kvcore_replay.check.trace import check_trace
from kvcore_replay.misses.explain import explain

RUNS = 3
PROMISED = 5
PROMISED_MB = 300


def test_a_summary_takes_at_most_five_replays(tmp_path: Path) -> None:
    """A summary of the bundled trace takes at most 5 times a replay, and below 300 MB."""
    file = tmp_path / "trace.jsonl"
    compare_policies(Mooncake(), "lru", POOL, trace=file)

    def replaying() -> float:
        start = perf_counter()
        check_trace(file)
        return perf_counter() - start

    def explaining() -> float:
        start = perf_counter()
        explain(file).summary()
        return perf_counter() - start

    plain, full = medians(RUNS, replaying, explaining)
    command = ("-m", "kvcore", "explain", str(file), "--summary", "--json")
    process = measured(sys.executable, *command)
    print(
        f"\nexplain --summary of the bundled trace: {full:.2f} s, a replay {plain:.2f} s: "
        f"{full / plain:.2f} x  (promised {PROMISED})\n"
        f"  as a process: {process.seconds:.2f} s, peak {process.peak_mb:.0f} MB  "
        f"(promised {PROMISED_MB})"
    )
    assert full <= PROMISED * plain
    assert process.peak_mb < PROMISED_MB
