"""Tables of arrival times and lengths, with columns of any names."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from typing import ClassVar

import attrs
from attrs.validators import ge

from kvcore import InputError, Request
from kvcore.units import INT64_LIMIT
from kvcore.workloads import json_fields, lines
from kvcore_plugins.workload.rows import Row, TimedFile, parse_row

USUAL = {
    "time": "time timestamp arrival arrivaltime arrivaltimestamp arrivedat requesttime "
    "requesttimestamp starttime starttimes t",
    "input": "input inputlen inputlens inputlength inputtokens inputtokencount numinputtokens "
    "prompt promptlen promptlength prompttokens numprompttokens numprefilltokens requesttokens",
    "output": "output outputlen outputlens outputlength outputtokens outputtokencount "
    "numoutputtokens completionlen completionlength completiontokens generatedtokens "
    "numdecodetokens responselen responselength responsetokens",
    "session": "session sessionid conversation conversationid chatid",
    "tenant": "tenant tenantid client clientid user userid",
}
"""Usual names of columns, in lower case, without signs."""

_OPTIONAL = ("session", "tenant")
_COUNT = re.compile(r"(\d{1,18})(?:\.0*)?", re.ASCII)
_LETTERS = re.compile("[^a-z0-9]")


@attrs.define(eq=False)
class Lengths(TimedFile):
    """Arrival times and lengths in a table, CSV or TSV; its requests share no blocks.

    The first line names the columns; the first column with a usual name is used, in any
    case and spelling: `Request tokens`, `input_length`. Options give other names. Such a
    table has the lengths of prompts, and not their tokens: requests have no keys and never
    hit. ServeGen, BurstGPT and most logs have this form. So has the result of
    `vllm bench serve --save-result --save-detailed`, a JSON object of columns; its failed
    requests are left out, and counted in `notes`.

    A time is a number in `unit`, or a date and time of ISO 8601 (UTC without a time zone; to
    the microsecond). Arrivals count from that of the first row; the id of a request is its row,
    from 0. A table without times needs `rate`.

    Source: of the usual names: Xiang et al., ServeGen, 2025; Wang et al., BurstGPT, KDD'25;
    Agrawal et al., Vidur, MLSys'24; vLLM, `vllm/benchmarks/serve.py`.

    Attributes:
        path: path of the file.
        time, input, output: the columns of arrivals, prompt and output lengths.
        session, tenant: the columns of the session and the tenant of a request.
        key_tokens: tokens a key would stand for; the block size of a cache that serves it.
        unit, rate, seed: of times, as every `TimedFile` has them.
    """

    name: ClassVar[str] = "lengths"
    # Of vLLM's results, and of tables in any spelling.
    line_fields = (("input_lens", "output_lens"), ("time", "input", "output"))

    time: str | None = None
    input: str | None = None
    output: str | None = None
    session: str | None = None
    tenant: str | None = None
    key_tokens: int = attrs.field(default=16, validator=ge(1))
    _failed: int = attrs.field(default=0, init=False, repr=False)

    def __iter__(self) -> Iterator[Request]:
        """Yield one request for each row. Keeps one row in memory; of a JSON object all."""
        source = lines(self.path)
        number, line = next(source)
        columnar = line.lstrip().startswith(b"{")
        header, table = (self._columnar if columnar else self._table)(number, line, source)
        columns = self._columns(number, header)
        when = columns.get("time")
        if columnar and when is not None:
            # The order is that in which requests were made, not that in which they were sent.
            table = iter(sorted(table, key=lambda row: row.time(when, self.unit)))
        drawn, first, latest = self.drawn_arrivals(), None, 0
        for serial, row in enumerate(table):
            time = next(drawn) if when is None else row.time(when, self.unit)
            if first is None:
                first = latest = time
                if when is not None:
                    self.refuse_rate(row, when)
            expected = "no earlier time than before (sorted rows)"
            latest = row.in_order(when or "", time, latest, expected)
            if time - first >= INT64_LIMIT:
                expected = "a time less than 292 years after the first"
                raise row.error(field=when or "", expected=expected)
            yield Request(
                id=serial,
                arrival=time - first,
                prompt_tokens=_tokens(row, columns["input"], 1),
                output_tokens=_tokens(row, columns["output"], 0),
                key_tokens=self.key_tokens,
                session=_label(row, columns.get("session")),
                tenant=_label(row, columns.get("tenant")),
            )
        if first is None:
            msg = f"{self.path}: no rows after the header"
            raise InputError(msg)

    @property
    def notes(self) -> list[str]:
        """The number of failed requests that were left out."""
        return [f"failed requests left out: {self._failed}"] if self._failed else []

    def _table(
        self, number: int, line: bytes, source: Iterator[tuple[int, bytes]]
    ) -> tuple[list[str], Iterator[Row]]:
        """Return the header of a table, and its rows."""
        delimiter = _delimiter(line)
        header = self._cells(number, line, delimiter)

        def table() -> Iterator[Row]:
            for place, text in source:
                cells = self._cells(place, text, delimiter)
                row = Row(self.path, place, dict(zip(header, cells, strict=False)))
                if len(cells) > len(header):
                    raise row.error(field=header[-1], expected="the last column", got=cells)
                yield row

        return header, table()

    def _columnar(
        self, number: int, line: bytes, source: Iterator[tuple[int, bytes]]
    ) -> tuple[list[str], Iterator[Row]]:
        """Return the names of the lists in a JSON object, and the rows of their values."""
        whole = parse_row(self.path, number, line)
        for number, _ in source:  # noqa: PLR1704 - what matters is that there is one
            msg = f"{self.path}:{number}: a second result: give a file for each"
            raise InputError(msg)
        lists = {name: value for name, value in whole.fields.items() if type(value) is list}
        used = [*self._columns(number, list(lists)).values(), *({"errors"} & lists.keys())]
        for name in used:
            if len(lists[name]) != len(lists[used[0]]):
                expected = f"{len(lists[used[0]])} values, as {used[0]!r} has"
                raise whole.error(field=name, expected=expected, got=len(lists[name]))

        def table() -> Iterator[Row]:
            self._failed = 0
            for place, cells in enumerate(zip(*(lists[name] for name in used), strict=True)):
                fields = dict(zip(used, map(str, cells), strict=True))
                if fields.get("errors"):
                    self._failed += 1
                else:
                    yield Row(self.path, number, fields, f"[{place}].")

        return list(lists), table()

    @classmethod
    def recognises(cls, first_line: bytes) -> bool:
        """Return True if the line has usual names of columns of both lengths."""
        if names := json_fields(first_line):
            return names >= set(cls.line_fields[0])
        try:
            header = _split(first_line, _delimiter(first_line))
        except csv.Error:
            return False
        return all(_usual(role, header) for role in ("input", "output"))

    def _columns(self, number: int, header: list[str]) -> dict[str, str]:
        """Return the name of the column of each role that the table has."""
        columns = {}
        for role in USUAL:
            given = getattr(self, role)
            found = _usual(role, header) if given is None else given
            if found is not None and header.count(found) > 1:
                msg = (
                    f"{self.path}:{number}: {header.count(found)} columns are called {found!r}"
                )
                raise InputError(msg)
            if found in header:
                columns[role] = found
            elif role == "time" and given is None and self.rate is not None:
                continue
            elif given is not None or role not in _OPTIONAL:
                wanted = f"called {given!r}" if given else f"that looks like {role!r}"
                msg = (
                    f"{self.path}:{number}: no column {wanted}; name it by the option "
                    f"{role}=COLUMN"
                    + (", or give rate=REQUESTS_PER_SECOND" if role == "time" else "")
                    + f". There are: {', '.join(header)}"
                )
                raise InputError(msg)
        return columns

    def _cells(self, number: int, line: bytes, delimiter: str) -> list[str]:
        try:
            return _split(line, delimiter)
        except csv.Error as error:
            msg = f"{self.path}:{number}: not a row of a table: {error}"
            raise InputError(msg) from error


def _delimiter(header: bytes) -> str:
    """Return the mark between the columns: a tab, semicolon or comma."""
    return next((mark for mark in "\t;" if mark.encode() in header), ",")


def _split(line: bytes, delimiter: str) -> list[str]:
    text = line.decode(errors="replace").rstrip("\r\n")
    (cells,) = csv.reader([text], delimiter=delimiter, strict=True, skipinitialspace=True)
    return [cell.strip() for cell in cells]


def _usual(role: str, header: list[str]) -> str | None:
    """Return the first column of a header that has a usual name of that role."""
    known = USUAL[role].split()
    return next((name for name in header if _LETTERS.sub("", name.lower()) in known), None)


def _tokens(row: Row, name: str, least: int) -> int:
    match = _COUNT.fullmatch(row.fields.get(name, ""))
    if match is None or int(match[1]) < least:
        raise row.error(field=name, expected=f"a whole number of tokens, at least {least}")
    return int(match[1])


def _label(row: Row, name: str | None) -> str | None:
    return None if name is None else row.fields.get(name) or None
