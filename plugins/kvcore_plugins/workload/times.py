"""Times in the rows of workload files: their columns, their units, and their order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, tzinfo
from decimal import Decimal
from functools import lru_cache
from itertools import islice
from math import gcd
from operator import le
from typing import Any, TypeAlias, TypeVar

from kvcore.errors import shorten
from kvcore.units import INT64_LIMIT, NS_PER_S

UNITS = {"s": NS_PER_S, "ms": 10**6, "us": 10**3, "ns": 1}
"""Nanoseconds of the units that a user can give."""

STARTS = (
    "time timestamp arrival arrivaltime arrivaltimestamp arrivedat requesttime "
    "requesttimestamp starttime starttimes t ts start requeststart requeststarttime startedat "
    "created createdat createtime createdtime creationtime requestreceived received receivedat "
    "requestedat submitted submittedat submittime sentat sendtime eventtime date datetime"
)
"""Usual names of the time at which a request was sent, in lower case, without signs."""

ENDS = (
    "end endtime endtimes endedat requestend requestendtime finish finishtime finishedat "
    "completedat completiontime"
)
"""Usual names of the time at which its answer was complete."""

HEAD = 100
"""Number of first rows that are looked at before the first request is yielded."""

WINDOW = 256
"""Number of rows that are read ahead, so that rows may be late by as many places."""

_UNIT_WORDS = {
    word: UNITS[unit]
    for unit, words in {
        "s": "s sec secs second seconds",
        "ms": "ms msec msecs milli millis millisecond milliseconds",
        "us": "us µs μs usec usecs micro micros microsecond microseconds",
        "ns": "ns nsec nsecs nano nanos nanosecond nanoseconds",
    }.items()
    for word in words.split()
} | dict.fromkeys(("min", "mins", "minute", "minutes"), 60 * NS_PER_S)
_NAMES = {factor: unit for unit, factor in UNITS.items()} | {60 * NS_PER_S: "min"}
_EPOCH_WORDS = {"unix", "epoch", "utc"}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-zµμ]+|\d+")
# The least size of a number that counts from 1970 in a unit: that of 1973, of 2001 in s.
_SIZES = ((10**17, "ns"), (10**14, "us"), (10**11, "ms"), (10**9, "s"))
# Compiled when they are first used: times are whole numbers as a rule.
_NUMBER = r"(?a)[+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][+-]?\d{1,2})?"
_MOMENT = (
    r"(?ai)(\d{4}-?\d\d-?\d\d[T ]\d\d:?\d\d:?\d\d)(?:[.,](\d{1,30}))? ?"
    r"(Z|UTC|[+-]\d\d(?::?\d\d)?)?"
)
_DATE = r"(?a)(\d{4}-\d\d-\d\d)([T ]00:00(?::00(?:\.0{1,30})?)?)?"
_TIME_OF_DAY = r"(?ai)T?(\d{1,2}:\d\d)(:\d\d)?([.,]\d{1,30})? ?(Z|UTC|[+-]\d\d(?::?\d\d)?)?"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DIGITS = 9
_HOUR = 3600 * NS_PER_S
_DAY = 24 * _HOUR
_BACK = 600 * NS_PER_S  # rows of a log are late by less

_T = TypeVar("_T")

Timed: TypeAlias = "tuple[int, int, _T]"
"""The time (ns) of a row, a number that orders the rows of one time, and the row."""


@lru_cache(maxsize=1 << 12)
def name_and_unit(name: str) -> tuple[str, int | None]:
    """Return the name of a column in lower case, without signs and unit, and its unit in ns.

    `startTimeUnixNano` is `("starttime", 1)`, `created_at_us` is `("createdat", 1000)`. Of a
    name with dots, that of a field in an object, the last part counts.
    """
    if name.isascii() and name.isalpha() and name.islower():  # a word, as most names are
        return name, None
    words = [word.lower() for word in _WORD.findall(name.rpartition(".")[2])]
    factor = _UNIT_WORDS.get(words[-1]) if len(words) > 1 else None
    if factor is not None:
        words.pop()
    return "".join(word for word in words if word not in _EPOCH_WORDS) or "".join(words), factor


@lru_cache(maxsize=1 << 8)
def find_times(names: tuple[str, ...], usual: str = STARTS) -> list[str]:
    """Return the names of columns with usual names of times, the most usual one first.

    The result is that of every call with these names: treat it as immutable.
    """
    order = usual.split()
    known = ((name_and_unit(name)[0], name) for name in names)
    ordered = sorted((order.index(base), name) for base, name in known if base in order)
    return [name for _, name in ordered]


def finest(
    names: Sequence[str], rows: Sequence[Any], unit: str | None, dates: Sequence[str] = ()
) -> Clock | None:
    """Return the clock of the column whose times in `rows` are the finest; None: none has any.

    Of equally fine ones it is that of the first. A time of day counts from its date.

    Args:
        names: the columns.
        rows: mappings of columns to values.
        unit: the unit of times that are numbers; None: as a `Clock` finds it.
        dates: the columns in which times of day may have their dates.
    """
    best, least = "", 0
    unread: dict[str, str] = {}
    dated: dict[str, str | None] = {}
    for name in names:
        clock = Clock(name, unit, date=_date_beside(name, dates, rows))
        given = [row for row in rows if row.get(name) not in (None, "")]
        times = {clock.time_of(row): row[name] for row in given}
        other = times.pop(None, None)
        # The few that are none beside dates are errors of their rows.
        if other is not None and clock.date is None:
            unread[name] = shorten(repr(other))
        # A column that lacks times, or has others than these, is none of times.
        if len(given) < len(rows) * 0.9 or name in unread:
            continue
        dated[name] = clock.date
        step = gcd(*times)  # type: ignore[arg-type]  # tested above
        if not best or 0 < step < least or least == 0 < step:
            best, least = name, step
    return Clock(best, unit, date=dated[best], unread=unread) if best else None


def _date_beside(name: str, dates: Iterable[str], rows: Sequence[Any]) -> str | None:
    """Return the column with the dates of the times of day in a column; None: it has others."""
    if not _has_form(_TIME_OF_DAY, name, rows):
        return None
    return next((date for date in dates if _has_form(_DATE, date, rows)), None)


def _has_form(pattern: str, name: str, rows: Sequence[Any]) -> bool:
    """Return True if nine in ten values of a column, at least one, are texts of a form."""
    values = [row[name] for row in rows if row.get(name) not in (None, "")]
    fit = [type(value) is str and re.fullmatch(pattern, value.strip()) for value in values]
    return sum(map(bool, fit)) >= max(1, 0.9 * len(fit))


class Clock:
    """Reads the times of one column, all in one unit.

    The unit of numbers is the given one, or that of the column's name. Without either it is a
    guess: by the size of the first one if that is a time since 1970, else `assumed`.

    Attributes:
        name: the column.
        unit: the given unit; None: none is given.
        assumed: unit of numbers that count from another moment than 1970.
        reason: why that is assumed, for the note; empty: it is known, and not noted.
        guess: the note of a unit that is a guess; empty: the unit is known.
        date: the column with the dates of times of day; None: times are whole.
        unread: the columns with usual names of times that have others, with one of these.
        midnight: whether a date without a time of day was read.
        zone: the zone of texts without one; None: UTC. Of an hour that comes twice, when clocks
            are set back, that time is taken which is nearer to the time read before.
        local: a text without a zone that was read; empty: there is none.
        repeated: number of times read that come twice.
        set_back: the first text without a zone that was about an hour earlier than the one
            before; empty if there was none.
    """

    def __init__(
        self,
        name: str,
        unit: str | None = None,
        assumed: str = "s",
        *,
        date: str | None = None,
        unread: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.date = date
        self.unread = unread or {}
        self.midnight = False
        self.zone: tzinfo | None = None
        self.local = ""
        self.repeated = 0
        self.set_back = ""
        self._steps_back = self._hours_back = 0
        self._before: int | None = None
        self.unit = unit
        self.assumed = assumed
        self.reason = "since neither name nor size tells the unit"
        self.guess = ""
        self._factor = UNITS[unit] if unit else name_and_unit(name)[1] or 0

    @property
    def factor(self) -> int:
        """Nanoseconds of the unit of numbers."""
        return self._factor or UNITS[self.assumed]

    def time_of(self, fields: Mapping[str, Any]) -> int | None:
        """Return the time of a row in ns, as `read` does, with its date if that is apart."""
        value = fields.get(self.name)
        if self.date is None:
            return self.read(value)
        return self._instant(_joined(fields.get(self.date), value))

    def read(self, value: Any) -> int | None:
        """Return a time in ns: a number, or a date and time of ISO 8601; None if it is none.

        Exact to the nanosecond: a product of floats is not.
        """
        kind = type(value)
        if kind is int:
            time: int = value * (self._factor or self._guess(value))
            return time if -INT64_LIMIT < time < INT64_LIMIT else None
        if kind is not str and kind is not float:
            return None
        text = str(value).strip()
        digits, _, part = text.partition(".")
        if text.isascii() and digits.isdigit() and len(digits) <= 2 * _DIGITS:
            integer = int(digits)
            factor = self._factor or self._guess(integer)
            if not part:
                return self._in_range(integer * factor)
            if factor == NS_PER_S and len(part) <= _DIGITS and part.isdigit():
                return self._in_range(integer * factor + int(part.ljust(_DIGITS, "0")))
        if re.fullmatch(_NUMBER, text):
            decimal = Decimal(text)
            factor = self._factor or self._guess(int(decimal))
            return self._in_range(int((decimal * factor).to_integral_value()))
        instant = self._instant(text)
        if instant is not None and not self.midnight:
            self.midnight = len(text) <= len("2024-05-10")
        return instant

    def _instant(self, text: str) -> int | None:
        """Return the ns since 1970 of a date and time; without a zone by `zone`."""
        parsed = _parsed(text)
        if parsed is None or parsed[0].tzinfo is not None:
            return _since_1970(parsed)
        self.local, (local, fraction), zone = text, parsed, self.zone or UTC
        time = _since_1970((local.replace(tzinfo=zone), fraction))
        later = time
        if self.zone is not None:  # of the two in an hour that is repeated
            later = _since_1970((local.replace(tzinfo=zone, fold=1), fraction))
        if time is None or later is None:
            return None
        before = time if self._before is None else self._before
        if later > time:
            self.repeated += 1
            time = later if abs(later - before) < abs(time - before) else time
        elif self.zone is None and before - time >= _BACK:
            self._steps_back += 1
            if _HOUR - _BACK < before - time <= _HOUR:
                self.set_back = self.set_back or text
                self._hours_back += 1
        self._before = time
        return time

    @property
    def clock_change(self) -> str:
        """The sign that clocks were set back amid texts without a zone; empty: nothing."""
        if not self.set_back or self._hours_back < self._steps_back:
            return ""
        return (
            f"times go back by an hour at {self.set_back!r}, as at a clock "
            "change: tz=ZONE, such as tz=Europe/Berlin, tells the two hours apart"
        )

    def zone_notes(self) -> Iterator[str]:
        """Yield the notes on texts without a zone, and on a zone that changes nothing."""
        if self.zone is None and self.local:
            change = self.clock_change or "tz=ZONE says otherwise"
            yield f"times in {self.name!r} without a zone are read as UTC: {change}"
        elif self.zone is not None and not self.local:
            yield f"tz={self.zone} changes nothing: no time in {self.name!r} is without a zone"
        if self.repeated:
            yield (
                f"times of an hour that came twice in {self.zone}, told apart by the order of "
                f"rows: {self.repeated:,}"
            )

    def _guess(self, integer: int) -> int:
        size = next((unit for least, unit in _SIZES if abs(integer) >= least), None)
        unit, reason = (size, "by their size") if size else (self.assumed, self.reason)
        if reason:
            self.guess = (
                f"times in {self.name!r} are read as {unit}, {reason}: unit= says otherwise"
            )
        self._factor = UNITS[unit]
        return self._factor

    @staticmethod
    def _in_range(time: int) -> int | None:
        return time if -INT64_LIMIT < time < INT64_LIMIT else None


def zone_of(name: str | None) -> tzinfo | None:
    """Return the time zone of a name such as `Europe/Berlin`; None for None.

    Raises:
        ValueError: there is none.
    """
    if name is None:
        return None
    from zoneinfo import ZoneInfo  # noqa: PLC0415 - for few files

    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError) as error:
        msg = f"'tz' must be a time zone such as Europe/Berlin (got {name!r})"
        raise ValueError(msg) from error


def is_zone(_instance: Any, _attribute: Any, name: str) -> None:
    """Raise ValueError if there is no time zone of this name, as a validator of an option."""
    zone_of(name)


def has_fraction(value: Any) -> bool:
    """Return True if a time is a number, perhaps as a text, that is not whole: 1.5, not 1.0."""
    if type(value) is float:
        return not value.is_integer()
    if type(value) is not str or re.fullmatch(_NUMBER, value.strip()) is None:
        return False
    number = Decimal(value.strip())
    return number != number.to_integral_value()


def _joined(date: Any, time: Any) -> str:
    """Return a date and a time of day in two texts as one; an empty text for others."""
    if type(date) is not str or type(time) is not str:
        return ""
    day, hour = re.fullmatch(_DATE, date.strip()), re.fullmatch(_TIME_OF_DAY, time.strip())
    if day is None or hour is None:
        return ""
    minutes, *rest = hour.groups(default="")
    return f"{day[1]}T{minutes:0>5}{rest[0] or ':00'}{rest[1]}{rest[2]}"


def moment(text: str) -> int | None:
    """Return the ns since 1970 of a date and time of ISO 8601; None for other texts.

    Without a time zone it is UTC. The fraction counts to the nanosecond.
    """
    return _since_1970(_parsed(text))


def _parsed(text: str) -> tuple[datetime, int] | None:
    """Return a date and time, whose zone is that of the text, and the ns of its second."""
    match = re.fullmatch(_MOMENT, text)
    with suppress(ValueError, OverflowError):
        if match is None:
            parsed = datetime.fromisoformat(text)
            return parsed, parsed.microsecond * UNITS["us"]
        date, part, zone = match.groups(default="")
        parsed = datetime.fromisoformat(date + ("+00:00" if zone.isalpha() else zone))
        return parsed, int((part or "0")[:_DIGITS].ljust(_DIGITS, "0"))
    return None


def _since_1970(parsed: tuple[datetime, int] | None) -> int | None:
    """Return the ns since 1970 of what `_parsed` returns; of a time without a zone in UTC."""
    if parsed is None:
        return None
    time, fraction = parsed
    with suppress(OverflowError):
        since = (time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH
        return (since.days * 86_400 + since.seconds) * NS_PER_S + fraction
    return None


class TimeOrder:
    """Sorts rows by time, most of which come in order, and records what is to be noted.

    Attributes:
        too_late: returns the error of a row that is later than `WINDOW` places.
        late: number of rows that stood after rows of a later time.
        rows, first, last: number of rows read, and the earliest and the latest time (ns).
    """

    def __init__(self, too_late: Callable[[Any], Exception]) -> None:
        self.too_late = too_late
        self.late = self.rows = self.first = self.last = 0

    def sort(self, timed: Iterable[Timed[_T]]) -> Iterator[Timed[_T]]:
        """Yield the rows by time.

        Memory: twice `WINDOW` rows; all of a file whose first `WINDOW` rows are out of order.

        Raises:
            Exception: that of `too_late`.
        """
        rest = iter(timed)
        pending = list(islice(rest, WINDOW))
        if not pending:
            return
        if not _in_order(pending):
            pending += rest
            self._count_late(pending)
            pending.sort(key=by_time)
        self.first, self.last, self.rows = pending[0][0], pending[-1][0], len(pending)
        while chunk := list(islice(rest, WINDOW)):
            self.rows += len(chunk)
            if chunk[0] < pending[-1] or not _in_order(chunk):
                earliest = pending[0]
                early = next((item for item in chunk if item < earliest), None)
                if early is not None:
                    raise self.too_late(early[2])
                pending += chunk
                self._count_late(pending)
                pending.sort(key=by_time)
                pending, chunk = pending[:-WINDOW], pending[-WINDOW:]
            yield from pending
            pending = chunk
            self.last = pending[-1][0]
        yield from pending

    def _count_late(self, items: Iterable[Timed[Any]]) -> None:
        latest: int | None = None
        for time, *_ in items:
            if latest is None or time >= latest:
                latest = time
            else:
                self.late += 1

    def notes(self, clock: Clock) -> list[str]:
        """Return the notes of how times were read, of sorted rows, and of an implausible span.

        Args:
            clock: what has read the times.
        """
        name, notes = clock.name, [clock.guess] if clock.guess else []
        notes += clock.zone_notes()
        if clock.date is not None:
            notes.append(f"times are {clock.date!r} and {name!r} together")
        if clock.midnight:
            notes.append(
                f"dates without a time of day in {name!r}: all requests of a day arrive at its "
                "midnight"
            )
        for other, value in clock.unread.items():
            notes.append(f"{other!r} is not read, since it has others than times: {value}")
        if self.late:
            notes.append(f"rows that stood after later ones, sorted by {name!r}: {self.late}")
        span = self.last - self.first
        if self.rows > 1 and (span > 365 * _DAY or span > _DAY * (self.rows - 1)):
            notes.append(
                f"times in {name!r} span {span / _DAY:,.1f} days for {self.rows:,} rows, which "
                "is not plausible: check them, and their unit (unit=)"
            )
        return notes


def _in_order(items: Sequence[Timed[Any]]) -> bool:
    return all(map(le, items, items[1:]))


def by_time(item: Timed[Any]) -> tuple[int, int]:
    """Return what rows are sorted by."""
    return item[:2]
