"""Packages that import a module when a name of it is first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


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
        if name not in places:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg)
        own[name] = found = getattr(import_module(f"{package}.{places[name]}"), name)
        return found

    return get, lambda: sorted({*own, *places, *modules})
