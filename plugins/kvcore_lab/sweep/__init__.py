"""Sweeps: a grid of runs on many processes, which can be killed and resumed."""

from kvcore_lab.sweep.cells import CellRunner, Outcome, Task
from kvcore_lab.sweep.executors import (
    Executor,
    Plan,
    Processes,
    RayCluster,
    Row,
    Sweep,
    executor_named,
    sweep,
)
from kvcore_lab.sweep.grid import AXES, MODES, Grid, Mode, axes_of
from kvcore_lab.sweep.journal import Journal

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
