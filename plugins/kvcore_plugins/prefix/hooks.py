"""Registers the built-in prefix indexes."""

from __future__ import annotations

from kvcore import PrefixIndex
from kvcore.hookspecs import hookimpl
from kvcore_plugins.prefix.hashed import Hashed
from kvcore_plugins.prefix.none import NoPrefix
from kvcore_plugins.prefix.radix import Radix


@hookimpl
def kvcore_prefix_indexes() -> list[type[PrefixIndex]]:
    """Return the built-in prefix indexes."""
    return [Hashed, NoPrefix, Radix]
