"""Sweeps: a grid of runs over many processes, which can be killed and goes on."""

from kvcore.lab.sweeping.bench import Outcome, Task
from kvcore.lab.sweeping.cell import AXES, MODES, Cell, Grid, Mode, axes_of
from kvcore.lab.sweeping.cluster import RayCluster
from kvcore.lab.sweeping.journal import Journal
from kvcore.lab.sweeping.local import Processes
from kvcore.lab.sweeping.sweep import Executor, Plan, Row, Sweep, executor_named, sweep

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
