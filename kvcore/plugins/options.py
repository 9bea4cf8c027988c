"""Plugins in text: `lfu:half_life=300,unit=s`, read, converted and built."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    Any,
    Literal,
    Optional,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import attrs

from kvcore.errors import InputError, KvcoreError, PluginError
from kvcore.plugins.base import Plugin, option_fields

P = TypeVar("P", bound=Plugin)


Reader: TypeAlias = tuple[str, Callable[[str], Any]]


@attrs.frozen
class Spec:
    """A plugin as text asks for it: a name, and options that are still text."""

    name: str
    options: dict[str, str] = attrs.field(factory=dict)

    def __str__(self) -> str:
        """Return the text that parses to this."""
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


def parse(text: str) -> list[Spec]:
    """Read a list of plugins: `lru,lfu:half_life=300,unit=s,cost` names three.

    A piece `key=value` continues the name before it. A value cannot contain a comma.

    Raises:
        InputError: an empty name, an option without a name or a value, or given twice.
    """
    specs: list[Spec] = []
    for piece in text.split(","):
        name, colon, option = piece.partition(":")
        if "=" in name:
            option = piece
            if not specs:
                msg = f"{text!r} starts with an option; write NAME:{piece.strip()}"
                raise InputError(msg)
        elif not name.strip():
            msg = f"{text!r} has an empty name; write NAME or NAME:option=value,..."
            raise InputError(msg)
        else:
            specs.append(Spec(name.strip()))
            if not colon:
                continue
        key, equals, value = (part.strip() for part in option.partition("="))
        if not (key and equals):
            msg = f"{option!r} in {text!r} is no option; write {specs[-1].name}:option=value"
            raise InputError(msg)
        if key in specs[-1].options:
            msg = f"option {key!r} of {specs[-1].name!r} is given twice in {text!r}"
            raise InputError(msg)
        specs[-1].options[key] = value
    return specs


def instantiate(
    cls: type[P], options: Mapping[str, str], defaults: Mapping[str, Any] | None = None
) -> P:
    """Build `cls` from options in text, each converted to its field's annotated type.

    `defaults` are values, not text, of options that are not given; those that `cls` does
    not have are left out.

    Raises:
        InputError: an option that `cls` does not have, does not accept or cannot do
            without.
        PluginError: the constructor raised anything but TypeError, ValueError or OSError.
    """
    label = f"{cls.kind} plugin {cls.name!r}"
    fields = {field.name: field for field in option_fields(cls)}
    for key in options:
        if key not in fields:
            msg = f"{label} has no option {key!r}{nearest(key, fields)}. {summary(cls)}"
            raise InputError(msg)
    others = {
        key: value
        for key, value in (defaults or {}).items()
        if key in fields and key not in options
    }
    for name, field in fields.items():
        if field.default is attrs.NOTHING and name not in options.keys() | others:
            msg = f"{label} needs a value for option {name!r}. {summary(cls)}"
            raise InputError(msg)
    values = {_argument(fields[key]): _value(cls, fields[key], options[key]) for key in options}
    values |= {_argument(fields[key]): value for key, value in others.items()}
    try:
        return cls(**values)
    except (KvcoreError, OSError):
        raise
    except (TypeError, ValueError) as error:
        # attrs' validators raise with the message first and the evidence after it.
        reason = error.args[0] if error.args else type(error).__name__
        msg = f"{label} cannot be built as {str(Spec(cls.name, dict(options)))!r}: {reason}"
        raise InputError(msg) from error
    except Exception as error:
        msg = f"{label} ({qualified(cls)}) could not be built: it raised {error!r}"
        raise PluginError(msg) from error


def takes_path(cls: type[Plugin], option: str) -> bool:
    """Say whether `cls` has such an option, and it is the path of a file."""
    fields = [field for field in option_fields(cls) if field.name == option]
    kinds = [_annotation(cls, field) for field in fields]
    return any(Path in (kind, *get_args(kind)) for kind in kinds)


def summary(cls: type[Plugin]) -> str:
    """Return a sentence with the options of `cls` and their defaults."""
    options = [_with_default(field) for field in option_fields(cls)]
    return f"Its options: {', '.join(options)}." if options else "It has no options."


def nearest(name: str, names: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the one of `names` most like `name`, or ""."""
    close = get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def qualified(cls: type) -> str:
    """Return the full name of `cls`: module and class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _with_default(field: attrs.Attribute[Any]) -> str:
    default: Any = field.default
    if default is attrs.NOTHING:
        return f"{field.name} (required)"
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return f"{field.name} (computed)"
    return f"{field.name}={as_text(default)}"


def as_text(value: object) -> str:
    """Return the value of an option as text is read: `true`, `none`, `300`."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _value(cls: type[Plugin], field: attrs.Attribute[Any], text: str) -> Any:
    label = f"option {field.name!r} of {cls.kind} plugin {cls.name!r}"
    kind = _annotation(cls, field)
    try:
        expected, read = _reader(kind)
    except KeyError as error:
        shown = kind.__name__ if type(kind) is type else kind
        msg = f"{label} takes {shown}, which has no text form; build {qualified(cls)} in code"
        raise InputError(msg) from error
    try:
        return read(text)
    except (ValueError, LookupError) as error:
        msg = f"{label} takes {expected}, not {text!r}"
        raise InputError(msg) from error


