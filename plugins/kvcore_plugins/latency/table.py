"""Time by a measured grid, interpolated."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import attrs

from kvcore import InputError, LatencyModel
from kvcore.files import as_path
from kvcore.serving import LinearPiece, StepWork
from kvcore.serving.calibration import COUNTS, MeasuredStep, read_steps
from kvcore.workloads.files import file_digest

Counts = tuple[int, int, int]


@attrs.define(slots=False, eq=False)
class Table(LatencyModel):
    """Look a step up in a grid of measured ones, and interpolate.

    A CSV file with the columns `prefill_tokens`, `decode_sequences`, `context_tokens` and
    `seconds`, one row for each combination of their values. In between, the time is
    interpolated linearly in all three (multilinear). Before the first value of a column it
    is that of the first. Beyond the last it goes on with the steepest slope that any row of
    cells at that border has: one slope for all, so that more work never takes less time.
    Exact in rationals, rounded down to a picosecond. Every step is looked up by itself: the
    simulator cannot jump, and pays for each.

    Options:
        path: the file.
    """

    name: ClassVar[str] = "table"
    jumps: ClassVar[bool] = False

    path: Path = attrs.field(converter=as_path)

    def __attrs_post_init__(self) -> None:
        """Read the grid and check that it is whole and monotone."""
        steps = _by_counts(self.path, read_steps(self.path))
        self._axes = [sorted(set(values)) for values in zip(*steps, strict=True)]
        grid = list(product(*self._axes))
        missing = next((counts for counts in grid if counts not in steps), None)
        if missing:
            msg = (
                f"{self.path}: no row with {_named(missing)}; the grid needs one for each "
                f"combination of the values in its columns, {len(grid):,} in all"
            )
            raise InputError(msg)
        self._times = [steps[counts].time for counts in grid]
        self._strides = [len(self._axes[1]) * len(self._axes[2]), len(self._axes[2]), 1]
        self._beyond = [self._steepest(axis, grid, steps) for axis in range(len(COUNTS))]
        self._digest = file_digest(self.path)

    def pieces(self, work: StepWork) -> Sequence[LinearPiece]:
        """Return the time of this very batch, as a flat line. Costs some microseconds."""
        beyond, scale = 0, 1
        corners = [(0, 1)]
        counts = work.prefill, work.decode, work.context[0]
        for count, axis, stride, slope in zip(
            counts, self._axes, self._strides, self._beyond, strict=True
        ):
            if count >= axis[-1]:
                beyond += (count - axis[-1]) * slope.numerator // slope.denominator
                corners = [(at + stride * (len(axis) - 1), weight) for at, weight in corners]
            elif count > axis[0]:
                below = bisect_right(axis, count) - 1
                part, whole = count - axis[below], axis[below + 1] - axis[below]
                scale *= whole
                corners = [
                    (at + stride * (below + side), weight * share)
                    for at, weight in corners
                    for side, share in ((0, whole - part), (1, part))
                ]
        return ((sum(self._times[at] * weight for at, weight in corners) // scale + beyond, 0),)

    def coefficients(self) -> dict[str, Any]:
        """Return the digest of the file, and the values of each column."""
        return {"digest": self._digest, **dict(zip(COUNTS, self._axes, strict=True))}

    def _steepest(
        self, axis: int, grid: list[Counts], steps: dict[Counts, MeasuredStep]
    ) -> Fraction:
        """Check that times grow along an axis; return the steepest slope of its last cells."""
        values, stride = self._axes[axis], self._strides[axis]
        steepest = Fraction(0)
        for at, counts in enumerate(grid):
            if counts[axis] == values[-1]:
                continue
            more = grid[at + stride]
            longer = self._times[at + stride] - self._times[at]
            if longer < 0:
                msg = (
                    f"{self.path}:{steps[more].line}: {_named(more)} takes less than "
                    f"{COUNTS[axis]}={counts[axis]} in line {steps[counts].line}; more work "
                    "must not take less time: measure again, or smooth the grid"
                )
                raise InputError(msg)
            if more[axis] == values[-1]:
                steepest = max(steepest, Fraction(longer, more[axis] - counts[axis]))
        return steepest


def _by_counts(path: Path, measured: list[MeasuredStep]) -> dict[Counts, MeasuredStep]:
    steps: dict[Counts, MeasuredStep] = {}
    for step in measured:
        first = steps.setdefault(step.counts, step)
        if first is not step:
            msg = (
                f"{path}:{step.line}: {_named(step.counts)} is in line {first.line} already; "
                "give each point of the grid once"
            )
            raise InputError(msg)
    return steps


def _named(counts: Counts) -> str:
    return ", ".join(f"{name}={count}" for name, count in zip(COUNTS, counts, strict=True))
