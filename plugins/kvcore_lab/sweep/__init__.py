"""Sweeps: a grid of runs on many processes, which can be killed and resumed."""

from kvcore_lab.sweep.executors import Executor, Plan, Processes, RayCluster, Sweep, sweep
from kvcore_lab.sweep.grid import Grid
from kvcore_lab.sweep.journal import Journal

__all__ = ["Executor", "Grid", "Journal", "Plan", "Processes", "RayCluster", "Sweep", "sweep"]
