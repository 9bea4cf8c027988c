"""The built-in workloads: recorded traces of several formats, and synthetic requests."""

from kvcore_plugins.workloads.azure import Azure
from kvcore_plugins.workloads.jsonl import Jsonl
from kvcore_plugins.workloads.mooncake import Mooncake
from kvcore_plugins.workloads.weka import Weka
from kvcore_plugins.workloads.zipf import Zipf

__all__ = ["Azure", "Jsonl", "Mooncake", "Weka", "Zipf"]
