"""Fields of events: what each may hold, read with their place and written again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from kvcore.errors import InputError

DEEPEST = 16
"""How deep lists and maps may lie in a value that is kept without being understood."""


SHOWN = 60


HASH_BYTES = 64


class WrongError(ValueError):
    """A value that is not what its place asks for; the message begins with the place."""


def wrong(place: str, reason: str) -> WrongError:
    """Return the error that says what is wrong at a place."""
    return WrongError(f"{place} {reason}")


@attrs.frozen
class Kind:
    """What a value may be: words for it and a test; with `each`, a list of such values.

    `least` is the smallest integer that passes, of kinds that all integers from there on are.
    """

    says: str
    test: Callable[[Any], bool]
    each: bool = False
    least: int | None = None

    def check(self, value: Any, place: str) -> None:
        """Raise WrongError if `value` is something else."""
        if not self.each:
            self._check(value, place)
            return
        if type(value) not in (list, tuple):
            raise wrong(place, f"must be a list, each {self.says}, not {shown(value)}")
        # What nearly all long lists are is passed in C.
        integers = self.least is not None and set(map(type, value)) == {int}
        if integers and min(value) >= self.least and max(value) < 2**64:
            return
        for number, item in enumerate(value):
            if not self.test(item):
                self._check(item, f"{place}[{number}]")

    def _check(self, value: Any, place: str) -> None:
        if not self.test(value):
            raise wrong(place, f"must be {self.says}, not {shown(value)}")


@attrs.frozen
class Field:
    """A field by its name on the wire, and the attribute it becomes (None: it is in `more`).

    One that is not required may be missing, or null, which means the same.
    """

    name: str
    kind: Kind
    attribute: str | None = None
    required: bool = False


Table = Mapping[str, Field]


def table(*fields: Field) -> dict[str, Field]:
    """Return fields by name."""
    return {field.name: field for field in fields}


def read(fields: Any, known: Table, place: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the attributes that a map's known fields become, and `more`.

    Raises:
        WrongError: a known field is missing or wrong, or another holds what cannot be kept.
    """
    if type(fields) is not dict:
        raise wrong(place, f"must be a map, not {shown(fields)}")
    attributes: dict[str, Any] = {}
    more: dict[str, Any] = {}
    for name, value in fields.items():
        field = known.get(name)
        if type(name) is not str:
            raise wrong(place, f"must have texts as names, not {shown(name)}")
        if field is None:
            more[name] = kept(value, f"{place}.{name}")
        elif value is not None or field.required:
            field.kind.check(value, f"{place}.{name}")
            if field.attribute is None:
                more[name] = kept(value, f"{place}.{name}")
            else:
                nested = field.kind is OPTIONAL_LISTS
                attributes[field.attribute] = frozen(
                    kept(value, f"{place}.{name}") if nested else value
                )
    for field in known.values():
        if field.required and field.name not in fields:
            raise wrong(place, f"has no field {field.name!r}")
    return attributes, more


def written(event: Any, known: Table, default: Iterable[str]) -> dict[str, Any]:
    """Return the fields of `event` by name, in the order in which it was written.

    What is in `default` is written even if it is null; what else is set follows.
    """
    values = {
        field.name: value
        for field in known.values()
        if field.attribute and (value := getattr(event, field.attribute)) is not None
    }
    values |= event.more
    wire = getattr(event, "wire", None)
    names = default if wire is None else wire.names
    return {name: values.get(name) for name in names} | {
        name: value for name, value in values.items() if name not in names
    }


def kept(value: Any, place: str, depth: int = 0) -> Any:
    """Return `value`, which is kept as it is, if every format can hold it.

    Raises:
        WrongError: it lies too deep, or is of a type that JSON has not, bytes excepted.
    """
    if depth > DEEPEST:
        raise wrong(place, f"lies more than {DEEPEST} levels deep")
    if type(value) is dict:
        for name, item in value.items():
            if type(name) is not str:
                raise wrong(place, f"must have texts as names, not {shown(name)}")
            kept(item, f"{place}.{name}", depth + 1)
    elif type(value) is list:
        for number, item in enumerate(value):
            kept(item, f"{place}[{number}]", depth + 1)
    elif value is not None and type(value) not in (bool, int, float, str, bytes):
        raise wrong(place, f"must be plain data, not {shown(value)}")
    return value


def frozen(value: Any) -> Any:
    """Return lists as tuples, those that tokens are pairs in included."""
    if type(value) is not list:
        return value
    if list not in set(map(type, value)):
        return tuple(value)
    return tuple(tuple(item) if type(item) is list else item for item in value)


def shown(value: object) -> str:
    """Return `value` for a message, cut to what fits."""
    text = repr(value[:SHOWN] if isinstance(value, (list, str, bytes)) else value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def unsayable(event: Any, where: str) -> InputError:
    """Return the error that says that a format has no word for an event."""
    return InputError(f"{type(event).__name__} cannot be said in {where}")


def _is_integer(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**64


def _is_token(value: Any) -> bool:
    if type(value) in (list, tuple):
        return len(value) == 2 and all(map(_is_count, value))  # noqa: PLR2004 - a pair
    return _is_count(value) or type(value) is str


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def _is_hash(value: Any) -> bool:
    return _is_integer(value) or (type(value) is bytes and 0 < len(value) <= HASH_BYTES)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**63


INTEGER = Kind("an integer of 64 bits", _is_integer, least=-(2**63))


INTEGERS = attrs.evolve(INTEGER, each=True)


COUNT = Kind("an integer from 0 to 2**64 - 1", _is_count, least=0)


COUNTS = attrs.evolve(COUNT, each=True)


SIZE = Kind("an integer from 1 on", lambda value: _is_count(value) and value > 0)


HASH = Kind("an integer of 64 bits or at most 64 bytes", _is_hash, least=-(2**63))


HASHES = attrs.evolve(HASH, each=True)


TOKENS = Kind("a token id from 0 on, a text, or a pair of ids", _is_token, each=True, least=0)


TEXT = Kind("a text", lambda value: type(value) is str)


TIME = Kind("a finite number", _is_time)


ANYTHING = Kind("anything", lambda _: True)


LIST = Kind("a list", lambda value: type(value) is list)


OPTIONAL_LISTS = Kind(
    "null or a list", lambda v: v is None or type(v) in (list, tuple), each=True
)
