"""The built-in workloads: recorded traces of several formats, and synthetic requests."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred_plugins

if TYPE_CHECKING:
    from kvcore_plugins.workload.azure import Azure
    from kvcore_plugins.workload.bench import Bench
    from kvcore_plugins.workload.chat import Chat
    from kvcore_plugins.workload.jsonl import Jsonl
    from kvcore_plugins.workload.lengths import Lengths
    from kvcore_plugins.workload.lmcache import LMCache
    from kvcore_plugins.workload.mooncake import Mooncake
    from kvcore_plugins.workload.trace import Recording
    from kvcore_plugins.workload.weka import Weka
    from kvcore_plugins.workload.zipf import Zipf
else:
    from kvcore_plugins.hooks import kvcore_workloads

    __getattr__, __dir__ = deferred_plugins(__name__, kvcore_workloads())

__all__ = [
    "Azure",
    "Bench",
    "Chat",
    "Jsonl",
    "LMCache",
    "Lengths",
    "Mooncake",
    "Recording",
    "Weka",
    "Zipf",
]
