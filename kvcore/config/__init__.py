"""The configuration of a run: its options, and the parts that they make.

To read, in this order:

    options.py     every option, declared once; the modes
    run_config.py  the values of these for one run
    values.py      how they are read from text, TOML and objects
    files.py       TOML files
    parts.py       the parts that they make: workload, pool, cache, scheduler, latency
"""

from typing import TYPE_CHECKING

from kvcore.config.options import Option, SimulateOptions
from kvcore.config.parts import RunParts
from kvcore.config.run_config import RunConfig
from kvcore.config.values import read_plugin, read_slo
from kvcore.lazy import deferred
from kvcore.workloads.selection import find_workload

if TYPE_CHECKING:
    from kvcore.config.files import read_toml
else:
    __getattr__, __dir__ = deferred(__name__, {"files": "read_toml"})

__all__ = [
    "Option",
    "RunConfig",
    "RunParts",
    "SimulateOptions",
    "find_workload",
    "read_plugin",
    "read_slo",
    "read_toml",
]
