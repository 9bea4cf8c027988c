"""Every hook of kvcore: one a kind. A hook returns classes; nothing else is ever asked."""

# Specifications have no body: pluggy reads their names and signatures.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvcore.cache import EvictionPolicy, PrefixIndex, RetentionPolicy
    from kvcore.engine import Backend, Generator
    from kvcore.serving import LatencyModel, Scheduler
    from kvcore.workloads import Workload

PROJECT = "kvcore"
"""Name of the pluggy project, and of the entry-point group that plugins are found in."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kvcore_eviction_policies() -> list[type[EvictionPolicy]]:
    """Return eviction policies: which cached blocks leave when the pool is full."""


@hookspec
def kvcore_prefix_indexes() -> list[type[PrefixIndex]]:
    """Return prefix caches: which cached blocks a new prompt can use again."""


@hookspec
def kvcore_retention_policies() -> list[type[RetentionPolicy]]:
    """Return retention policies: what a sequence that is still running may forget."""


@hookspec
def kvcore_schedulers() -> list[type[Scheduler]]:
    """Return schedulers: who gets a seat in the batch, and who loses it."""


@hookspec
def kvcore_latency_models() -> list[type[LatencyModel]]:
    """Return latency models: how long a step of a server takes."""


@hookspec
def kvcore_backends() -> list[type[Backend]]:
    """Return backends: where K/V lies as tensors, and how queries read it."""


@hookspec
def kvcore_generators() -> list[type[Generator]]:
    """Return generators: models, as far as their K/V and next tokens go."""


@hookspec
def kvcore_workloads() -> list[type[Workload]]:
    """Return workloads: sources of requests, recorded or generated."""
