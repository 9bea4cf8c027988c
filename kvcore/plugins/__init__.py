"""Plugins: the base class, options from text, and the manager that loads and builds them."""

from kvcore.plugins.base import Plugin, broken, option_fields, overridden
from kvcore.plugins.manager import Plugins

__all__ = [
    "Plugin",
    "Plugins",
    "broken",
    "option_fields",
    "overridden",
]
