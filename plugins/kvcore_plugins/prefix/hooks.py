"""Registers the built-in prefix caches."""

from __future__ import annotations

from kvcore import PrefixCache
from kvcore.hookspecs import hookimpl
from kvcore_plugins.prefix.none import NoPrefix
from kvcore_plugins.prefix.radix import Radix


@hookimpl
def kvcore_prefix_caches() -> list[type[PrefixCache]]:
    """Return the built-in prefix caches."""
    return [NoPrefix, Radix]
