"""Options of plugins that have bounds: one sentence refuses a value beyond them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from kvcore.errors import InputError
from kvcore.plugins import Plugin


def bounded(
    default: Any,
    what: str,
    *bounds: Callable[[Any, Any, Any], Any],
    error: str = "{name}: {option}={value!r} must be {what}",
) -> Any:
    """Return an option within bounds, which are validators of attrs.

    `what` is what its value must be, in the error `lruk: k=0 must be from 1 to 1,000`.
    """

    def check(plugin: Plugin, option: attrs.Attribute[Any], value: Any) -> None:
        try:
            for bound in bounds:
                bound(plugin, option, value)
        except (TypeError, ValueError):
            msg = error.format(name=plugin.name, option=option.name, value=value, what=what)
            raise InputError(msg) from None

    return attrs.field(default=default, validator=check)


def one_of(*known: str, default: str | None = None) -> Any:
    """Return an option that is one of some texts; without a default it is the first."""

    def check(plugin: Plugin, option: attrs.Attribute[Any], value: Any) -> None:
        if value not in known:
            what = f"is not known; there are: {', '.join(known)}"
            msg = f"{plugin.name}: {option.name}={value!r} {what}"
            raise InputError(msg)

    return attrs.field(default=default or known[0], validator=check)
