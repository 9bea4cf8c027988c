"""Boundaries where requests have parted: the best few, by an exact dynamic program."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import ClassVar

import attrs
from attrs.validators import ge, instance_of

from kvcore.cache import CheckpointPolicy
from kvcore.request import Request

_GROWTH = 1.25
"""The positions are computed again when so many times as many overlaps are known."""


@attrs.define(slots=False, eq=False)
class Sparse(CheckpointPolicy):
    """Keep states at the positions that serve the overlaps so far best, beside the default's.

    The overlap of a request is the prefix that it shares with earlier ones: what full attention
    has. A state at a position saves that position of every overlap from there on, up to the
    next one; `place` finds the positions that save most. They are the same for all texts, so
    that a first request of many that share a part of a text has states there before a second
    one comes.

    Source: Shirokikh and Nikolenko, "Sparse prefix caching for hybrid and recurrent LLM
    serving" (arXiv 2605.05219), with overlaps that are learned while requests come.

    Options:
        budget: number of positions.
    """

    name: ClassVar[str] = "sparse"

    budget: int = attrs.field(default=4, validator=[instance_of(int), ge(1)])

    _overlaps: Counter[int] = attrs.field(init=False, factory=Counter)
    _known: int = attrs.field(init=False, default=0)
    _due: int = attrs.field(init=False, default=1)
    _positions: tuple[int, ...] = attrs.field(init=False, default=())

    def boundaries(self, request: Request, hit: int, junction: int) -> Iterable[int]:
        """Return the positions that serve overlaps best, and those of the default."""
        inner = (at for at in self._positions if at < request.prompt_tokens)
        return *super().boundaries(request, hit, junction), *inner

    def on_admitted(self, request: Request, hit: int, junction: int) -> None:
        """Record the overlap of `request`; compute the positions again when they are due."""
        overlap = max(hit, junction) // self.unit
        if not overlap:
            return
        self._overlaps[overlap] += 1
        self._known += 1
        if self._known >= self._due:
            self._due = int(self._known * _GROWTH) + 1
            self._positions = tuple(
                position * self.unit for position in place(self._overlaps, self.budget)
            )


def place(overlaps: Mapping[int, int], budget: int) -> list[int]:
    """Return the at most `budget` positions that save most of `overlaps`, in order.

    `overlaps` are numbers of requests by the length of their overlap. A request with an overlap
    of d saves the last position up to d. The optimum is exact: a position between two lengths
    that occur can move up to the next one and saves no less, so only these lengths are tried;
    and what the positions from one on save does not depend on those before it.

    With B(i) requests whose overlap is the length L(i) or more, the positions from L(i) on save
    S(i) = max over later j of L(i) · (B(i) - B(j)) + S'(j), where S' is S with one position
    less. That is the highest of lines in L(i), whose slopes and arguments fall: O(budget · n).
    """
    lengths = sorted(length for length, count in overlaps.items() if length and count)
    n = len(lengths)
    beyond = [0] * (n + 1)
    for index in reversed(range(n)):
        beyond[index] = beyond[index + 1] + overlaps[lengths[index]]
    alone = saved = [length * beyond[index] for index, length in enumerate(lengths)]
    following = [[n] * n]  # by the number of positions from each one on, the next one
    for _ in range(min(budget, n) - 1):
        longer, after = alone[:], [n] * n
        lines = deque[tuple[int, int, int]]()  # slope, value at 0, index
        for index in reversed(range(n)):
            length = lengths[index]
            while len(lines) > 1 and _at(lines[1], length) >= _at(lines[0], length):
                lines.popleft()
            if lines and (more := _at(lines[0], length)) > 0:
                longer[index], after[index] = alone[index] + more, lines[0][2]
            line = -beyond[index], saved[index], index
            while len(lines) > 1 and _is_below(lines[-1], lines[-2], line):
                lines.pop()
            lines.append(line)
        saved = longer
        following.append(after)
    positions, index = [], max(range(n), key=saved.__getitem__, default=n)
    for after in reversed(following):
        if index < n:
            positions.append(lengths[index])
            index = after[index]
    return positions


def _at(line: tuple[int, int, int], x: int) -> int:
    return line[0] * x + line[1]


def _is_below(
    line: tuple[int, int, int], steeper: tuple[int, int, int], flatter: tuple[int, int, int]
) -> bool:
    """Return True if one of two other lines, of a higher and a lower slope, is above `line`."""
    (high, of_high, _), (slope, value, _), (low, of_low, _) = steeper, line, flatter
    return (value - of_high) * (slope - low) <= (of_low - value) * (high - slope)
