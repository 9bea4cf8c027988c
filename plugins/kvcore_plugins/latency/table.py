"""Step time by interpolation in a measured grid."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise, product
from math import ceil, prod
from pathlib import Path
from typing import Any, ClassVar

import attrs

from kvcore import InputError, LatencyModel
from kvcore.files import as_path
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.serving import LinearPiece, StepWork
from kvcore.workloads.files import file_digest
from kvcore_plugins.latency.engine_times import EngineName
from kvcore_plugins.latency.measured_steps import COUNTS, PAIRS, MeasuredStep, read_steps
from kvcore_plugins.latency.step_times import TableDtype, shipped_grid

Point = tuple[int, ...]

_WITH_PAIRS = (*COUNTS[:2], PAIRS, COUNTS[2])
"""Columns of a grid with pairs. The context is last in any grid: its cells lie side by side."""


@attrs.define(slots=False, eq=False)
class Table(LatencyModel):
    """Look a step up in a grid of step times, and interpolate.

    With `engine` the grid is one of those in the package: step times of well-known models,
    GPUs and engines that NVIDIA's AIConfigurator composed. With `path` it is a CSV file with
    the columns `prefill_tokens`, `decode_sequences`, `context_tokens` and `seconds`, one row
    for each combination of their values. Where these are given more than once with other
    `attended_pairs`, those are a column of the grid too.

    In between, the time is interpolated linearly in all columns (multilinear). Before the
    first value of a column it is the time of that value. Beyond the last value it goes on with
    the steepest slope of any row of cells at that border: one slope for all, so that more work
    never takes less time. Exact in rationals, rounded down to a picosecond.

    If slopes in the context fall neither with the context nor with other work, as in a grid
    with two contexts that is a sum, the times are lines, and the simulator can jump: slopes
    are rounded to whole picoseconds. Any other grid is looked up at every single step.

    Options:
        path: a file.
        engine: `vllm`, `trtllm` or `sglang`: a grid of the package instead.
        model, device, tensor_parallel: the deployment of the grid of the package.
        weights_dtype: `bf16` or `fp8`, of weights and K/V; by default that of the model.
    """

    name: ClassVar[str] = "table"
    jumps = False

    path: Path | None = attrs.field(default=None, converter=attrs.converters.optional(as_path))
    engine: EngineName | None = attrs.field(default=None)
    model: str | ModelSpec = attrs.field(default="llama-3.1-8b")
    device: str | DeviceSpec = attrs.field(default="h100")
    tensor_parallel: int = attrs.field(default=4)
    weights_dtype: TableDtype | None = attrs.field(default=None)

    def __attrs_post_init__(self) -> None:
        """Read the grid and check that it is whole and monotone."""
        measured, self._names = self._steps()
        steps = self._by_counts(measured)
        self._axes = [sorted(set(values)) for values in zip(*steps, strict=True)]
        grid = list(product(*self._axes))
        missing = next((counts for counts in grid if counts not in steps), None)
        if missing:
            msg = (
                f"{self.path}: no row with {self._point(missing)}; the grid needs one for each "
                f"combination of the values in its columns, {len(grid):,} in all"
            )
            raise InputError(msg)
        # The times lie in the order of the grid: the last axis runs fastest, and a step along
        # another one skips its stride.
        self._times = [steps[counts].time for counts in grid]
        sizes = [len(axis) for axis in self._axes]
        self._strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        self._last_slopes = [self._steepest(axis, grid, steps) for axis in range(len(sizes))]
        self.jumps = self._has_lines()

    def _steps(self) -> tuple[list[MeasuredStep], tuple[str, ...]]:
        """Return the points of the grid, and the names of its columns; note its source."""
        if (self.path is None) == (self.engine is None):
            msg = "table: give either 'path', a file, or 'engine': vllm, trtllm or sglang"
            raise InputError(msg)
        if self.path is None:
            name = self.model, self.device, self.tensor_parallel, str(self.engine)
            grid = shipped_grid(*name, self.weights_dtype)
            self._source = {"source": "AIConfigurator"}
            return list(grid.steps()), _WITH_PAIRS
        self._source = {"digest": file_digest(self.path)}
        steps = read_steps(self.path)
        has_pairs = len({step.counts for step in steps}) < len(
            {(*step.counts, step.pairs) for step in steps}
        )
        return steps, _WITH_PAIRS if has_pairs else COUNTS

    def _by_counts(self, measured: list[MeasuredStep]) -> dict[Point, MeasuredStep]:
        """Return the points of the grid by their values; refuse one that is given twice."""
        steps: dict[Point, MeasuredStep] = {}
        for step in measured:
            pairs = (step.pairs,) if PAIRS in self._names else ()
            counts = (step.prefill, step.decode, *pairs, step.context)
            first = steps.setdefault(counts, step)
            if first is not step:
                msg = (
                    f"{self.path}:{step.line}: {self._point(counts)} is in line {first.line} "
                    "already; give each point of the grid once"
                )
                raise InputError(msg)
        return steps

    def pieces(self, work: StepWork) -> Sequence[LinearPiece]:
        """Return the lines in the context, or the time of this batch as a flat one.

        Costs some ten microseconds.
        """
        counts = [work.prefill, work.decode, work.attended_pairs[0]][: len(self._axes) - 1]
        axis = self._axes[-1]
        corners, scale, beyond = self._corners(counts)
        if not self.jumps:
            ends, width, beyond_ends = self._corners(work.context, len(counts))
            time = sum(
                self._times[index + shift] * weight * share
                for index, weight in corners
                for shift, share in ends
            )
            return ((time // (scale * width) + beyond + beyond_ends, 0),)
        first = sum(self._times[index] * weight for index, weight in corners) // scale + beyond
        lines = [(first, 0)]
        for index, (start, end) in enumerate(pairwise(axis)):
            rise = sum(
                (self._times[corner + index + 1] - self._times[corner + index]) * weight
                for corner, weight in corners
            )
            span = scale * (end - start)
            lines.append(_bend(lines[-1], start, (2 * rise + span) // (2 * span)))
        lines.append(_bend(lines[-1], axis[-1], max(ceil(self._last_slopes[-1]), lines[-1][1])))
        return lines if axis[0] else lines[1:]  # nothing comes before a context of 0

    def coefficients(self) -> dict[str, Any]:
        """Return the digest of the file, or the source; and the values of each column."""
        return {**self._source, **dict(zip(self._names, self._axes, strict=True))}

    def _corners(
        self, counts: Sequence[int], first: int = 0
    ) -> tuple[list[tuple[int, int]], int, int]:
        """Return the points around `counts`, of the axes from `first` on, and their weights.

        A point is its place in the times. Also the sum of the weights, and the time that lies
        beyond the last points.
        """
        beyond, scale, corners = 0, 1, [(0, 1)]
        for number, count in enumerate(counts, first):
            axis, stride = self._axes[number], self._strides[number]
            if count >= axis[-1]:
                slope = self._last_slopes[number]
                beyond += (count - axis[-1]) * slope.numerator // slope.denominator
                corners = [
                    (index + stride * (len(axis) - 1), weight) for index, weight in corners
                ]
            elif count > axis[0]:
                below = bisect_right(axis, count) - 1
                part, width = count - axis[below], axis[below + 1] - axis[below]
                scale *= width
                corners = [
                    (index + stride * (below + side), weight * share)
                    for index, weight in corners
                    for side, share in ((0, width - part), (1, part))
                ]
        return corners, scale, beyond

    def _has_lines(self) -> bool:
        """Return True if slopes in the context fall neither along it nor along other axes."""
        axis, times = self._axes[-1], self._times
        if len(axis) == 1:
            return False
        slopes = [
            [
                Fraction(times[index + offset + 1] - times[index + offset], end - start)
                for offset, (start, end) in enumerate(pairwise(axis))
            ]
            for index in range(0, len(times), len(axis))
        ]
        if any(row != sorted(row) for row in slopes):
            return False
        for stride, values in zip(self._strides[:-1], self._axes[:-1], strict=True):
            rows = stride // len(axis)  # of slopes, from one value to the next
            for index, row in enumerate(slopes):
                is_last = index // rows % len(values) == len(values) - 1
                if not is_last and any(
                    a > b for a, b in zip(row, slopes[index + rows], strict=True)
                ):
                    return False
        return True

    def _steepest(
        self, axis: int, grid: list[Point], steps: dict[Point, MeasuredStep]
    ) -> Fraction:
        """Check that times grow along an axis; return the steepest slope of its last cells."""
        values, stride = self._axes[axis], self._strides[axis]
        steepest = Fraction(0)
        for index, counts in enumerate(grid):
            if counts[axis] == values[-1]:
                continue
            more = grid[index + stride]
            longer = self._times[index + stride] - self._times[index]
            if longer < 0:
                msg = (
                    f"{self.path}:{steps[more].line}: {self._point(more)} takes less than "
                    f"{self._names[axis]}={counts[axis]} in line {steps[counts].line}; more "
                    "work must not take less time: measure again, or smooth the grid"
                )
                raise InputError(msg)
            if more[axis] == values[-1]:
                steepest = max(steepest, Fraction(longer, more[axis] - counts[axis]))
        return steepest

    def _point(self, counts: Point) -> str:
        return ", ".join(
            f"{name}={count}" for name, count in zip(self._names, counts, strict=True)
        )


def _bend(line: tuple[int, int], start: int, slope: int) -> tuple[int, int]:
    """Return the line that goes on from `line` at a context with another slope."""
    return line[0] + (line[1] - slope) * start, slope
