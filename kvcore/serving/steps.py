"""Times of many steps at once: exact sums of a maximum of integer lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isqrt

from kvcore.policy import Line


class StepTimes:
    """The times of consecutive decode steps of the same sequences, in picoseconds.

    Step i takes `max(a + b * i)` over a few lines, since the context grows by as much with
    every step. All methods are exact; they cost O(lines that are the maximum somewhere).
    """

    __slots__ = ("_lines",)

    def __init__(
        self, lines: Sequence[Line], context: Sequence[int], growth: Sequence[int]
    ) -> None:
        """Take lines in the context, the context of the first step, and what a step adds."""
        if len(growth) == 1:
            (start,), (more,) = context, growth
            if len(lines) == 1:
                a, b = lines[0]
                self._lines: Sequence[Line] = ((a + b * start, b * more),)
                return
            lines = [(a + b * start, b * more) for a, b in lines]
        else:
            lines = [
                (
                    line[0] + sum(b * c for b, c in zip(line[1:], context, strict=True)),
                    sum(b * g for b, g in zip(line[1:], growth, strict=True)),
                )
                for line in lines
            ]
        if len(lines) > 1:
            top, steepest = max(lines), max(line[1] for line in lines)
            if top[1] == steepest:
                lines = [top]
        self._lines = lines

    def segments(self, steps: int) -> Iterable[tuple[int, int, int]]:
        """Return (time of the first step, what each adds to it, steps) of straight parts."""
        lines = self._lines
        if len(lines) == 1:
            a, b = lines[0]
            return ((a, b, steps),)
        return self._parts(steps)

    def total(self, steps: int) -> int:
        """Return what the first `steps` steps take together."""
        lines = self._lines
        if len(lines) == 1:
            a, b = lines[0]
            return steps * a + b * (steps * (steps - 1) // 2)
        return sum(_sum(first, slope, count) for first, slope, count in self._parts(steps))

    def reach(self, time: int, most: int) -> int:
        """Return how many steps (at least 1) it takes until `time` has passed, or `most`."""
        lines = self._lines
        if len(lines) == 1:
            a, b = lines[0]
            if most * a + b * (most * (most - 1) // 2) < time:
                return most
            return max(1, _steps_for(a, b, most, time))
        done = 0
        for first, slope, count in self._parts(most):
            whole = _sum(first, slope, count)
            if whole >= time:
                return max(1, done + _steps_for(first, slope, count, time))
            time -= whole
            done += count
        return most

    def _parts(self, steps: int) -> Iterator[tuple[int, int, int]]:
        lines, step = self._lines, 0
        while step < steps:
            _, b, a = max((a + b * step, b, a) for a, b in lines)
            # Where a steeper line rises above this one.
            overtakes = [(a - c) // (d - b) + 1 for c, d in lines if d > b]
            end = min([*overtakes, steps])
            yield a + b * step, b, end - step
            step = end


def _sum(first: int, slope: int, count: int) -> int:
    return count * first + slope * (count * (count - 1) // 2)


def _steps_for(first: int, slope: int, count: int, time: int) -> int:
    """Return the fewest of `count` steps whose sum is at least `time`, which all reach."""
    if time <= 0:
        return 0
    if not slope:
        return -(-time // first)
    # first·k + slope·k(k-1)/2 = time, rounded down; the root may fall one short.
    p = 2 * first - slope
    steps = (isqrt(p * p + 8 * slope * time) - p) // (2 * slope)
    steps = min(max(steps, 0), count)
    while _sum(first, slope, steps) < time:
        steps += 1
    return steps
