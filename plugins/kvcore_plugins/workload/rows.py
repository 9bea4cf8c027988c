"""Rows of a workload file, and errors that name file, line and field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from heapq import heappop, heappush, heapreplace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import orjson

from kvcore import InputError, Request
from kvcore.blake2 import blake2b
from kvcore.errors import shorten
from kvcore.units import INT64_LIMIT, NS_PER_S
from kvcore.workloads import lines
from kvcore_plugins.workload.times import WINDOW, Clock, TimeOrder

MOST_NESTED = 250
"""Largest depth of nested values in a line, which can then be written again."""

_T = TypeVar("_T")
_INT = {int}
_FIELD = object()
_HEX = re.compile(r"[0-9a-fA-F]{32}")
_HASH = re.compile(r"(?:0[xX])?[0-9a-fA-F]{1,128}")
_WIDE_BYTES = 16
_SECONDS_LIMIT = INT64_LIMIT // NS_PER_S


class Row:
    """The fields of one line, or of an object inside it.

    Methods that return a field check it first, and raise an InputError that names it.

    Attributes:
        path, line: the file, and the number of the line, from 1.
        fields: the values by name.
        prefix: the place of an inner object in the line, such as `requests[0].`.
    """

    __slots__ = ("fields", "line", "path", "prefix")

    def __init__(self, path: Path, line: int, fields: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self.line = line
        self.fields = fields
        self.prefix = prefix

    def natural(self, name: str, least: int = 0, below: int = INT64_LIMIT) -> int:
        """Return a field that must be a whole number in `[least, below)`."""
        value = self.fields.get(name)
        if type(value) is int and least <= value < below:
            return value
        raise self.error(field=name, expected=f"a whole number from {least} to {below - 1}")

    def nanoseconds(self, name: str) -> int:
        """Return a number of seconds, at least 0, as nanoseconds."""
        value: Any = self.fields.get(name)
        if type(value) in (int, float) and 0 <= value < _SECONDS_LIMIT:
            return round(float(value) * NS_PER_S)
        expected = f"a number of seconds, from 0 and below {_SECONDS_LIMIT}"
        raise self.error(field=name, expected=expected)

    def time(self, name: str, clock: Clock) -> int:
        """Return the time in ns that `clock` reads in a field."""
        time = clock.time_of(self.fields)
        if time is None:
            expected = "a number, or a time such as 2024-05-10 18:15:46.680"
            if clock.date is not None:
                expected = f"a time of day such as 18:15:46.680, and a date in {clock.date!r}"
            raise self.error(field=name, expected=expected)
        return time

    def text(self, name: str) -> str:
        """Return a field that must be a text."""
        value = self.fields.get(name)
        if type(value) is str:
            return value
        raise self.error(field=name, expected="a text")

    def identifier(self, name: str) -> int | str:
        """Return a field that must be an integer or a text."""
        value = self.fields.get(name)
        if type(value) in (int, str):
            return value  # type: ignore[return-value]
        raise self.error(field=name, expected="an integer or a text")

    def optional(self, read: Callable[[str], _T], name: str, default: _T) -> _T:
        """Return `read(name)`, or `default` if the field is missing or null."""
        return default if self.fields.get(name) is None else read(name)

    def inner(self, name: str) -> list[Row]:
        """Return a list of objects as rows, whose errors name the place in the list."""
        value = self.fields.get(name)
        if type(value) is not list:
            raise self.error(field=name, expected="a list of objects")
        rows = []
        for index, fields in enumerate(value):
            item = f"{name}[{index}]"
            if type(fields) is not dict:
                raise self.error(field=item, expected="an object", got=fields)
            rows.append(Row(self.path, self.line, fields, f"{self.prefix}{item}."))
        return rows

    def keys(
        self, name: str, below: int = INT64_LIMIT, *, digests: bool = False, wide: bool = False
    ) -> list[Any]:
        """Return a list of block keys: integers in `[0, below)`.

        With `digests`, texts of 32 hexadecimal digits are keys as well, as their 16 bytes. With
        `wide`, so are other integers of 64 bits but -1, and texts of up to 128 such digits.
        """
        keys = self.fields.get(name)
        if type(keys) is not list:
            raise self.error(field=name, expected="a list of integers")
        if not keys or (set(map(type, keys)) == _INT and min(keys) >= 0 and max(keys) < below):
            return keys
        if wide:
            keys = [_wide_key(key) for key in keys]
        for index, key in enumerate(keys):
            integer = type(key) is int and 0 <= key < below
            digest = digests and type(key) is str and _HEX.fullmatch(key) is not None
            if not integer and not digest and type(key) is not bytes:
                expected = f"an integer from 0 to {below - 1}"
                expected += " or 32 hexadecimal digits" if digests else ""
                expected += " or a text of 1 to 128 hexadecimal digits" if wide else ""
                raise self.error(field=f"{name}[{index}]", expected=expected, got=key)
        return [bytes.fromhex(key) if type(key) is str else key for key in keys]

    def prompt_keys(
        self,
        name: str,
        prompt: int,
        key_tokens: int,
        below: int = INT64_LIMIT,
        *,
        digests: bool = False,
        wide: bool = False,
        hint: str = "",
    ) -> list[Any]:
        """Return the block keys of a prompt: no more of them than its tokens fill.

        `hint` ends the error about more.
        """
        keys: list[Any] = self.fields.get(name)  # type: ignore[assignment]  # tested below
        # As nearly all are, without a call.
        if not (
            type(keys) is list
            and keys
            and set(map(type, keys)) == _INT
            and min(keys) >= 0
            and max(keys) < below
        ):
            keys = self.keys(name, below, digests=digests, wide=wide)
        if (len(keys) - 1) * key_tokens < prompt:
            return keys
        limit = -(-prompt // key_tokens)
        keys_at_most = "1 key" if limit == 1 else f"{limit} keys"
        expected = f"at most {keys_at_most} ({prompt} tokens, {key_tokens} a key{hint})"
        raise self.error(field=name, expected=expected, got=len(keys))

    def in_order(
        self, field: str, time: int, latest: int, expected: str = "no earlier time than before"
    ) -> int:
        """Return the time of a row, which must not be before `latest`, that of earlier rows."""
        if time < latest:
            raise self.error(field=field, expected=expected)
        return time

    def error(self, *, field: str, expected: str, got: Any = _FIELD) -> InputError:
        """Return the error which reports that `field` (or `got`, a part of it) is wrong."""
        value = self.fields.get(field, _FIELD) if got is _FIELD else got
        shown = "nothing: the field is missing" if value is _FIELD else as_json(value)
        where = f"{self.path}:{self.line}: field '{self.prefix}{field}'"
        return InputError(f"{where}: expected {expected}, got {shown}")


def _wide_key(key: Any) -> Any:
    """Return an integer beyond 63 bits or a hexadecimal text as 16 bytes; others as they are.

    Texts of one number are one key, as are `ab12` and `0x00AB12`.
    """
    if type(key) is int and (INT64_LIMIT <= key < 2 * INT64_LIMIT or -INT64_LIMIT <= key < -1):
        return key.to_bytes(_WIDE_BYTES, "big", signed=True)
    if type(key) is str and _HASH.fullmatch(key):
        digits = key.lower().removeprefix("0x").lstrip("0").rjust(_WIDE_BYTES, "0").encode()
        return (
            digits
            if len(digits) == _WIDE_BYTES
            else blake2b(digits, digest_size=_WIDE_BYTES).digest()
        )
    return key


class Names:
    """Names of sessions or tenants in a log: numbers from 1 in their place, unless asked for.

    Traces and exports have what requests have, and whose a request is takes no more than that
    equal names stay equal. Memory: an entry for each name.

    Args:
        asked: the option that names their field; None: it was found, and they are numbered.
    """

    def __init__(self, asked: str | None) -> None:
        self._asked = asked is not None
        self._numbers: dict[str, str] = {}

    def of(self, name: str | None) -> str | None:
        """Return what a request has for a name."""
        if self._asked or name is None:
            return name
        return self._numbers.setdefault(name, str(len(self._numbers) + 1))


def time_order(clock: Clock, row_of: Callable[[Request], Row] | None = None) -> TimeOrder:
    """Return what sorts the rows whose times `clock` reads.

    `row_of` returns the row of a request that is sorted in its place.
    """

    def too_late(item: Row | Request) -> InputError:
        if isinstance(item, Request):
            assert row_of is not None
            item = row_of(item)
        remedy = clock.clock_change or "sort the rows by time"
        expected = f"no time before that of the {WINDOW} rows before it ({remedy})"
        return item.error(field=clock.name, expected=expected)

    return TimeOrder(too_late)


Pending: TypeAlias = tuple[int, Callable[[], Request]]
"""The arrival of a request (ns), and the function that builds it then."""


def merged(sessions: Iterable[tuple[int, Callable[[], list[Pending]]]]) -> Iterator[Request]:
    """Yield the requests of sessions in order of arrival, those of one time by session.

    Args:
        sessions: in order, the start of each session (ns), and the function that reads its
            turns then, the last one first. Started sessions stay in memory.
    """
    running: list[tuple[int, int, list[Pending]]] = []
    end: tuple[float, Callable[[], list[Pending]]] = math.inf, list
    for index, (start, read) in enumerate(chain(sessions, [end])):
        while running and running[0][0] <= start:
            _, session, turns = running[0]
            yield turns.pop()[1]()
            if turns:
                heapreplace(running, (turns[-1][0], session, turns))
            else:
                heappop(running)
        if turns := read():
            heappush(running, (turns[-1][0], index, turns))


def rows(path: Path) -> Generator[Row, None, None]:
    """Yield each line of a file of JSON objects.

    Raises:
        InputError: the file cannot be read, or a line is not a JSON object.
    """
    for line_number, line in lines(path):
        yield parse_row(path, line_number, line)


def parse_row(path: Path, number: int, line: bytes) -> Row:
    """Return line `number` of `path`, which must be a JSON object.

    Raises:
        InputError: it is not.
    """
    try:
        fields = parse_nested(line)
    except orjson.JSONDecodeError as error:
        msg = f"{path}:{number}: not JSON: {error.msg} (column {error.colno})"
        raise InputError(msg) from error
    except orjson.JSONEncodeError as error:
        raise too_deep(path, number) from error
    if type(fields) is not dict:
        msg = f"{path}:{number}: expected a JSON object, got {as_json(fields)}"
        raise InputError(msg)
    return Row(path, number, fields)


def parse_nested(text: bytes) -> Any:
    """Return the value of a JSON text, which can be written again.

    Raises:
        orjson.JSONDecodeError: the text is not JSON.
        orjson.JSONEncodeError: values are nested too deep.
    """
    value = orjson.loads(text)
    if len(text) > MOST_NESTED and text.count(b"[") + text.count(b"{") > MOST_NESTED:
        orjson.dumps(value)
    return value


def too_deep(path: Path, number: int) -> InputError:
    """Return the error of a line with values that are nested too deep."""
    return InputError(
        f"{path}:{number}: expected values in one another up to {MOST_NESTED} deep"
    )


def in_words(value: Any) -> str:
    """Return a value of a status as a text in lower case: 500 for 500.0 and `500.0` as well.

    Tables have numbers with a point where a column lacks some.
    """
    return str(value).strip().lower().removesuffix(".0")


def as_json(value: Any) -> str:
    """Return `value` as JSON, shortened for a message."""
    try:
        text = orjson.dumps(value).decode()
    except TypeError:  # an integer of more than 64 bits
        text = repr(value)
    return shorten(text)
