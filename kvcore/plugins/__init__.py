"""Plugins: the base class, options from text, and the manager that loads and builds them."""

from kvcore.plugins.base import Plugin, describe, find_override, options_of, policy_error
from kvcore.plugins.manager import Plugins, resolve
from kvcore.plugins.options import nearest

__all__ = [
    "Plugin",
    "Plugins",
    "describe",
    "find_override",
    "nearest",
    "options_of",
    "policy_error",
    "resolve",
]
