"""What a comparison of the bundled trace takes of memory, whatever the size of the pool."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT_MB = 150

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
    """One policy in blocks of 16 tokens stays under 150 MB, with 100 M blocks too."""
    program = [sys.executable, "-c", "from kvcore.cli.main import main; main()", "compare"]
    options = ["--eviction", eviction, "--blocks", str(blocks), "--block-size", "16"]
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, *program, *options],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    megabytes = int(measured.stdout) * UNIT / 1e6
    print(f"\n{eviction} with {blocks:,} blocks of 16: peak {megabytes:.0f} MB")
    assert megabytes < LIMIT_MB
