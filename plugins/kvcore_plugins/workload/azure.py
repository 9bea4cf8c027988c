"""The Azure LLM inference traces: real arrivals and lengths, no prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import ClassVar

import attrs
from attrs.validators import ge

from kvcore import InputError, Request
from kvcore.units import NS_PER_S
from kvcore.workloads import lines
from kvcore_plugins.workload.rows import FileWorkload, Row, as_json

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_HEADER = ",".join(_COLUMNS).encode()
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00)?", re.ASCII)
_COUNT = re.compile(r"\d{1,18}", re.ASCII)


@attrs.define(eq=False)
class Azure(FileWorkload):
    """Arrival times and lengths of a production service; its requests have no keys.

    A CSV file with the columns `TIMESTAMP` (UTC, any number of digits down to 1 ns),
    `ContextTokens` and `GeneratedTokens`. Arrivals count from the first row's; the id of
    a request is its row, from 0.

    Source: Patel et al., Splitwise, ISCA'24.

    Attributes:
        path: path of the file.
        key_tokens: tokens a key would stand for; the block size of a cache that serves it.
    """

    name: ClassVar[str] = "azure"
    line_fields = (_COLUMNS,)

    key_tokens: int = attrs.field(default=16, validator=ge(1))

    def __iter__(self) -> Iterator[Request]:
        """Yield one request for each row. Keeps one row in memory."""
        source = lines(self.path)
        number, line = next(source)
        if not self.recognises(line):
            expected, got = _HEADER.decode(), as_json(_text(line))
            msg = f"{self.path}:{number}: expected the header {expected}, got {got}"
            raise InputError(msg)
        first, latest = None, 0
        for serial, (number, line) in enumerate(source):
            row = self._row(number, line)
            time = _nanoseconds(row)
            first = time if first is None else first
            latest = row.in_order(_COLUMNS[0], time, latest)
            yield Request(
                id=serial,
                arrival=time - first,
                prompt_tokens=_tokens(row, _COLUMNS[1], 1),
                output_tokens=_tokens(row, _COLUMNS[2], 0),
                key_tokens=self.key_tokens,
            )
        if first is None:
            msg = f"{self.path}: no rows after the header"
            raise InputError(msg)

    @classmethod
    def recognises(cls, first_line: bytes) -> bool:
        """Return True if the line names the three columns."""
        return first_line.strip() == _HEADER

    def _row(self, number: int, line: bytes) -> Row:
        cells = _text(line).split(",")
        row = Row(self.path, number, dict(zip(_COLUMNS, cells, strict=False)))
        if len(cells) > len(_COLUMNS):
            rest = ",".join(cells[2:])
            raise row.error(field=_COLUMNS[2], expected="the last column", got=rest)
        return row


def _text(line: bytes) -> str:
    return line.decode(errors="replace").strip()


def _tokens(row: Row, name: str, least: int) -> int:
    text = row.fields.get(name, "")
    if _COUNT.fullmatch(text) is None or int(text) < least:
        raise row.error(field=name, expected=f"a whole number of tokens, at least {least}")
    return int(text)


def _nanoseconds(row: Row) -> int:
    match = _STAMP.fullmatch(row.fields[_COLUMNS[0]])
    try:
        if match is not None:
            moment = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
            return (moment - _EPOCH) // _SECOND * NS_PER_S + int((match[2] or "").ljust(9, "0"))
    except ValueError:
        pass
    raise row.error(field=_COLUMNS[0], expected="a time such as 2023-11-16 18:15:46.6805900")
