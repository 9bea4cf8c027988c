"""The built-in workloads: recorded traces of several formats, and synthetic requests."""

from kvcore_plugins.workloads.azure import Azure
from kvcore_plugins.workloads.jsonl import Jsonl
from kvcore_plugins.workloads.kv_events import KvEvents
from kvcore_plugins.workloads.lengths import Lengths
from kvcore_plugins.workloads.lmcache import LMCache
from kvcore_plugins.workloads.mooncake import Mooncake
from kvcore_plugins.workloads.trace import Recording
from kvcore_plugins.workloads.weka import Weka
from kvcore_plugins.workloads.zipf import Zipf

__all__ = [
    "Azure",
    "Jsonl",
    "KvEvents",
    "LMCache",
    "Lengths",
    "Mooncake",
    "Recording",
    "Weka",
    "Zipf",
]
