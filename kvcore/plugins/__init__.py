"""Plugins: the base class, options from text, and the manager that builds them."""

from kvcore.plugins.base import (
    FAILURES,
    Plugin,
    describe,
    find_override,
    options_of,
    policy_error,
    wrong_answer,
)
from kvcore.plugins.manager import Plugins, resolve
from kvcore.plugins.options import nearest

__all__ = [
    "FAILURES",
    "Plugin",
    "Plugins",
    "describe",
    "find_override",
    "nearest",
    "options_of",
    "policy_error",
    "resolve",
    "wrong_answer",
]
