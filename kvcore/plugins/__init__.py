"""Plugins: the base class, options from text, and the manager that loads and builds them."""

from kvcore.plugins.base import Plugin, find_override, option_fields, policy_error
from kvcore.plugins.manager import Plugins

__all__ = [
    "Plugin",
    "Plugins",
    "find_override",
    "option_fields",
    "policy_error",
]
