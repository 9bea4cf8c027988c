"""Sweeps: a grid of runs on many processes, which can be killed and resumed."""

from kvcore_lab.sweep.grid import AXES, MODES, Grid, Mode, axes_of
from kvcore_lab.sweep.journal import Journal
from kvcore_lab.sweep.plan import (
    Executor,
    Plan,
    Processes,
    RayCluster,
    Row,
    Sweep,
    executor_named,
    sweep,
)
from kvcore_lab.sweep.runner import CellRunner, Outcome, Task

__all__ = [
    "AXES",
    "MODES",
    "CellRunner",
    "Executor",
    "Grid",
    "Journal",
    "Mode",
    "Outcome",
    "Plan",
    "Processes",
    "RayCluster",
    "Row",
    "Sweep",
    "Task",
    "axes_of",
    "executor_named",
    "sweep",
]
