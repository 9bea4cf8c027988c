"""The configuration of a run: its options, how they are read, and the parts they make."""

from kvcore.config.files import read_toml
from kvcore.config.options import MODES, Mode, RunOptions, read_plugin, read_slo
from kvcore.config.parts import EngineParts, RunParts
from kvcore.config.run_config import RunConfig
from kvcore.workloads.selection import find_workload

__all__ = [
    "MODES",
    "EngineParts",
    "Mode",
    "RunConfig",
    "RunOptions",
    "RunParts",
    "find_workload",
    "read_plugin",
    "read_slo",
    "read_toml",
]
