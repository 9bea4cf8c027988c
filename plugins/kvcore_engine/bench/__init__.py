"""Measurements of this machine and of kvcore on it, for `kvcore bench`.

Suites of operations on tensors, on a CPU or a GPU, are compared with the rates of the memory;
suites of the cache and the simulator with a plain loop and with installed peers.
"""

from kvcore_engine.bench.machine import describe_machine
from kvcore_engine.bench.result import BenchResult, Ceiling, Row, Settings, Target
from kvcore_engine.bench.suites import SUITES, available_suites, run_suites

__all__ = [
    "SUITES",
    "BenchResult",
    "Ceiling",
    "Row",
    "Settings",
    "Target",
    "available_suites",
    "describe_machine",
    "run_suites",
]
