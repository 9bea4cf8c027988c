"""Tables of arrival times and lengths, whatever their columns are called."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import ClassVar

import attrs
from attrs.validators import ge, in_

from kvcore import InputError, Request
from kvcore.units import INT64_LIMIT, NS_PER_S
from kvcore.workloads import lines
from kvcore_plugins.workload.rows import FileWorkload, Row

UNITS = {"s": NS_PER_S, "ms": 10**6, "us": 10**3, "ns": 1}

USUAL = {
    "time": "time timestamp arrival arrivaltime arrivaltimestamp arrivedat requesttime "
    "requesttimestamp starttime t",
    "input": "input inputlen inputlength inputtokens inputtokencount numinputtokens prompt "
    "promptlen promptlength prompttokens numprompttokens numprefilltokens requesttokens",
    "output": "output outputlen outputlength outputtokens outputtokencount numoutputtokens "
    "completionlen completionlength completiontokens generatedtokens numdecodetokens "
    "responselen responselength responsetokens",
    "session": "session sessionid conversation conversationid chatid",
    "tenant": "tenant tenantid client clientid user userid",
}
"""How columns are usually called, without case and whatever is no letter or digit."""

_OPTIONAL = ("session", "tenant")
_COUNT = re.compile(r"(\d{1,18})(?:\.0*)?", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,2})?", re.ASCII)
_LETTERS = re.compile("[^a-z0-9]")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@attrs.define(eq=False)
class Lengths(FileWorkload):
    """Arrival times and lengths out of a table, CSV or TSV; its requests share nothing.

    The first line names the columns; the first that is called as usual is taken, in any
    case and spelling: `Request tokens`, `input_length`. Others are given by their names.
    Such a table says how long prompts were, not what was in them: requests have no keys,
    and nothing is ever hit. ServeGen, BurstGPT and most logs look so.

    A time is a number in `unit`, or a date and time of ISO 8601 (UTC, unless it says; to
    the microsecond). Arrivals count from the first row's; the id of a request is its row,
    from 0.

    Source: of the usual names: Xiang et al., ServeGen, 2025; Wang et al., BurstGPT, KDD'25;
    Agrawal et al., Vidur, MLSys'24.

    Attributes:
        path: path of the file.
        time, input, output: the columns of arrivals, prompt and output lengths.
        session, tenant: the columns of the session and the tenant of a request.
        unit: unit of times that are numbers: s, ms, us, ns.
        key_tokens: tokens a key would stand for; the block size of a cache that serves it.
    """

    name: ClassVar[str] = "lengths"

    time: str | None = None
    input: str | None = None
    output: str | None = None
    session: str | None = None
    tenant: str | None = None
    unit: str = attrs.field(default="s", validator=in_(UNITS))
    key_tokens: int = attrs.field(default=16, validator=ge(1))

    def __iter__(self) -> Iterator[Request]:
        """Yield one request for each row. Keeps one row in memory."""
        source = lines(self.path)
        number, line = next(source)
        delimiter = _delimiter(line)
        header = self._cells(number, line, delimiter)
        columns = self._columns(number, header)
        first = latest = None
        for serial, (number, line) in enumerate(source):
            cells = self._cells(number, line, delimiter)
            row = Row(self.path, number, dict(zip(header, cells, strict=False)))
            if len(cells) > len(header):
                raise row.error(field=header[-1], expected="the last column", got=cells)
            time = _nanoseconds(row, columns["time"], UNITS[self.unit])
            if first is None or latest is None:
                first = latest = time
            expected = "no earlier time than before (sorted rows)"
            latest = row.in_order(columns["time"], time, latest, expected)
            if time - first >= INT64_LIMIT:
                expected = "a time less than 292 years after the first"
                raise row.error(field=columns["time"], expected=expected)
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

    @classmethod
    def recognises(cls, first_line: bytes) -> bool:
        """Return True if the line names columns of times and both lengths, as usual."""
        try:
            header = _split(first_line, _delimiter(first_line))
        except csv.Error:
            return False
        return all(_usual(role, header) for role in ("time", "input", "output"))

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
            elif given is not None or role not in _OPTIONAL:
                wanted = f"called {given!r}" if given else f"that looks like {role!r}"
                msg = (
                    f"{self.path}:{number}: no column {wanted}; name it by the option "
                    f"{role}=COLUMN. There are: {', '.join(header)}"
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


def _nanoseconds(row: Row, name: str, unit: int) -> int:
    text = row.fields.get(name, "")
    if _NUMBER.fullmatch(text):
        time = int((Decimal(text) * unit).to_integral_value())
        if time < INT64_LIMIT:
            return time
    else:
        with suppress(ValueError):
            moment = datetime.fromisoformat(text)
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            return (moment - _EPOCH) // _MICROSECOND * UNITS["us"]
    expected = "a number, or a time such as 2024-05-10 18:15:46.680"
    raise row.error(field=name, expected=expected)
