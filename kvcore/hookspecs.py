"""The hooks of kvcore: one a kind of plugin. Each returns classes, derived from `Plugin`.

Or it returns where they are, as `package.module:Class` by the plugin's name: then a class is
imported when it is asked for.
"""

# Specifications have no body: pluggy reads their names and signatures.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvcore.plugins.base import Plugin

PROJECT = "kvcore"
"""Name of the pluggy project, and of the entry-point group that plugins are found in."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of the hook that it is named after."""


@hookspec
def kvcore_eviction_policies() -> list[type[Plugin]] | dict[str, str]:
    """Return eviction policies: which cached blocks leave when the pool is full."""


@hookspec
def kvcore_prefix_indexes() -> list[type[Plugin]] | dict[str, str]:
    """Return prefix indexes: where the cached blocks of a prompt are looked up."""


@hookspec
def kvcore_retention_policies() -> list[type[Plugin]] | dict[str, str]:
    """Return retention policies: which tokens of a running sequence need no K/V any longer."""


@hookspec
def kvcore_schedulers() -> list[type[Plugin]] | dict[str, str]:
    """Return schedulers: which waiting jobs run next, and which running ones are preempted."""


@hookspec
def kvcore_latency_models() -> list[type[Plugin]] | dict[str, str]:
    """Return latency models: how long a step of a server takes."""


@hookspec
def kvcore_backends() -> list[type[Plugin]] | dict[str, str]:
    """Return backends: where K/V lies as tensors, and how queries read it."""


@hookspec
def kvcore_codecs() -> list[type[Plugin]] | dict[str, str]:
    """Return codecs: how the numbers of K/V lie in a block."""


@hookspec
def kvcore_tiers() -> list[type[Plugin]] | dict[str, str]:
    """Return tiers: where blocks rest outside the pool."""


@hookspec
def kvcore_generators() -> list[type[Plugin]] | dict[str, str]:
    """Return generators: models that turn tokens into K/V and the next tokens."""


@hookspec
def kvcore_workloads() -> list[type[Plugin]] | dict[str, str]:
    """Return workloads: sources of requests, recorded or generated."""


@hookspec
def kvcore_routers() -> list[type[Plugin]] | dict[str, str]:
    """Return routers: which server of a cluster gets a request."""


@hookspec
def kvcore_drafters() -> list[type[Plugin]] | dict[str, str]:
    """Return drafters: tokens that the model verifies in one step, speculative decoding."""
