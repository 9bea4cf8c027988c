"""Names of the release before, and where they are now, for one release.

A module that has moved is still imported by its former name: it is then an empty module, which
imports what is asked of it from the module of today, with a FutureWarning. The conformance kits
keep their former name, without a warning.

Beside `kvcore/__init__.py` the table of these is the only file of the core that names packages.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module, machinery, util
from importlib.abc import Loader
from importlib.resources import files
from types import ModuleType
from typing import Any

from kvcore import _load

ALIASES = {"kvcore.testing": "kvcore_testing"}
"""Packages that are imported by another name too, with their modules."""

TABLE = dict(
    line.split()
    for line in (files("kvcore") / "moved.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
)
"""Where modules, and names as `module:name`, of the release before are today."""


def former(module: str, name: str) -> Any:
    """Return what a name of a module was in the release before.

    Called by the `__getattr__` of the module. Whoever asked for the name gets a FutureWarning:
    one, although `from module import name` asks twice, since the module keeps the value.

    Raises:
        AttributeError: the module had no such name.
        ImportError: the package that has it now is not installed.
    """
    old = f"{module}.{name}"
    new = TABLE.get(f"{module}:{name}")
    if new is None:
        if find_spec(old):
            return import_module(old)
        if module not in TABLE or name.startswith("__"):
            msg = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(msg)
        new = f"{TABLE[module]}:{name}"
    home, _, attribute = new.partition(":")
    value = getattr(_load(old, home), attribute)
    text = f"{old} is {home}.{attribute} now; import that"
    warnings.warn(text, FutureWarning, stacklevel=3)
    setattr(sys.modules[module], name, value)
    return value


def _names(module: str, mark: str) -> list[str]:
    """Return the modules (`.`) or other names (`:`) that a module had."""
    rows = [old.removeprefix(module + mark) for old in TABLE if old.startswith(module + mark)]
    return [name for name in rows if name.isidentifier()]


def find_spec(name: str) -> machinery.ModuleSpec | None:
    """Return the spec of a module by its former name or an alias; None if there is none."""
    package, _, base = name.rpartition(".")
    real = ALIASES.get(name, f"{sys.modules[package].__name__}.{base}")
    if real == name:
        modules = _names(name, ".")
        if name in TABLE or modules or _names(name, ":"):
            today = TABLE.get(name)
            return machinery.ModuleSpec(name, _Former(), origin=today, is_package=bool(modules))
    elif spec := util.find_spec(real):
        folders = spec.submodule_search_locations
        return util.spec_from_file_location(
            name, spec.origin, loader=_Alias(real), submodule_search_locations=folders
        )
    elif name in ALIASES:  # whose import says what is not installed
        return machinery.ModuleSpec(name, _Alias(real))
    return None


class _Former(Loader):
    """Makes a module of the release before, whose names are found when they are asked for."""

    def exec_module(self, module: ModuleType) -> None:
        name, own = module.__name__, vars(module)
        own["__getattr__"] = lambda attribute: former(name, attribute)
        own["__dir__"] = lambda: {*own, *_names(name, "."), *_names(name, ":")}


class _Alias(Loader):
    """Gives a module of today a second name: the module itself, never a copy."""

    def __init__(self, real: str) -> None:
        self._real = real

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = _load(module.__name__, self._real)

    def get_code(self, _: str) -> Any:
        """Return the code that `python -m` runs."""
        spec: Any = util.find_spec(self._real)
        return spec.loader.get_code(self._real)
