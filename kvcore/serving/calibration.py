"""Fitting the `linear` latency model to measured steps."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import combinations
from math import isfinite, sqrt
from pathlib import Path
from typing import TextIO

import attrs

from kvcore.errors import InputError
from kvcore.units import INT64_LIMIT, NS_PER_S, PS_PER_NS, picoseconds
from kvcore.workloads.files import lines

NAMES = ("step", "prefill", "decode", "context")
"""The coefficients: what a step takes by itself, and for one of each of `COUNTS`."""


SECOND = NS_PER_S * PS_PER_NS


Matrix = list[list[Fraction]]


@attrs.frozen
class Residual:
    """How a fitted time differs from the measured one.

    Attributes:
        step: the measured step.
        fitted: its time by the fitted coefficients, in picoseconds.
    """

    step: MeasuredStep
    fitted: int

    @property
    def error(self) -> int:
        """Picoseconds by which the fitted time is too long."""
        return self.fitted - self.step.time

    @property
    def relative(self) -> float:
        """The error as a share of the measured time."""
        return self.error / self.step.time


@attrs.frozen
class Calibration:
    """The `linear` latency model that fits measured steps best, and how well it does.

    Attributes:
        coefficients: picoseconds, by name.
        held: names of the coefficients that are 0 because anything above fits worse.
        residuals: one a measured step, in the order of the file.
    """

    coefficients: dict[str, int]
    held: tuple[str, ...]
    residuals: list[Residual]

    @property
    def spec(self) -> str:
        """The latency model as the command line takes it."""
        options = (f"{name}={ps / SECOND!r}" for name, ps in self.coefficients.items())
        return f"linear:{','.join(options)}"

    @property
    def rms(self) -> float:
        """Root of the mean squared error, in seconds."""
        return sqrt(self._squares / len(self.residuals)) / SECOND

    @property
    def mean(self) -> float:
        """Mean absolute error, in seconds."""
        return sum(abs(r.error) for r in self.residuals) / len(self.residuals) / SECOND

    @property
    def largest(self) -> float:
        """Largest absolute error, in seconds."""
        return max(abs(r.error) for r in self.residuals) / SECOND

    @property
    def mean_relative(self) -> float:
        """Mean absolute error as a share of the measured time."""
        return sum(abs(r.relative) for r in self.residuals) / len(self.residuals)

    @property
    def largest_relative(self) -> float:
        """Largest absolute error as a share of the measured time."""
        return max(abs(r.relative) for r in self.residuals)

    @property
    def r2(self) -> float | None:
        """Share of the variance that is explained; None if all steps took the same time."""
        times, count = [r.step.time for r in self.residuals], len(self.residuals)
        spread = count * sum(time * time for time in times) - sum(times) ** 2
        return 1 - count * self._squares / spread if spread else None

    @property
    def _squares(self) -> int:
        return sum(r.error**2 for r in self.residuals)

    def worst(self, most: int = 5) -> list[Residual]:
        """Return the steps that are furthest off, as a share of their time."""
        return sorted(self.residuals, key=lambda r: -abs(r.relative))[:most]


def fit_linear(path: Path) -> Calibration:
    """Fit the four coefficients of `linear` to the measured steps of a CSV file.

    Least squares of the absolute errors, no coefficient negative (more work never takes
    less time). Exact: the normal equations are solved in rationals for each of the 16 sets
    of coefficients that may be above 0, and the best solution without a negative one is
    taken (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23, gives a
    search that is shorter for many coefficients). Then they are rounded to picoseconds, as
    `linear` would; the residuals are those of the rounded ones. O(rows).

    Raises:
        InputError: the file cannot be used, has too few rows, or leaves a coefficient
            undetermined: says which.
    """
    steps = read_steps(path)
    if len(steps) <= len(NAMES):
        msg = (
            f"{path}: {len(steps)} rows for {len(NAMES)} coefficients; measure at least "
            f"{len(NAMES) + 1} different steps, better dozens"
        )
        raise InputError(msg)
    rows = [(1, *step.counts) for step in steps]
    columns, times = list(zip(*rows, strict=True)), [step.time for step in steps]
    gram = [[Fraction(_product(one, other)) for other in columns] for one in columns]
    _check_rank(path, gram, columns)
    target = [Fraction(_product(column, times)) for column in columns]
    best, held = _non_negative(gram, target)
    rounded = list(map(round, best))
    return Calibration(
        dict(zip(NAMES, rounded, strict=True)),
        tuple(NAMES[place] for place in held),
        [Residual(step, _product(rounded, row)) for step, row in zip(steps, rows, strict=True)],
    )


def _product(one: Iterable[int], other: Iterable[int]) -> int:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _non_negative(gram: Matrix, target: list[Fraction]) -> tuple[list[Fraction], list[int]]:
    """Return the best coefficients, and the places of those that are held at 0."""
    places = range(len(target))
    best, gain, held = [Fraction(0)] * len(target), Fraction(0), list(places)
    for size in range(1, len(target) + 1):
        for chosen in combinations(places, size):
            rows = [[*(gram[i][j] for j in chosen), target[i]] for i in chosen]
            _reduce(rows, size)
            found = dict(zip(chosen, (row[-1] for row in rows), strict=True))
            # By so much the squared error is less than with nothing but zeros.
            reduction = sum((found[i] * target[i] for i in chosen), Fraction(0))
            if min(found.values()) >= 0 and reduction > gain:
                gain = reduction
                best = [found.get(place, Fraction(0)) for place in places]
                held = [place for place in places if place not in found]
    return best, held


def _check_rank(path: Path, gram: Matrix, columns: Sequence[Sequence[int]]) -> None:
    """Refuse columns that leave a coefficient open, naming it."""
    reduced = [list(row) for row in gram]
    pivots = _reduce(reduced, len(NAMES))
    for free in set(range(len(NAMES))).difference(pivots):
        mixed = [pivot for row, pivot in enumerate(pivots) if reduced[row][free]]
        names = _listed([NAMES[place] for place in [*mixed, free]])
        column, values = COUNTS[free - 1], set(columns[free])
        if len(values) == 1:
            why = f"{column} is {values.pop():,} in every row"
        else:
            others = _listed([COUNTS[place - 1] for place in mixed if place])
            why = f"{column} follows from {others} in every row"
        verdict = "cannot be told apart" if mixed else "cannot be known"
        msg = f"{path}: {names} {verdict}: {why}; measure steps in which it varies by itself"
        raise InputError(msg)


def _listed(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _reduce(rows: Matrix, columns: int) -> list[int]:
    """Bring `rows` into reduced echelon form in place; return the columns of the pivots."""
    pivots: list[int] = []
    for column in range(columns):
        top = len(pivots)
        pivot = next((row for row in range(top, len(rows)) if rows[row][column]), None)
        if pivot is None:
            continue
        rows[top], rows[pivot] = rows[pivot], rows[top]
        rows[top] = [value / rows[top][column] for value in rows[top]]
        for number, row in enumerate(rows):
            if number != top and row[column]:
                factor = row[column]
                rows[number] = [a - factor * b for a, b in zip(row, rows[top], strict=True)]
        pivots.append(column)
    return pivots


COUNTS = ("prefill_tokens", "decode_sequences", "context_tokens")
"""Columns that say what a step computed."""


SECONDS = "seconds"
"""The column that says how long it took."""


SHORTEST, LONGEST = 1e-12, 1e6


@attrs.frozen
class MeasuredStep:
    """A row of a CSV file: what a step computed, and how long that took.

    Attributes:
        line: where it stands, from 1.
        prefill: prompt tokens.
        decode: sequences that generated a token.
        context: tokens these attended to, of all sequences together.
        time: picoseconds.
    """

    line: int
    prefill: int
    decode: int
    context: int
    time: int

    @property
    def counts(self) -> tuple[int, int, int]:
        """What it computed, in the order of `COUNTS`."""
        return self.prefill, self.decode, self.context


def read_steps(path: Path) -> list[MeasuredStep]:
    """Read a CSV file with the columns of `COUNTS` and `SECONDS`, in any order.

    Other columns are skipped, blank lines too. The file may be compressed.

    Raises:
        InputError: the file cannot be read, a column is missing or named twice, or a cell
            holds what cannot be used: names file, line and column.
    """
    source = lines(path)
    number, line = next(source)
    header = [name.strip() for name in _cells(path, number, line)]
    places = {name: _place(path, number, header, name) for name in (*COUNTS, SECONDS)}
    steps = []
    for number, line in source:
        cells = _cells(path, number, line)
        if len(cells) != len(header):
            expected = f"expected {len(header)} cells, as in the header"
            msg = f"{path}:{number}: {expected}, got {len(cells)}"
            raise InputError(msg)
        row = {name: cells[place].strip() for name, place in places.items()}
        prefill, decode, context = (
            _count(f"{path}:{number}: {name}", row[name]) for name in COUNTS
        )
        time = picoseconds(_seconds(f"{path}:{number}: {SECONDS}", row[SECONDS]), SECONDS)
        steps.append(MeasuredStep(number, prefill, decode, context, time))
    if not steps:
        msg = f"{path}: no rows after the header"
        raise InputError(msg)
    return steps


def write_steps(file: TextIO, steps: Iterable[MeasuredStep]) -> None:
    """Write steps as `read_steps` reads them, times to the nanosecond."""
    file.write(",".join((*COUNTS, SECONDS)) + "\n")
    for step in steps:
        seconds, rest = divmod(step.time // PS_PER_NS, NS_PER_S)
        file.write(",".join(map(str, step.counts)) + f",{seconds}.{rest:09d}\n")


def _cells(path: Path, number: int, line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode().rstrip("\r\n")], strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        msg = f"{path}:{number}: not CSV in UTF-8: {error}"
        raise InputError(msg) from error


def _place(path: Path, number: int, header: list[str], name: str) -> int:
    if header.count(name) != 1:
        problem = "is there twice" if name in header else "is missing"
        msg = (
            f"{path}:{number}: column {name!r} {problem}; expected a header with "
            f"{_column_names((*COUNTS, SECONDS))}, got {_column_names(header)}"
        )
        raise InputError(msg)
    return header.index(name)


def _count(where: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < len(str(INT64_LIMIT))):
        msg = f"{where}: expected a whole number, at least 0 and below 10^18, got {text!r}"
        raise InputError(msg)
    return int(text)


def _seconds(where: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (isfinite(seconds) and SHORTEST <= seconds <= LONGEST):
        msg = f"{where}: expected seconds, above 0 and up to 10^6, such as 0.0125, got {text!r}"
        raise InputError(msg)
    return seconds


def _column_names(names: Iterable[str]) -> str:
    return ", ".join(names)
