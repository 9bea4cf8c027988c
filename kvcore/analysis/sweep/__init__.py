"""Sweeps: a grid of runs on many processes, which can be killed and resumed."""

from kvcore.analysis.sweep.grid import AXES, MODES, Grid, Mode, axes_of
from kvcore.analysis.sweep.journal import Journal
from kvcore.analysis.sweep.plan import (
    Executor,
    Plan,
    Processes,
    RayCluster,
    Row,
    Sweep,
    executor_named,
    sweep,
)
from kvcore.analysis.sweep.runner import CellRunner, Outcome, Task

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
