"""Options that are more than text or a number: a plugin, a size, an SLO."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from kvcore.errors import InputError
from kvcore.request import SLO
from kvcore.specs import Spec, nearest, parse
from kvcore.units import parse_bytes, parse_seconds

EXPECTATIONS = ("ttft", "tpot", "deadline")
"""What an SLO may expect, in seconds."""


def read_plugin(text: str) -> Spec:
    """Read one plugin with its options, such as `lfu:half_life=300`.

    Raises:
        InputError: none, or several.
    """
    specs = parse(text)
    if len(specs) != 1:
        msg = f"{text!r} names {len(specs)} plugins where one is needed"
        raise InputError(msg)
    return specs[0]


def read_slo(text: str) -> SLO:
    """Read what clients expect, such as `ttft=30,tpot=0.1`; `none` is nothing.

    Raises:
        InputError: another name than those of `EXPECTATIONS`, or no seconds above 0.
    """
    if text == "none":
        return SLO()
    if "=" not in text.partition(",")[0]:
        msg = f"{text!r} is no SLO; write one such as ttft=30,tpot=0.1, or none"
        raise InputError(msg)
    expected = {}
    for name, seconds in read_plugin(f"slo:{text}").options.items():
        if name not in EXPECTATIONS:
            known = ", ".join(EXPECTATIONS)
            msg = f"an SLO has no {name!r}{nearest(name, EXPECTATIONS)}; it may have {known}"
            raise InputError(msg)
        expected[name] = parse_seconds(seconds)
    return SLO(**expected)


def _reading(read: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a callback that reads the text of an option; what is read already stays."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return read(value) if isinstance(value, str) else value
        except InputError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return callback


_option = partial(click.option, type=click.UNPROCESSED)

plugin_option = partial(_option, callback=_reading(read_plugin), metavar="PLUGIN")
size_option = partial(_option, callback=_reading(parse_bytes), metavar="SIZE")
slo_option = partial(_option, callback=_reading(read_slo), metavar="SLO")
