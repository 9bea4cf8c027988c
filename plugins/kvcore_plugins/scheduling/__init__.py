"""Built-in schedulers."""

from kvcore_plugins.scheduling.fair import Fair
from kvcore_plugins.scheduling.fcfs import FCFS
from kvcore_plugins.scheduling.lpm import LPM
from kvcore_plugins.scheduling.priority import Priority
from kvcore_plugins.scheduling.sjf import SJF
from kvcore_plugins.scheduling.slo import LeastSlack
from kvcore_plugins.scheduling.srpt import SRPT

__all__ = ["FCFS", "LPM", "SJF", "SRPT", "Fair", "LeastSlack", "Priority"]
