"""Convert what text, TOML, JSON and Python say of an option to the type of the option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeAlias,
    get_args,
    get_origin,
)

from kvcore.errors import InputError
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.plugins import Plugin
from kvcore.plugins.options import Spec, as_text, nearest, parse
from kvcore.request import SLO
from kvcore.units import (
    NS_PER_S,
    check_whole,
    parse_bytes,
    parse_seconds,
    parse_whole,
    parse_window,
)
from kvcore.workloads import Workload

if TYPE_CHECKING:
    from cattrs import Converter

PluginChoice: TypeAlias = Annotated[str | Spec | Plugin | Callable[[], Any], "plugin"]
"""A plugin: its name with options, an instance, or a class or function that builds one."""

WorkloadChoice: TypeAlias = Annotated[str | Path | Spec | Workload, "workload"]
"""A workload: a plugin's name with options, the path of a file, or an instance."""

ModelChoice: TypeAlias = Annotated[str | ModelSpec, "model"]
"""A model: a name of the catalogue, the path of a config.json, or its numbers."""

DeviceChoice: TypeAlias = Annotated[str | DeviceSpec, "device"]
"""A GPU: a name of the catalogue, or its numbers."""

ByteSize: TypeAlias = Annotated[int | str, "bytes"]
"""A number of bytes; as text with a unit, such as `40GiB`."""

SLOChoice: TypeAlias = Annotated[SLO | str | Mapping[str, float], "slo"]
"""What clients expect: an SLO in ns, a text such as `ttft=30,tpot=0.1`, a table of seconds."""

Natural: TypeAlias = Annotated[int, "natural"]
"""A whole number of 0 or more."""

WindowChoice: TypeAlias = Annotated[tuple[int, int | None] | str, "window"]
"""A window of time in ns, the end left out (None: open); as text in seconds, `60:120`."""

EXPECTATIONS = ("ttft", "tpot", "deadline")
"""What an SLO may expect, in seconds."""

EMPTY_PATH = "empty path; name a file"


def convert(value: object, kind: Any) -> Any:
    """Return `value` as the type `kind` has it.

    Raises:
        InputError: `value` cannot be read as that type; says what was expected.
    """
    return _converter().structure(value, kind)


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
        InputError: a name that is not one of `EXPECTATIONS`, or a time that is not above 0.
    """
    if text == "none":
        return SLO()
    if "=" not in text.partition(",")[0]:
        msg = f"{text!r} is no SLO; write one such as ttft=30,tpot=0.1, or none"
        raise InputError(msg)
    return _slo_of(read_plugin(f"slo:{text}").options)


def slo_text(slo: SLO) -> str:
    """Return an SLO as `read_slo` reads it, such as `ttft=30,tpot=0.1`."""
    times = ((name, getattr(slo, f"{name}_ns")) for name in EXPECTATIONS)
    return ",".join(f"{name}={ns / NS_PER_S:g}" for name, ns in times if ns) or "none"


def shown(value: object) -> str:
    """Return a value for an error message: text in quotes, true and false as TOML has them."""
    return repr(value) if isinstance(value, str) else f"{as_text(value):.60}"


@cache
def _converter() -> Converter:
    """Return the one converter of options. Its package is imported at the first use."""
    from cattrs import Converter  # noqa: PLC0415 - `import kvcore` does without it

    made = Converter(detailed_validation=False)
    for kind, read in _READERS.items():
        made.register_structure_hook(kind, read)
    made.register_structure_hook_func(lambda kind: _origin(kind) is Annotated, _marked)
    made.register_structure_hook_func(lambda kind: _origin(kind) is Literal, _choice)
    return made


def _origin(kind: Any) -> Any:
    return get_origin(kind)


def _marked(value: object, kind: Any) -> Any:
    _, marker = get_args(kind)
    return _MARKED[marker](value)


def _choice(value: object, kind: Any) -> Any:
    choices = get_args(kind)
    if value in choices:
        return value
    msg = f"{shown(value)} is not one of {', '.join(map(shown, choices))}"
    raise InputError(msg)


def _whole(value: object, _: Any = None) -> int:
    if isinstance(value, str):
        return parse_whole(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return check_whole(value)
    return _refuse("a whole number", value)


def _number(value: object, _: Any = None) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value  # an integer stays one: it is written to traces as it was given
    return _refuse("a number", value)


def _flag(value: object, _: Any = None) -> bool:
    if isinstance(value, bool):
        return value
    return _refuse("true or false", value)


def _text(value: object, _: Any = None) -> str:
    if isinstance(value, str):
        return value
    return _refuse("text", value)


def _path(value: object, _: Any = None) -> Path:
    if isinstance(value, Path):
        return value
    if not _text(value):
        raise InputError(EMPTY_PATH)
    return Path(_text(value))


def _bytes(value: object) -> int:
    return parse_bytes(value) if isinstance(value, str) else _whole(value)


def _natural(value: object) -> int:
    return check_whole(_whole(value), 0)


def _window(value: object) -> Any:
    if isinstance(value, str):
        return parse_window(value)
    if isinstance(value, tuple) and len(value) == len(("start", "end")):
        return value
    return _refuse("a window of time in seconds, such as '60:120'", value)


def _slo(value: object) -> SLO:
    if value is None:
        return SLO()
    if isinstance(value, SLO):
        return value
    if isinstance(value, str):
        return read_slo(value)
    if isinstance(value, Mapping):
        return _slo_of({name: as_text(time) for name, time in value.items()})
    return _refuse("an SLO such as ttft=30,tpot=0.1, or none", value)


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


def _plugin(value: object) -> Any:
    if isinstance(value, str):
        return read_plugin(value)
    if isinstance(value, Mapping):
        return _table(value)
    if isinstance(value, Spec | Plugin) or callable(value):
        return value
    msg = f"{shown(value)} is no plugin: give its name, with options as in 'lfu:unit=s'"
    raise InputError(msg)


def _table(table: Mapping[str, Any]) -> Spec:
    """Read a plugin from a table of its name and its options."""
    options = {name: _option(value) for name, value in table.items()}
    if "name" not in options:
        msg = "the table needs a name, such as name = 'lru'"
        raise InputError(msg)
    return Spec(options.pop("name"), options)


def _option(value: object) -> str:
    """Return the value of an option of a plugin as text, which the plugin's type reads."""
    if isinstance(value, str | bool | int | float):
        return as_text(value)
    return _refuse("text, a number, true or false", value)


def _workload(value: object) -> Any:
    if isinstance(value, Mapping):
        return _table(value)
    if isinstance(value, str | Path | Spec | Workload):
        return value
    return _refuse("a workload: a plugin's name with options, or the path of a file", value)


def _model(value: object) -> Any:
    return value if isinstance(value, ModelSpec) else _text(value)


def _device(value: object) -> Any:
    return value if isinstance(value, DeviceSpec) else _text(value)


def _refuse(expected: str, value: object) -> NoReturn:
    kinds: dict[type, str] = {dict: "a table", list: "a list", tuple: "a list"}
    msg = f"expected {expected}, not {kinds.get(type(value)) or shown(value)}"
    raise InputError(msg)


_READERS: dict[type, Callable[[object, Any], Any]] = {
    int: _whole,
    float: _number,
    bool: _flag,
    str: _text,
    Path: _path,
}


_MARKED: dict[str, Callable[[object], Any]] = {
    "plugin": _plugin,
    "workload": _workload,
    "model": _model,
    "device": _device,
    "bytes": _bytes,
    "slo": _slo,
    "window": _window,
    "natural": _natural,
}
