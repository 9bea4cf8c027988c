"""The hooks of kvcore, one for each kind of plugin, which return classes derived from `Plugin`.

A hook may also return the places of classes, as `package.module:Class` by the name of the
plugin; then a class is imported when it is first used.
"""

# Specifications have no body: pluggy reads their names and signatures.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvcore.plugins.base import Plugin

PROJECT = "kvcore"
"""Name of the pluggy project, and of the entry-point group of plugins."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as an implementation of the hook of the same name."""


@hookspec
def kvcore_eviction_policies() -> list[type[Plugin]] | dict[str, str]:
    """Return eviction policies, which choose the cached blocks to evict from a full pool."""


@hookspec
def kvcore_prefix_indexes() -> list[type[Plugin]] | dict[str, str]:
    """Return prefix indexes, which look up the cached blocks of a prompt."""


@hookspec
def kvcore_retention_policies() -> list[type[Plugin]] | dict[str, str]:
    """Return retention policies, which drop the K/V of tokens of a running sequence."""


@hookspec
def kvcore_schedulers() -> list[type[Plugin]] | dict[str, str]:
    """Return schedulers, which order waiting jobs, and choose jobs to preempt."""


@hookspec
def kvcore_latency_models() -> list[type[Plugin]] | dict[str, str]:
    """Return latency models, which compute the time of a step of a server."""


@hookspec
def kvcore_backends() -> list[type[Plugin]] | dict[str, str]:
    """Return backends, which store K/V as tensors, and compute attention over it."""


@hookspec
def kvcore_codecs() -> list[type[Plugin]] | dict[str, str]:
    """Return codecs, which encode the numbers of K/V in a block."""


@hookspec
def kvcore_tiers() -> list[type[Plugin]] | dict[str, str]:
    """Return tiers, which store blocks outside the pool."""


@hookspec
def kvcore_generators() -> list[type[Plugin]] | dict[str, str]:
    """Return generators, models that compute K/V and the next tokens from tokens."""


@hookspec
def kvcore_workloads() -> list[type[Plugin]] | dict[str, str]:
    """Return workloads, sources of recorded or generated requests."""


@hookspec
def kvcore_routers() -> list[type[Plugin]] | dict[str, str]:
    """Return routers, which choose the server of a cluster for a request."""


@hookspec
def kvcore_drafters() -> list[type[Plugin]] | dict[str, str]:
    """Return drafters, which propose tokens for speculative decoding."""
