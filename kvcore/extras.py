"""Import of optional packages, at their first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvcore.errors import PluginError


def import_extra(module: str, needed: str, extra: str, instead: str = "") -> Any:
    """Import a module of a package that comes with an extra of kvcore.

    Args:
        module: the name of the module.
        needed: what needs it, as an error begins: `a plot needs matplotlib`.
        extra: the extra that has the package.
        instead: what can be done without it, as the error ends.

    Raises:
        PluginError: the package is not installed, or cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        msg = f"{needed} ({error}): pip install 'kvcore[{extra}]'{instead}"
        raise PluginError(msg) from error
