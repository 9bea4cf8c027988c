"""Results of benchmarks: ceilings of the machine, and a row for each measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from statistics import median
from time import monotonic
from typing import Any, Literal, TypeAlias

import attrs

Unit: TypeAlias = Literal["bytes", "blocks", "requests"]
"""Unit of the amount of a row."""

LATE = "not measured: the deadline"
"""How the note of a row begins that was not measured in time."""


@attrs.frozen(kw_only=True)
class Settings:
    """Selection of the measurements.

    Attributes:
        quick: whether to measure a few small cases, each briefly.
        check: whether to check results alone, and to measure no times.
        only: operations to measure; empty: all.
        dtypes: dtypes of K/V to measure; empty: the default ones of the suite.
        backend: backend of the tensor suites, by name and options; None: the default one of
            the suite.
        threads: threads that a CPU computes with.
        deadline: seconds after which no further case is begun; None: no deadline.
        begun: when the run began, as `time.monotonic` gives it.
    """

    quick: bool = False
    check: bool = False
    only: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    backend: str | None = None
    threads: int = 1
    deadline: float | None = None
    begun: float = attrs.field(factory=monotonic)

    def wants(self, operation: str) -> bool:
        """Return True if an operation is to be measured."""
        return not self.only or operation in self.only

    @property
    def late(self) -> str | None:
        """Why no further case is begun, the deadline having passed; None: it has not."""
        if self.deadline is None or monotonic() - self.begun <= self.deadline:
            return None
        return f"{LATE} of {self.deadline:g} s has passed"


@attrs.frozen
class Ceiling:
    """A limit of the machine itself, measured before the first case and after the last.

    Attributes:
        name: name of the limit, as in `Row.of`.
        first, last: bytes a second. A copy counts the bytes read and the bytes written.
    """

    name: str
    first: float
    last: float | None = None

    @property
    def rate(self) -> float:
        """The greater of the two, in bytes a second: shares are of it."""
        return max(self.first, self.last or 0.0)


@attrs.frozen(kw_only=True)
class Target:
    """The goal of a row: at least `share` of its ceiling, or at most `seconds`."""

    share: float | None = None
    seconds: float | None = None

    def reached(self, share: float | None, seconds: float | None) -> bool | None:
        """Return True if the goal is reached; None if nothing was measured."""
        if self.seconds is not None:
            return None if seconds is None else seconds <= self.seconds
        return None if share is None or self.share is None else share >= self.share


@attrs.frozen(kw_only=True)
class Row:
    """One operation of one implementation, measured.

    Attributes:
        suite: suite that it belongs to.
        operation: name of the operation, such as `decode`.
        case: dtype and sizes.
        by: the implementation: a backend of kvcore, or a peer.
        amount: amount of work, in `unit`: of memory, the bytes that must be read and written.
        unit: unit of the amount.
        seconds: median time; None if it was not measured.
        spread: difference of two medians of the same calls, by their mean: times that differ
            by less are equal. None: there is one time at most.
        of: name of the reference of `share`: a ceiling, or the `by` of a baseline.
        share: rate of the row by that of the reference.
        target: the goal; None: there is none.
        error: greatest difference from float64 over the same stored numbers, as a part of the
            greatest of them; NaN if a slot was read that was never stored.
        allowed: greatest `error` that counts as right.
        note: why a number is missing, or how it was timed.
    """

    suite: str
    operation: str
    case: str
    by: str
    amount: float | None = None
    unit: Unit = "bytes"
    seconds: float | None = None
    spread: float | None = None
    of: str | None = None
    share: float | None = None
    target: Target | None = None
    error: float | None = None
    allowed: float = 0.0
    note: str = ""

    @property
    def rate(self) -> float | None:
        """`amount` a second."""
        if self.seconds is None or self.amount is None:
            return None
        return self.amount / max(self.seconds, 1e-12)

    @property
    def correct(self) -> bool | None:
        """Whether the result is right; None if no result was checked."""
        return None if self.error is None else self.error <= self.allowed

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None without a target, or without a time."""
        return None if self.target is None else self.target.reached(self.share, self.seconds)

    def document(self) -> dict[str, Any]:
        """Return the row as a JSON object, with derived fields."""
        fields = attrs.asdict(self)
        # JSON has no NaN: the error is missing then, and `correct` is false.
        if self.error is not None and not isfinite(self.error):
            fields["error"] = None
        derived = {"rate": self.rate, "correct": self.correct, "reached": self.reached}
        return fields | derived


Tell: TypeAlias = Callable[[Row], None]
"""Called with each row as soon as it is measured."""


def spread_of(times: Sequence[float]) -> float | None:
    """Return the `Row.spread` of times: of every other one; None: a time is no two."""
    if len(times) == 1:
        return None
    even, other = median(times[::2]), median(times[1::2])
    return 2 * abs(even - other) / max(even + other, 1e-12)


@attrs.frozen(kw_only=True)
class BenchResult:
    """The measurements, the machine, and the bandwidth of its memory.

    Attributes:
        machine: names and versions, as `describe_machine` returns them.
        settings: selection of the measurements.
        ceilings: rates of the memory.
        rows: the rows, in the order in which they were measured.
        seconds: time of the whole run.
    """

    machine: dict[str, Any]
    settings: Settings
    ceilings: Sequence[Ceiling]
    rows: Sequence[Row]
    seconds: float

    @property
    def wrong(self) -> list[Row]:
        """Rows with wrong results."""
        return [row for row in self.rows if row.correct is False]

    def document(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        settings = attrs.asdict(self.settings)
        del settings["begun"]
        return {
            "schema": 1,
            "machine": self.machine,
            "settings": settings,
            "ceilings": [attrs.asdict(ceiling) for ceiling in self.ceilings],
            "rows": [row.document() for row in self.rows],
            "wrong": len(self.wrong),
            "seconds": self.seconds,
        }


def with_shares(rows: Sequence[Row], ceilings: Sequence[Ceiling]) -> list[Row]:
    """Return rows with their shares of the ceilings that they name."""
    rates = {ceiling.name: ceiling.rate for ceiling in ceilings}
    shared = []
    for row in rows:
        rate, ceiling = row.rate, rates.get(row.of or "")
        share = row.share if rate is None or not ceiling else rate / ceiling
        shared.append(attrs.evolve(row, share=share))
    return shared
