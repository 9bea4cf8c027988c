"""Registers the built-in schedulers."""

from __future__ import annotations

from kvcore import Scheduler, hookimpl
from kvcore_plugins.scheduler.fair import Fair
from kvcore_plugins.scheduler.fcfs import FCFS
from kvcore_plugins.scheduler.lpm import LPM
from kvcore_plugins.scheduler.priority import Priority
from kvcore_plugins.scheduler.sjf import SJF
from kvcore_plugins.scheduler.slo import LeastSlack
from kvcore_plugins.scheduler.srpt import SRPT


@hookimpl
def kvcore_schedulers() -> list[type[Scheduler]]:
    """Return them."""
    return [FCFS, LPM, SJF, SRPT, Fair, LeastSlack, Priority]
