"""Values of options that are more than text or a number: a plugin, a size, an SLO."""

from __future__ import annotations

from typing import Any

import click

from kvcore.errors import InputError
from kvcore.request import SLO
from kvcore.specs import Spec, nearest, parse
from kvcore.units import parse_bytes, parse_seconds

EXPECTATIONS = ("ttft", "tpot", "deadline")
"""What an SLO may expect, in seconds."""


class PluginType(click.ParamType):
    """One plugin with its options, such as `lfu:half_life=300`."""

    name = "plugin"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Spec:
        """Read the text; a plugin that is read already is as good."""
        del param, ctx
        return value if isinstance(value, Spec) else read_plugin(value)


class SizeType(click.ParamType):
    """Bytes, such as `40GiB`."""

    name = "size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read the text."""
        del param, ctx
        return value if isinstance(value, int) else parse_bytes(value)


class SLOType(click.ParamType):
    """What clients expect, such as `ttft=30,tpot=0.1`, or `none`."""

    name = "slo"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> SLO:
        """Read the text."""
        del param, ctx
        return value if isinstance(value, SLO) else read_slo(value)


def read_plugin(text: str) -> Spec:
    """Read one plugin with its options.

    Raises:
        InputError: none, or several.
    """
    specs = parse(text)
    if len(specs) != 1:
        msg = f"{text!r} names {len(specs)} plugins where one is needed"
        raise InputError(msg)
    return specs[0]


def read_slo(text: str) -> SLO:
    """Read seconds by name; `none` is an SLO that expects nothing.

    Raises:
        InputError: another name than those of `EXPECTATIONS`, or no seconds above 0.
    """
    if text == "none":
        return SLO()
    expected = {}
    for name, seconds in read_plugin(f"slo:{text}").options.items():
        if name not in EXPECTATIONS:
            known = ", ".join(EXPECTATIONS)
            msg = (
                f"{name!r} is nothing an SLO says{nearest(name, EXPECTATIONS)}; it says {known}"
            )
            raise InputError(msg)
        expected[name] = parse_seconds(seconds)
    return SLO(**expected)


PLUGIN, SIZE, OBJECTIVE = PluginType(), SizeType(), SLOType()
