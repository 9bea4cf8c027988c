"""Plugins in text: `lfu:half_life=300,unit=s`, read, converted and built."""

from __future__ import annotations

import math
import sys
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, Optional, TypeVar, Union, get_args, get_origin, get_type_hints

from kvcore.errors import InputError, KvcoreError, PluginError, redact, shorten
from kvcore.files import input_path
from kvcore.plugins.base import (
    COMPUTED,
    FAILURES,
    REQUIRED,
    Option,
    Plugin,
    options_of,
    qualified,
)
from kvcore.units import parse_whole

P = TypeVar("P", bound=Plugin)


class Spec:
    """The name of a plugin and its options, as text."""

    __slots__ = ("name", "options")

    def __init__(self, name: str, options: dict[str, str] | None = None) -> None:
        self.name = name
        self.options = {} if options is None else options

    def __eq__(self, other: object) -> bool:
        """Return True if `other` has the same name and options."""
        return type(other) is Spec and (self.name, self.options) == (other.name, other.options)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return the code that makes an equal object."""
        return f"Spec(name={self.name!r}, options={self.options!r})"

    def __str__(self) -> str:
        """Return the text from which `parse` makes an equal object."""
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


def parse(text: str) -> list[Spec]:
    """Read a list of plugins: `lru,lfu:half_life=300,unit=s,cost` names three.

    A piece `key=value` continues the name before it. A value cannot contain a comma. The name
    of a class in a file is `my.py:Class`, or `my.py` if it has no other of the kind; behind
    another name, a file in a folder `a=b` is `./a=b/my.py`.

    Raises:
        InputError: an empty name, an option without a name or a value, or given twice.
    """
    specs: list[Spec] = []
    for piece in text.split(","):
        name, colon, option = piece.partition(":")
        key, equals, _ = name.partition("=")
        if name.endswith(".py") and not (specs and equals and "/" not in key):
            class_name, further, rest = option.partition(":")
            if "=" in class_name:
                class_name, further, rest = "", colon, option
            name, equals, colon, option = f"{name}:{class_name.strip()}", "", further, rest
        if equals:
            option = piece
            if not specs:
                msg = f"{redact(text)!r} starts with an option; write NAME:{piece.strip()}"
                raise InputError(msg)
        elif not name.strip():
            msg = f"{redact(text)!r} has an empty name; write NAME or NAME:option=value,..."
            raise InputError(msg)
        else:
            specs.append(Spec(name.strip()))
            if not colon:
                continue
        key, equals, value = (part.strip() for part in option.partition("="))
        if not (key and equals):
            shown, wrong = redact(text), redact(option)
            msg = f"{wrong!r} in {shown!r} is no option; write {specs[-1].name}:option=value"
            raise InputError(msg)
        if key in specs[-1].options:
            msg = f"option {key!r} of {specs[-1].name!r} is given twice in {redact(text)!r}"
            raise InputError(msg)
        specs[-1].options[key] = value
    return specs


def instantiate(
    cls: type[P], options: Mapping[str, str], defaults: Mapping[str, Any] | None = None
) -> P:
    """Build `cls` from options in text, each converted to its annotated type.

    `defaults` are values, not text, of options that are not given; names that `cls` does not
    have are left out.

    Raises:
        InputError: an option is unknown, missing, or has a value that `cls` does not accept.
        PluginError: the constructor raised anything but TypeError, ValueError or OSError.
    """
    label = f"{cls.kind} plugin {cls.name!r}"
    known = {option.name: option for option in options_of(cls)}
    for old, new in cls.renamed_options.items():
        if old in options and new not in options:
            msg = f"option {old!r} of {label} is called {new!r} now; use that"
            warnings.warn(msg, FutureWarning, stacklevel=2)
            options = {new if name == old else name: text for name, text in options.items()}
    for name in options:
        if name not in known:
            msg = f"{label} has no option {name!r}{nearest(name, known)}. {summary(cls)}"
            raise InputError(msg)
    values: dict[str, Any] = {
        **{name: value for name, value in (defaults or {}).items() if name in known},
        **{name: _converted(cls, known[name], text) for name, text in options.items()},
    }
    for name, option in known.items():
        if option.default is REQUIRED and name not in values:
            msg = f"{label} needs a value for option {name!r}. {summary(cls)}"
            raise InputError(msg)
    try:
        return cls(**{known[name].parameter: value for name, value in values.items()})
    except (KvcoreError, OSError):
        raise
    except (TypeError, ValueError) as error:
        # Validators of attrs raise with the message first and the evidence after it.
        reason = error.args[0] if error.args else type(error).__name__
        spec = redact(str(Spec(cls.name, dict(options))))
        msg = f"{label} cannot be built as {spec!r}: {reason}"
        raise InputError(msg) from error
    except FAILURES as error:
        msg = f"{label} ({qualified(cls)}) could not be built: it raised {error!r}"
        raise PluginError(msg) from error


def spec_of(plugin: Plugin) -> Spec:
    """Return the text of a plugin, without the options whose value is the default."""
    defaults = {option.name: option.default for option in options_of(type(plugin))}
    values = plugin.options().items()
    return Spec(plugin.name, {name: as_text(v) for name, v in values if v != defaults[name]})


def takes_path(cls: type[Plugin], option: str) -> bool:
    """Return True if `cls` has an option of that name whose value is the path of a file."""
    types = [_type_of(cls, known) for known in options_of(cls) if known.name == option]
    return any(Path in (kind, *get_args(kind)) for kind in types)


def summary(cls: type[Plugin]) -> str:
    """Return a sentence with the options of `cls` and their defaults."""
    options = [_with_default(option) for option in options_of(cls)]
    return f"Its options: {', '.join(options)}." if options else "It has no options."


def nearest(name: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """Return " (did you mean ...?)" with the one of `names` most like `name`, or "".

    `cutoff` is the least likeness, from 0 to 1.
    """
    from difflib import get_close_matches  # noqa: PLC0415 - for errors alone

    close = get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


def as_text(value: object) -> str:
    """Return the text of an option's value, such as `true` or `none`; a fraction is a float."""
    value = float(value) if isinstance(value, Fraction) else value
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _with_default(option: Option) -> str:
    if option.default is REQUIRED:
        return f"{option.name} (required)"
    if option.default is COMPUTED:
        return f"{option.name} (computed)"
    return f"{option.name}={as_text(option.default)}"


