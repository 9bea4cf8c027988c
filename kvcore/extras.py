"""Imports of optional packages, at their first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvcore.errors import PluginError


def import_extra(module: str, needed: str, extra: str, instead: str = "") -> Any:
    """Import and return a module of a package that an extra of kvcore installs.

    Args:
        module: the name of the module.
        needed: the beginning of the error text, such as `a plot needs matplotlib`.
        extra: the name of the extra.
        instead: the end of the error text, with another way to reach the goal.

    Raises:
        PluginError: the package is not installed, or cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        msg = f"{needed} ({error}): pip install 'kvcore[{extra}]'{instead}"
        raise PluginError(msg) from error
