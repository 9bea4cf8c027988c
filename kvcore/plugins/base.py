"""What every plugin class has in common, whatever its kind."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from typing import Any, ClassVar

import attrs

from kvcore.errors import InputError, PolicyError


@attrs.define(slots=False, eq=False)
class Plugin(ABC):
    """Base of the plugin kinds. Options are attrs fields whose names are public."""

    kind: ClassVar[str]
    name: ClassVar[str]

    _bound: bool = attrs.field(init=False, default=False, repr=False)

    def bind(self) -> None:
        """Take this instance into use. Raises InputError if something uses it already."""
        if self._bound:
            msg = f"this {self.kind} plugin {self.name!r} is in use already: build another one"
            raise InputError(msg)
        self._bound = True

    @classmethod
    def unavailable(cls) -> str | None:
        """Say why this plugin cannot work here (no GPU, an extra missing), or None."""
        return None

    def options(self) -> dict[str, Any]:
        """Return the options this instance was built with, by name."""
        return {field.name: getattr(self, field.name) for field in option_fields(type(self))}


def option_fields(cls: type[Plugin]) -> list[attrs.Attribute[Any]]:
    """Return the attrs fields of `cls` that are options: public and settable."""
    return [f for f in attrs.fields(cls) if f.init and not f.name.startswith("_")]


def find_override(plugin: Plugin, method: str) -> Callable[..., Any] | None:
    """Return the bound `method` of `plugin`, or None if it is the kind's own empty one.

    Callers choose once, so a method that nobody overrides costs nothing.
    """
    contract = next(base for base in type(plugin).__mro__ if "kind" in vars(base))
    if getattr(type(plugin), method) is getattr(contract, method):
        return None
    bound: Callable[..., Any] = getattr(plugin, method)
    return bound


def policy_error(plugin: Plugin, method: str, error: Exception) -> PolicyError:
    """Return the error that says that `plugin` raised `error` in `method`."""
    cls = type(plugin)
    *_, frame = extract_tb(error.__traceback__)
    where = f"{Path(frame.filename).name}:{frame.lineno}, {frame.name}"
    return PolicyError(
        f"{plugin.kind} plugin {plugin.name!r} ({cls.__module__}.{cls.__qualname__}) raised "
        f"{type(error).__name__} in {method}(): {error} ({where})"
    )
