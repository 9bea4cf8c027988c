"""Plugins: the base class, options from text, and the manager that loads and builds them."""

from kvcore.plugins.base import Plugin, broken, describe, options_of, overridden
from kvcore.plugins.manager import Plugins, resolve
from kvcore.plugins.options import nearest

__all__ = [
    "Plugin",
    "Plugins",
    "broken",
    "describe",
    "nearest",
    "options_of",
    "overridden",
    "resolve",
]
