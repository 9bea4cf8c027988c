"""The peak memory of comparisons: the bundled trace, and a hundred million references."""

from __future__ import annotations

import subprocess
import sys

import pytest
from bench.harness import measured
from helpers.sessions import write_sessions

LIMIT_MB = 150

SESSIONS = 710
SESSIONS_MB = 600
SLOWER = 4.3

# The peak of a process includes that of the one it was forked from, so a small process
# stands between the command and the tests.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
UNIT = 1 if sys.platform == "darwin" else 1024


@pytest.mark.parametrize("blocks", [187_488, 100_000_000])
@pytest.mark.parametrize("eviction", ["lru", "lfu", "optimum"])
def test_peak_memory_at_block_16(eviction, blocks):
    """Comparing one policy at block size 16 peaks below 150 MB, even with 100 M blocks."""
    program = [sys.executable, "-c", "from kvcore_cli.main import main; main()", "compare"]
    options = ["--eviction", eviction, "--blocks", str(blocks), "--block-size", "16"]
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, *program, *options],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    megabytes = int(measured.stdout) * UNIT / 1e6
    print(f"\n{eviction} with {blocks:,} blocks of 16: peak {megabytes:.0f} MB")
    assert megabytes < LIMIT_MB


def test_memory_and_time_of_a_hundred_million_references(tmp_path):
    """Comparing 710 sessions peaks below 600 MB, in time linear in the references.

    It takes less than 4.3 times the CPU time of a quarter of the sessions: blocks that each
    turn repeats are not read again.
    """
    found = []
    for sessions in (SESSIONS // 4, SESSIONS):
        path = tmp_path / f"{sessions}.jsonl.gz"
        references = write_sessions(path, sessions)
        command = ["-m", "kvcore", "compare", f"weka:{path}", "--eviction", "lru"]
        taken = measured(sys.executable, *command, "--blocks", "100000", "--json")
        path.unlink()
        found.append(taken.cpu)
        print(
            f"\n{sessions} sessions, {references / 1e6:.0f} M references, LRU and no bound: "
            f"{taken.cpu:.1f} s of CPU, {taken.seconds:.1f} s, peak {taken.peak_mb:.0f} MB"
        )
    assert taken.peak_mb < SESSIONS_MB
    assert found[1] / found[0] < SLOWER
