"""Registers the built-in backends."""

from __future__ import annotations

from kvcore import Backend
from kvcore.hookspecs import hookimpl


@hookimpl
def kvcore_backends() -> list[type[Backend]]:
    """Return the built-in backends."""
    return []
