"""Read the values of options: from text, from tables of TOML, or from objects.

A type of a value is one of `READERS`, a `Literal`, a list of one of these, one of these or
None, or `Annotated` with the function that reads it. The types of options are at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, Union, get_args, get_origin

from kvcore.errors import InputError
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.plugins import Plugin
from kvcore.plugins.manager import check_name
from kvcore.plugins.options import Spec, as_text, nearest, parse
from kvcore.request import SLO
from kvcore.trace.fields import EXPECTATIONS
from kvcore.units import (
    check_whole,
    parse_bytes,
    parse_seconds,
    parse_whole,
    parse_window,
    seconds_text,
)
from kvcore.untrusted import parse_digits
from kvcore.workloads import Workload, given_workload

EMPTY_PATH = "empty path; name a file"


def convert(value: object, kind: Any) -> Any:
    """Return `value` as a value of the type `kind`.

    Raises:
        InputError: `value` cannot be read as that type; says what was expected.
    """
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        (kind,) = (member for member in get_args(kind) if member is not NoneType)
        return None if value is None else convert(value, kind)
    if origin is Literal:
        return _choice(value, get_args(kind))
    if origin is list:
        (entry_kind,) = get_args(kind)
        if not isinstance(value, (list, tuple)):
            refuse("a list", value)
        return [convert(entry, entry_kind) for entry in value]
    if origin is Annotated:
        _, read = get_args(kind)
        return read(value)
    return READERS[kind](value)


def read_plugin(text: str) -> Spec:
    """Read one plugin with its options, such as `lfu:half_life=300`.

    Raises:
        InputError: `text` names no plugin, or several.
    """
    specs = parse(text)
    if len(specs) != 1:
        msg = f"{text!r} names {len(specs)} plugins where one is needed"
        raise InputError(msg)
    return specs[0]


def read_slo(text: str) -> SLO:
    """Read an SLO such as `ttft=30,tpot=0.1`, in seconds; `none` expects nothing.

    Raises:
        InputError: an unknown name, or a time that is not above 0.
    """
    if text == "none":
        return SLO()
    if "=" not in text.partition(",")[0]:
        msg = f"{text!r} is no SLO; write one such as ttft=30,tpot=0.1, or none"
        raise InputError(msg)
    # An SLO is written as the options of a plugin are, without its name.
    return _slo_of(read_plugin(f"slo:{text}").options)


def slo_text(slo: SLO) -> str:
    """Return an SLO as `read_slo` reads it, such as `ttft=30,tpot=0.1`."""
    times = ((name, getattr(slo, f"{name}_ns")) for name in EXPECTATIONS)
    return ",".join(f"{name}={seconds_text(ns)}" for name, ns in times if ns) or "none"


def tiers_text(tiers: Iterable[object]) -> str:
    """Return tiers as an option reads them, or `none`."""
    return ",".join(map(str, tiers)) or "none"


def shown(value: object) -> str:
    """Return a value for an error message: text in quotes, true and false as TOML has them."""
    return repr(value) if isinstance(value, str) else f"{as_text(value):.60}"


def refuse(expected: str, value: object) -> NoReturn:
    """Raise InputError for a value of another type than the `expected` one."""
    kinds: dict[type, str] = {dict: "a table", list: "a list", tuple: "a list"}
    msg = f"expected {expected}, not {kinds.get(type(value)) or shown(value)}"
    raise InputError(msg)


def as_whole(value: object) -> int:
    """Return a whole number, which text may have with a unit."""
    if isinstance(value, str):
        return parse_whole(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return check_whole(int(value))  # NumPy's too
    refuse("a whole number", value)


def as_natural(value: object) -> int:
    """Return a whole number of 0 or more."""
    return check_whole(as_whole(value), 0)


def as_bytes(value: object) -> int:
    """Return a number of bytes; text has a unit, such as `40GiB`."""
    if isinstance(value, str):
        return parse_bytes(value)
    if isinstance(value, Integral):
        return as_whole(value)
    refuse("a number of bytes, such as '40GiB'", value)


LEAST_WINDOW = 1_000_000
"""Nanoseconds below which the times of a window are taken for seconds, by mistake."""


class _ReadWindow(tuple[int, int | None]):
    """A window of time in ns that was text, so that its times are none in seconds."""

    __slots__ = ()


def as_window(value: object) -> Any:
    """Return a window of time in ns; text has seconds, such as `60:120`."""
    if isinstance(value, str):
        return _ReadWindow(parse_window(value))
    if not isinstance(value, tuple):
        refuse("a window of time in seconds, such as '60:120'", value)
    types = [*map(type, value)]  # true and false are integers otherwise
    start, end = value if types in ([int, int], [int, NoneType]) else (-1, None)
    if start < 0 or (end is not None and start >= end):
        msg = (
            "expected a window of time in ns, such as (0, 10**9) or (10**9, None), "
            f"not {value!r:.60}"
        )
        raise InputError(msg)
    if 0 < (end or start) < LEAST_WINDOW and not isinstance(value, _ReadWindow):
        seconds = ":".join("" if time is None else str(time) for time in value)
        msg = f"{value!r} has nanoseconds; for seconds give the text {seconds!r}"
        raise InputError(msg)
    return value


def as_slo(value: object) -> SLO:
    """Return an SLO; text and tables have seconds, and None expects nothing."""
    if value is None:
        return SLO()
    if isinstance(value, SLO):
        return value
    if isinstance(value, str):
        return read_slo(value)
    if isinstance(value, Mapping):
        return _slo_of({str(name): as_text(time) for name, time in value.items()})
    refuse("an SLO such as ttft=30,tpot=0.1, or none", value)


def as_plugin(value: object) -> Any:
    """Return a plugin: what text or a table names, an instance, or what builds one."""
    if isinstance(value, str):
        return read_plugin(value)
    if isinstance(value, Mapping):
        return _table(value)
    if isinstance(value, Spec | Plugin) or callable(value):
        return value
    msg = f"{shown(value)} is no plugin: give its name, with options as in 'lfu:unit=s'"
    raise InputError(msg)


def as_checkpoint(value: object) -> Any:
    """Return a checkpoint policy; tokens, or `none`, are those of vLLM's retention interval."""
    # Of vLLM's intervals None keeps all ends of chunks, 0 none but those of prompts and where
    # prompts part, and N multiples of N besides.
    if value is None or value == "none":
        return Spec("chunk")
    tokens = parse_digits(value) if isinstance(value, str) else value
    if type(tokens) is int:
        return Spec("every", {"tokens": str(tokens)}) if tokens else Spec("default")
    return as_plugin(value)


