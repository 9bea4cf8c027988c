"""Registers the built-in workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.hookspecs import hookimpl
from kvcore_plugins.workloads import Azure, Jsonl, Mooncake, Weka, Zipf

if TYPE_CHECKING:
    from kvcore.policy import Workload


@hookimpl
def kvcore_workloads() -> list[type[Workload]]:
    """Return the built-in workload classes."""
    return [Azure, Jsonl, Mooncake, Weka, Zipf]
