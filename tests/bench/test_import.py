"""The time of `import kvcore`."""

from __future__ import annotations

import subprocess
import sys

from bench.harness import medians

PROGRAM = """
from time import perf_counter
start = perf_counter()
import kvcore
print(perf_counter() - start)
"""


def test_print_the_time_of_an_import() -> None:
    """Print the time of `import kvcore` in a fresh process; the target is under 150 ms."""

    def once() -> float:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    (seconds,) = medians(5, once)
    print(f"\nimport kvcore: {seconds * 1e3:.0f} ms")
