"""Sweeps: a grid of runs over many processes, which can be killed and goes on."""

from kvcore.analysis.sweep.executors import Outcome, Processes, RayCluster, Task
from kvcore.analysis.sweep.grid import AXES, MODES, Cell, Grid, Mode, axes_of
from kvcore.analysis.sweep.journal import Journal
from kvcore.analysis.sweep.runner import Executor, Plan, Row, Sweep, executor_named, sweep

__all__ = [
    "AXES",
    "MODES",
    "Cell",
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
