"""Registers the built-in retention policies."""

from __future__ import annotations

from kvcore import RetentionPolicy, hookimpl
from kvcore_plugins.retention.window import Window


@hookimpl
def kvcore_retention_policies() -> list[type[RetentionPolicy]]:
    """Return the built-in retention policies."""
    return [Window]
