"""Registers the built-in workloads."""

from __future__ import annotations

from kvcore import Workload, hookimpl
from kvcore_plugins.workload import (
    Azure,
    Jsonl,
    KvEvents,
    Lengths,
    LMCache,
    Mooncake,
    Recording,
    Weka,
    Zipf,
)


@hookimpl
def kvcore_workloads() -> list[type[Workload]]:
    """Return the built-in workload classes."""
    return [Azure, Jsonl, KvEvents, Lengths, LMCache, Mooncake, Recording, Weka, Zipf]
