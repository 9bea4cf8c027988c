"""Registers the built-in plugins, by the hooks that anyone's plugins come in by.

Each hook imports the folder of its kind when it is called, so that a command pays for the kinds
it uses.
"""

from __future__ import annotations

from importlib import import_module

from kvcore import hookimpl
from kvcore.plugins import Plugin


def _classes(folder: str) -> list[type[Plugin]]:
    """Return the classes that the package `folder` exports."""
    package = import_module(f"kvcore_plugins.{folder}")
    return [getattr(package, name) for name in package.__all__]


@hookimpl
def kvcore_eviction_policies() -> list[type[Plugin]]:
    """Return the built-in eviction policies."""
    return _classes("eviction")


@hookimpl
def kvcore_prefix_indexes() -> list[type[Plugin]]:
    """Return the built-in prefix indexes."""
    return _classes("prefix")


@hookimpl
def kvcore_retention_policies() -> list[type[Plugin]]:
    """Return the built-in retention policies."""
    return _classes("retention")


@hookimpl
def kvcore_schedulers() -> list[type[Plugin]]:
    """Return the built-in schedulers."""
    return _classes("scheduler")


@hookimpl
def kvcore_latency_models() -> list[type[Plugin]]:
    """Return the built-in latency models."""
    return _classes("latency")


@hookimpl
def kvcore_backends() -> list[type[Plugin]]:
    """Return the built-in backends."""
    return _classes("backend")


@hookimpl
def kvcore_codecs() -> list[type[Plugin]]:
    """Return the built-in codecs."""
    return _classes("codec")


@hookimpl
def kvcore_tiers() -> list[type[Plugin]]:
    """Return the built-in tiers."""
    return _classes("tier")


@hookimpl
def kvcore_generators() -> list[type[Plugin]]:
    """Return the built-in generators."""
    return _classes("generator")


@hookimpl
def kvcore_workloads() -> list[type[Plugin]]:
    """Return the built-in workloads."""
    return _classes("workload")


@hookimpl
def kvcore_routers() -> list[type[Plugin]]:
    """Return the built-in routers."""
    return _classes("router")


@hookimpl
def kvcore_drafters() -> list[type[Plugin]]:
    """Return the built-in drafters."""
    return _classes("drafter")