def _converted(cls: type[Plugin], option: Option, text: str) -> Any:
    label = f"option {option.name!r} of {cls.kind} plugin {cls.name!r}"
    kind = _type_of(cls, option)
    try:
        expected = _expected(kind)
    except KeyError as error:
        shown = kind.__name__ if type(kind) is type else kind
        msg = f"{label} takes {shown}, which has no text form; build {qualified(cls)} in code"
        raise InputError(msg) from error
    try:
        return _read(kind, text)
    except (ValueError, LookupError, InputError) as error:
        why = " below 2^63" if "out of range" in str(error) else ""
        msg = f"{label} takes {expected}{why}, not {shorten(text)!r}"
        raise InputError(msg) from error


def _type_of(cls: type[Plugin], option: Option) -> Any:
    """Return the type of an option, or its annotation if that cannot be resolved."""
    holder = SimpleNamespace(__annotations__={"option": option.annotation})
    modules = [vars(sys.modules.get(base.__module__, sys)) for base in cls.__mro__]
    try:
        return get_type_hints(holder, _NAMES, ChainMap(*modules))["option"]
    except NameError:
        return option.annotation


# Names in annotations that a module may import for type checkers alone.
_NAMES = {"Any": Any, "Literal": Literal, "Optional": Optional, "Path": Path, "Union": Union}


def _number(text: str) -> float:
    value = float(text)
    if math.isnan(value):
        raise ValueError(text)
    return value


# Ordered: the members of a union are tried in this order, so that `str` is the last resort.
_TYPES: dict[Any, tuple[str, Callable[[str], Any]]] = {
    NoneType: ("none", {"none": None}.__getitem__),
    bool: ("true or false", {"true": True, "false": False}.__getitem__),
    int: ("an integer", parse_whole),
    float: ("a number", _number),
    Path: ("a path", input_path),
    str: ("text", str),
    Any: ("text", str),
}
"""By type, the description of its values in messages, and the function that reads them."""


def _expected(kind: Any) -> str:
    """Return the description of the values of type `kind` in messages.

    Raises:
        KeyError: `kind` has no text form.
    """
    if get_origin(kind) is Literal:
        return " or ".join(map(as_text, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_expected(member) for member in _members(kind))
    return _TYPES[kind][0]


def _members(union: Any) -> list[Any]:
    """Return the members of `union` that have a text form; others can be given in code.

    Raises:
        KeyError: no member has one, except None.
    """
    members = [m for m in get_args(union) if m in _TYPES or get_origin(m) is Literal]
    if members in ([], [NoneType]):
        raise KeyError(union)
    return members


def _read(kind: Any, text: str) -> Any:
    """Return the value of type `kind` that `text` stands for.

    Raises:
        ValueError, LookupError, InputError: it stands for none.
    """
    if kind in _TYPES:
        return _TYPES[kind][1](text)
    if get_origin(kind) is Literal:
        return {as_text(value): value for value in get_args(kind)}[text]
    members = _members(kind)
    # Of both kinds of numbers, 1.0 is a share and 1.5k a count.
    if float in members and "." in text and text[-1:].isdigit():
        members = [member for member in members if member is not int]
    literals = [member for member in members if member not in _TYPES]
    for member in sorted(members, key=[*literals, *_TYPES].index):
        with suppress(ValueError, LookupError, InputError):
            return _read(member, text)
    raise ValueError(text)
