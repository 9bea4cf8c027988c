"""Imports when a name is first used, and imports of optional packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from kvcore.errors import PluginError


def deferred(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package that imports none of its modules.

    Args:
        package: the name of the package.
        modules: by module, the names that it defines, separated by spaces.
    """
    places = {name: module for module, names in modules.items() for name in names.split()}
    own = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name.startswith("__"):  # an import asks for `__path__`, which only packages have
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg)
        if name not in places:
            return import_module("kvcore.moved").former(package, name)
        own[name] = value = getattr(import_module(f"{package}.{places[name]}"), name)
        return value

    return get, lambda: sorted({*own, *places, *modules})


def former(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose names of the release before still work."""
    return deferred(package, {})[0]


def deferred_plugins(
    package: str, places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package of plugins, as `deferred` does.

    Args:
        package: the name of the package.
        places: the places of its plugins by their names, as a hook returns them; those that
            are not in a module of the package are left out.
    """
    modules: dict[str, str] = {}
    for import_path in places.values():
        module, _, name = import_path.partition(":")
        parent, _, module = module.rpartition(".")
        if parent == package:
            modules[module] = f"{modules.get(module, '')} {name}"
    return deferred(package, modules)


class LazyModule:
    """Stands in for a module, and imports it when one of its names is first used.

    For heavy modules, such as torch, in modules that are imported to be listed:

        if TYPE_CHECKING:
            import torch
        else:
            torch = LazyModule("torch", globals())

    Args:
        name: the name of the module, and of the variable.
        variables: the globals that have the variable, which becomes the module itself.
    """

    def __init__(self, name: str, variables: dict[str, Any]) -> None:
        self._name, self._variables = name, variables

    def __getattr__(self, name: str) -> Any:
        """Return a name of the module. Called once, as a rule."""
        module = self._variables[self._name] = import_module(self._name)
        return getattr(module, name)


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
