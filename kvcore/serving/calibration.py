"""The fit of the `linear` latency model to measured steps, and the files of these steps."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, TextIO

import attrs

from kvcore.errors import InputError
from kvcore.units import INT64_LIMIT, NS_PER_S, PS_PER_NS, PS_PER_S, picoseconds
from kvcore.workloads.files import lines

NAMES = ("step", "prefill", "decode", "context")
"""The coefficients: the time of an empty step, and of one of each of `COUNTS`."""


@attrs.frozen
class Residual:
    """The difference of a fitted time from the measured one.

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
    """The `linear` latency model that fits measured steps best, and the errors of the fit.

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
        options = (f"{name}={ps / PS_PER_S!r}" for name, ps in self.coefficients.items())
        return f"linear:{','.join(options)}"

    @property
    def rms(self) -> float:
        """Root of the mean squared error, in seconds."""
        return sqrt(self._squares / len(self.residuals)) / PS_PER_S

    @property
    def mean(self) -> float:
        """Mean absolute error, in seconds."""
        return sum(abs(r.error) for r in self.residuals) / len(self.residuals) / PS_PER_S

    @property
    def largest(self) -> float:
        """Largest absolute error, in seconds."""
        return max(abs(r.error) for r in self.residuals) / PS_PER_S

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
    less time), by the algorithm of Lawson and Hanson ("Solving Least Squares Problems", 1974,
    chapter 23). The coefficients above 0 are then refined with exact residuals and rounded to
    picoseconds, as `linear` would; the residuals are those of the rounded ones. O(rows).

    Raises:
        InputError: the file cannot be used, has too few rows, or leaves a coefficient
            undetermined: says which. Or SciPy is missing.
    """
    try:
        import numpy as np  # noqa: PLC0415
        from scipy.optimize import nnls  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        msg = f"a calibration needs numpy and scipy ({error}): pip install 'kvcore[lab]'"
        raise InputError(msg) from error
    steps = read_steps(path)
    if len(steps) <= len(NAMES):
        msg = (
            f"{path}: {len(steps)} rows for {len(NAMES)} coefficients; measure at least "
            f"{len(NAMES) + 1} different steps, better dozens"
        )
        raise InputError(msg)
    rows = [(1, *step.counts) for step in steps]
    counts = np.array(rows, dtype=object)
    times = np.array([step.time for step in steps], dtype=object)
    # Each column from 0 to 1: counts of tokens and of sequences are orders apart.
    scale = np.maximum(counts.max(axis=0), 1).astype(float)
    scaled = counts.astype(float) / scale
    _check_rank(path, scaled, steps)
    found = nnls(scaled, times.astype(float))[0]
    above = found > 0
    fitted = np.array([round(each) for each in found / scale], dtype=object)
    for _ in range(_REFINEMENTS):
        residual = (times - counts @ fitted).astype(float)
        change = np.linalg.lstsq(scaled[:, above], residual, rcond=None)[0] / scale[above]
        fitted[above] += np.array([round(each) for each in change], dtype=object)
    coefficients = dict(zip(NAMES, map(int, fitted), strict=True))
    return Calibration(
        coefficients,
        tuple(name for name, positive in zip(NAMES, above, strict=True) if not positive),
        [Residual(step, int(time)) for step, time in zip(steps, counts @ fitted, strict=True)],
    )


_REFINEMENTS = 3
"""Each divides the error of the one before it by about 10^10, so the second changes nothing
but for counts and times many orders apart."""

_DEPENDENT = 1e-9
"""A scaled column that lies this close to others says nothing that these do not."""


def _check_rank(path: Path, scaled: Any, steps: Sequence[MeasuredStep]) -> None:
    """Refuse columns that leave a coefficient undetermined, naming it."""
    import numpy as np  # noqa: PLC0415

    known = [0]
    for place in range(1, len(NAMES)):
        column = scaled[:, place]
        weights = np.linalg.lstsq(scaled[:, known], column, rcond=None)[0]
        if np.abs(column - scaled[:, known] @ weights).max() > _DEPENDENT:
            known.append(place)
            continue
        mixed = [known[i] for i in np.flatnonzero(np.abs(weights) > _DEPENDENT)]
        names = _listed([NAMES[each] for each in [*mixed, place]])
        values = {step.counts[place - 1] for step in steps}
        if len(values) == 1:
            why = f"{COUNTS[place - 1]} is {values.pop():,} in every row"
        else:
            others = _listed([COUNTS[each - 1] for each in mixed if each])
            why = f"{COUNTS[place - 1]} follows from {others} in every row"
        verdict = "cannot be told apart" if mixed else "cannot be known"
        msg = f"{path}: {names} {verdict}: {why}; measure steps in which it varies by itself"
        raise InputError(msg)


def _listed(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


COUNTS = ("prefill_tokens", "decode_sequences", "context_tokens")
"""Columns with the work of a step."""


SECONDS = "seconds"
"""The column with the time of a step."""


SHORTEST, LONGEST = 1e-12, 1e6


@attrs.frozen
class MeasuredStep:
    """A row of a CSV file: the work of a step, and the time that it took.

    Attributes:
        line: number of the line in the file, from 1.
        prefill: number of prompt tokens.
        decode: number of sequences that generated a token.
        context: number of tokens that these attended to, of all sequences together.
        time: time of the step in picoseconds.
    """

    line: int
    prefill: int
    decode: int
    context: int
    time: int

    @property
    def counts(self) -> tuple[int, int, int]:
        """The work of the step, in the order of `COUNTS`."""
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
    """Write steps in the format of `read_steps`, with times to the nanosecond."""
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
