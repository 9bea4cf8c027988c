"""The Azure LLM inference traces: real arrivals and lengths, no prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import ClassVar, cast

import attrs
from attrs.validators import ge

from kvcore import InputError, Request
from kvcore.workloads import lines
from kvcore_plugins.workload._plain import csv_reader
from kvcore_plugins.workload.file_workload import FileWorkload
from kvcore_plugins.workload.rows import Row, as_json, time_order
from kvcore_plugins.workload.times import Clock, Timed, TimeOrder, moment
from kvcore_plugins.workload.usage import UNKNOWN_PROMPTS

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_HEADER = ",".join(_COLUMNS)
_COUNT = re.compile(r"\d{1,18}", re.ASCII)


@attrs.define(eq=False)
class Azure(FileWorkload):
    """Arrival times and lengths of a production service; its requests have no keys.

    A CSV file with the columns `TIMESTAMP` (UTC, any number of digits down to 1 ns),
    `ContextTokens` and `GeneratedTokens`, in any order. Rows are sorted by time, and arrivals
    count from the first; the id of a request is its row, from 0.

    Source: Patel et al., Splitwise, ISCA'24.

    Attributes:
        path: path of the file.
        key_tokens: tokens a key would stand for; the block size of a cache that serves it.
    """

    name: ClassVar[str] = "azure"
    line_fields = (_COLUMNS,)

    key_tokens: int = attrs.field(default=16, validator=ge(1))
    _order: TimeOrder | None = attrs.field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[Request]:
        """Yield one request for each row. Keeps some rows in memory."""
        source = lines(self.path)
        line_number, line = next(source)
        if not self.recognises(line):
            expected, got = _HEADER, as_json(_text(line))
            msg = f"{self.path}:{line_number}: expected the header {expected}, got {got}"
            raise InputError(msg)
        header = _text(line).split(",")
        self._order = order = time_order(Clock(_COLUMNS[0]), partial(self._row, header))
        empty = True
        for time, _, request in order.sort(self._timed(header, source)):
            empty = False
            request.arrival = time - order.first
            yield request
        if empty:
            msg = f"{self.path}: no rows after the header"
            raise InputError(msg)

    @property
    def notes(self) -> list[str]:
        """Sorted rows, a span that is not plausible, and that no prompts are known."""
        if self._order is None:
            return []
        return [*self._order.notes(Clock(_COLUMNS[0])), UNKNOWN_PROMPTS]

    @classmethod
    def recognises(cls, first_line: bytes) -> bool:
        """Return True if the line names the three columns."""
        # A row of another format may have half a megabyte.
        is_short = first_line.count(b",") == len(_COLUMNS) - 1
        return is_short and sorted(_text(first_line).split(",")) == sorted(_COLUMNS)

    def _timed(
        self, header: list[str], source: Iterator[tuple[int, bytes]]
    ) -> Iterator[Timed[Request]]:
        """Yield the requests with their times: plain rows as the core in C reads them."""
        time, prompt, output = map(header.index, _COLUMNS)
        read = csv_reader((time, prompt, output), self.key_tokens)
        for serial, (line_number, line) in enumerate(source):
            request = None if read is None else read(line, serial)
            if request is None:
                row = self._parsed(header, line_number, line)
                request = Request(
                    id=serial,
                    arrival=_nanoseconds(row),
                    prompt_tokens=_tokens(row, _COLUMNS[1], 1),
                    output_tokens=_tokens(row, _COLUMNS[2], 0),
                    key_tokens=self.key_tokens,
                )
            yield request.arrival, serial, request

    def _row(self, header: list[str], request: Request) -> Row:
        """Return the row of a request, for an error."""
        index = cast("int", request.id) + 1
        return self._parsed(header, *next(islice(lines(self.path), index, None)))

    def _parsed(self, header: list[str], line_number: int, line: bytes) -> Row:
        cells = _text(line).split(",")
        row = Row(self.path, line_number, dict(zip(header, cells, strict=False)))
        if len(cells) > len(header):
            rest = ",".join(cells[2:])
            raise row.error(field=header[2], expected="the last column", got=rest)
        return row


def _text(line: bytes) -> str:
    return line.decode(errors="replace").strip()


def _tokens(row: Row, name: str, least: int) -> int:
    text = row.fields.get(name, "")
    if _COUNT.fullmatch(text) is None or int(text) < least:
        raise row.error(field=name, expected=f"a whole number of tokens, at least {least}")
    return int(text)


def _nanoseconds(row: Row) -> int:
    time = moment(row.fields.get(_COLUMNS[0], ""))
    if time is None:
        expected = "a time such as 2023-11-16 18:15:46.6805900"
        raise row.error(field=_COLUMNS[0], expected=expected)
    return time
