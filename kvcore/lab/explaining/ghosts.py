"""Blocks that were cached once: which eviction took them, by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias

from kvcore.lab.explaining.reasons import Eviction

Piece: TypeAlias = tuple[int, int, Eviction | None]
"""Blocks from a first up to a last, and what evicted them; None: nothing ever did."""


class Ghosts:
    """Remembers the latest eviction of every block, and is asked only of what is not cached.

    A key stands for `ratio` blocks. Mostly they leave together, and the key has one eviction;
    else it has pieces, by position within the key.
    """

    __slots__ = ("_of", "_ratio")

    def __init__(self, ratio: int) -> None:
        """Start with nothing evicted."""
        self._ratio = ratio
        self._of: dict[Any, Eviction | tuple[Piece, ...]] = {}

    def add(self, keys: Sequence[Any], first: int, end: int, eviction: Eviction) -> None:
        """Take in that of the cached blocks of `keys` those from `first` on left, up to `end`.

        O(keys) in C.
        """
        ratio = self._ratio
        low, high = -(-first // ratio), end // ratio
        self._of.update(dict.fromkeys(keys[low:high], eviction))
        if first % ratio:
            self._add_part(keys[low - 1], low - 1, first, end, eviction)
        if end % ratio and high >= low:
            self._add_part(keys[high], high, first, end, eviction)

    def pieces(self, keys: Sequence[Any], first: int, end: int) -> Iterator[Piece]:
        """Yield the blocks from `first` up to `end`, none of them cached, by eviction."""
        singles = self._singles(keys, first, end)
        for eviction, run in groupby(singles, key=itemgetter(2)):
            parts = list(run)
            yield parts[0][0], parts[-1][1], eviction

    def _add_part(self, key: Any, index: int, first: int, end: int, eviction: Eviction) -> None:
        """Take in that a part of a key's blocks left; what left before, after these, stays."""
        base, ratio = index * self._ratio, self._ratio
        stop = min(end - base, ratio)
        before = self._of.get(key, ())
        if isinstance(before, Eviction):
            before = ((0, ratio, before),)
        later = ((max(a, stop), b, of) for a, b, of in before if b > stop)
        self._of[key] = ((max(first - base, 0), stop, eviction), *later)

    def _singles(self, keys: Sequence[Any], first: int, end: int) -> Iterator[Piece]:
        """Yield the pieces of each key."""
        ratio = self._ratio
        for index in range(first // ratio, -(-end // ratio)):
            of = self._of.get(keys[index])
            at, stop = max(first, index * ratio), min(end, (index + 1) * ratio)
            if isinstance(of, tuple):
                for a, b, eviction in of:
                    start, upto = max(at, index * ratio + a), min(stop, index * ratio + b)
                    if start < upto:
                        if at < start:
                            yield at, start, None
                        yield start, upto, eviction
                        at = upto
                of = None
            if at < stop:
                yield at, stop, of