def _annotation(cls: type[Plugin], field: attrs.Attribute[Any]) -> Any:
    """Return the type the constructor takes for `field`; a string if it cannot be known."""
    # attrs puts the argument type of an annotated converter here, else the field's type.
    hint = cls.__init__.__annotations__.get(_argument(field), field.type)
    owner = next((c for c in cls.__mro__ if _declares(c, field.name)), cls)
    holder = SimpleNamespace(__annotations__={"option": Any if hint is None else hint})
    try:
        return get_type_hints(holder, _NAMES | vars(sys.modules[owner.__module__]))["option"]
    except NameError:
        return hint


def _argument(field: attrs.Attribute[Any]) -> str:
    return field.alias or field.name


def _declares(cls: type, name: str) -> bool:
    own = vars(cls).get("__attrs_attrs__", ())
    return any(field.name == name and not field.inherited for field in own)


def _number(text: str) -> float:
    number = float(text)
    if math.isnan(number):
        raise ValueError(text)
    return number


# What an annotation may say although its module imports it for type checkers alone.
_NAMES: dict[str, Any] = {
    "Any": Any,
    "Literal": Literal,
    "Optional": Optional,
    "Path": Path,
    "Union": Union,
}


# Ordered: the members of a union are tried in this order, so that `str` is the last resort.
_READERS: dict[Any, Reader] = {
    NoneType: ("none", {"none": None}.__getitem__),
    bool: ("true or false", {"true": True, "false": False}.__getitem__),
    int: ("an integer", int),
    float: ("a number", _number),
    Path: ("a path", Path),
    str: ("text", str),
    Any: ("text", str),
}


def _reader(kind: Any) -> Reader:
    """Return what a value of type `kind` looks like in text, and what reads it.

    Raises:
        KeyError: `kind` has no text form.
    """
    if get_origin(kind) is Literal:
        choices = {as_text(choice): choice for choice in get_args(kind)}
        return " or ".join(choices), choices.__getitem__
    if get_origin(kind) in (Union, UnionType):
        members: dict[Any, Reader] = {}
        for member in get_args(kind):
            with suppress(KeyError):  # what has no text form is for code
                members[member] = _reader(member)
        if not members.keys() - {NoneType}:
            raise KeyError(kind)
        ordered = [m for m in members if m not in _READERS]
        ordered += [m for m in _READERS if m in members]
        expected = " or ".join(words for words, _ in members.values())
        return expected, partial(_first, [members[member][1] for member in ordered])
    return _READERS[kind]


def _first(readers: list[Callable[[str], Any]], text: str) -> Any:
    for read in readers:
        with suppress(ValueError, LookupError):
            return read(text)
    raise ValueError(text)
