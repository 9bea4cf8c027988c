"""Built-in schedulers."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred_plugins

if TYPE_CHECKING:
    from kvcore_plugins.scheduler.fair import Fair
    from kvcore_plugins.scheduler.fcfs import FCFS
    from kvcore_plugins.scheduler.lpm import LPM
    from kvcore_plugins.scheduler.priority import Priority
    from kvcore_plugins.scheduler.sjf import SJF
    from kvcore_plugins.scheduler.slo import LeastSlack
    from kvcore_plugins.scheduler.srpt import SRPT
else:
    from kvcore_plugins.hooks import kvcore_schedulers

    __getattr__, __dir__ = deferred_plugins(__name__, kvcore_schedulers())

__all__ = ["FCFS", "LPM", "SJF", "SRPT", "Fair", "LeastSlack", "Priority"]