def as_tiers(value: object) -> tuple[Any, ...]:
    """Return tiers, nearest first; None and the text `none` are no tier."""
    if value is None or value == "none":
        return ()
    if isinstance(value, str):
        return tuple(parse(value))
    if isinstance(value, tuple | list):
        return tuple(tier for entry in value for tier in as_tiers(entry))
    return (as_plugin(value),)


def as_workload(value: object) -> Any:
    """Return a workload: an instance or requests, text, a path, or the plugin of a table."""
    if isinstance(value, Mapping):
        return _table(value)
    if isinstance(value, str | Path | Spec):
        return value
    if isinstance(value, PathLike):
        return Path(fspath(value))
    if (workload := given_workload(value)) is not None:
        check_name(workload)
        return workload
    refuse("a workload: a plugin's name with options, a file, or requests", value)


def _or_name(kind: type, value: object) -> Any:
    """Return a value of the type `kind`, or the text that names one."""
    return value if isinstance(value, kind) else read_text(value)


as_model, as_device = partial(_or_name, ModelSpec), partial(_or_name, DeviceSpec)


def _choice(value: object, choices: tuple[object, ...]) -> Any:
    if value in choices:
        return value
    msg = f"{shown(value)} is not one of {', '.join(map(shown, choices))}"
    raise InputError(msg)


