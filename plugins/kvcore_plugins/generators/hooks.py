"""Registers the built-in generators."""

from __future__ import annotations

from kvcore import Generator
from kvcore.hookspecs import hookimpl


@hookimpl
def kvcore_generators() -> list[type[Generator]]:
    """Return the built-in generators."""
    return []