def _number(value: object) -> int | float:
    if isinstance(value, Real) and not isinstance(value, bool):
        # An integer stays one: it is written to traces as it was given. NumPy's cannot be.
        return value if isinstance(value, int) else float(value)
    refuse("a number", value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        refuse("true or false", value)
    return value


def read_text(value: object) -> str:
    """Return a text as it is; all else is refused."""
    if not isinstance(value, str):
        refuse("text", value)
    return value


def _path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    if not read_text(value):
        raise InputError(EMPTY_PATH)
    return Path(read_text(value))


READERS: Mapping[Any, Callable[[object], Any]] = {
    Any: lambda value: value,
    int: as_whole,
    float: _number,
    bool: _flag,
    str: read_text,
    Path: _path,
}
"""The function that reads a value of each plain type."""


def _slo_of(seconds: Mapping[str, str]) -> SLO:
    expected = {}
    for name, text in seconds.items():
        if name not in EXPECTATIONS:
            known = ", ".join(EXPECTATIONS)
            msg = f"an SLO has no {name!r}{nearest(name, EXPECTATIONS)}; it may have {known}"
            raise InputError(msg)
        expected[f"{name}_ns"] = parse_seconds(text)
        if not expected[f"{name}_ns"]:
            msg = f"{name}={text}: expected a time above 0 seconds"
            raise InputError(msg)
    return SLO(**expected)


def _table(table: Mapping[str, Any]) -> Spec:
    """Read a plugin from a table of its name and its options."""
    options = {str(name): _text_of(value) for name, value in table.items()}
    if "name" not in options:
        msg = "the table needs a name, such as name = 'lru'"
        raise InputError(msg)
    return Spec(options.pop("name"), options)


def _text_of(value: object) -> str:
    """Return the value of an option of a plugin as text, which the plugin's type reads."""
    if isinstance(value, str | Real):
        return as_text(value)
    refuse("text, a number, true or false", value)


PluginChoice: TypeAlias = Annotated[str | Spec | Plugin | Callable[[], Any], as_plugin]
"""A plugin: its name with options, an instance, or a class or function that builds one."""

CheckpointChoice: TypeAlias = Annotated[
    str | int | Spec | Plugin | Callable[[], Any] | None, as_checkpoint
]
"""A checkpoint policy, or vLLM's retention interval: tokens, or None."""

WorkloadChoice: TypeAlias = Annotated[str | Path | Spec | Workload, as_workload]
"""A workload: a plugin's name with options, the path of a file, an instance, or requests."""

ModelChoice: TypeAlias = Annotated[str | ModelSpec, as_model]
"""A model: a name of the catalogue, the path of a config.json, or its numbers."""

DeviceChoice: TypeAlias = Annotated[str | DeviceSpec, as_device]
"""A GPU: a name of the catalogue, or its numbers."""

ByteSize: TypeAlias = Annotated[int | str, as_bytes]
"""A number of bytes; as text with a unit, such as `40GiB`."""

SLOChoice: TypeAlias = Annotated[SLO | str | Mapping[str, float] | None, as_slo]
"""What clients expect: an SLO in ns, a text such as `ttft=30,tpot=0.1`, a table of seconds."""

Natural: TypeAlias = Annotated[int, as_natural]
"""A whole number of 0 or more."""

TierChoices: TypeAlias = Annotated[PluginChoice | Sequence[PluginChoice] | None, as_tiers]
"""Tiers, nearest first: a text may name several, as `host:memory=64GiB,disk:memory=1TiB`;
`none` or None: none."""

WindowChoice: TypeAlias = Annotated[tuple[int, int | None] | str, as_window]
"""A window of time in ns, the end left out (None: open); as text in seconds, `60:120`."""
