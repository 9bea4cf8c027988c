"""Which stored blocks had been evicted just before: the refaults of a cache."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Keys
from typing import Any, TypeAlias

from kvcore.request import Key

Gone: TypeAlias = tuple[int, int, Keys[Key], int]
"""Blocks `[start, end)` of the path with these keys, and blocks evicted up to then."""

Move: TypeAlias = tuple[Any, ...]
"""(keys, first, end, ratio): the blocks `[first, end)` of the path with these keys, each of
which stands for `ratio`, were stored. With more behind it, they left."""

ENTRY = 4
"""The length of a `Move` that says what was stored."""


class Refaults:
    """Counts blocks that are stored again after at most `window` others were evicted.

    What was evicted is remembered as runs, by the key in which they begin, their keys by
    reference; of pieces that begin in one key, as one run, which left with the last of them.
    Evicting costs O(1), storing O(runs that come back). Memory is that of the runs evicted in
    two windows.

    Attributes:
        blocks: how many were stored again.

    Source: the refault distance of Linux (mm/workingset.c, Weiner, 2014), which counts what
    was evicted between the eviction of a page and its return: a cache larger by that much
    would have kept it.
    """

    __slots__ = ("_clock", "_old", "_turn", "_window", "_young", "blocks")

    def __init__(self, window: int) -> None:
        """Remember nothing yet."""
        self.blocks = self._clock = 0
        self._window = window
        # What left in this window of evictions, and in the one before: no more is needed.
        self._young: dict[Key, Gone] = {}
        self._old: dict[Key, Gone] = {}
        self._turn = window

    def follow(self, moves: Iterable[Move]) -> None:
        """Take in what was stored and what left, in order."""
        path: Keys[Key] | None = None
        start = upto = of = 0
        for move in moves:
            keys, first, end, ratio = move[:ENTRY]
            left = len(move) > ENTRY
            # The end of a path often leaves block by block: of one key, as one piece.
            if left and keys is path and end == start and first // ratio == start // ratio:
                start = first
                continue
            if path is not None:
                self._left(path, start, upto, of)
                path = None
            if left:
                path, start, upto, of = keys, first, end, ratio
            else:
                self._stored(keys, first, end, ratio)
        if path is not None:
            self._left(path, start, upto, of)

    def _left(self, keys: Keys[Key], start: int, end: int, ratio: int) -> None:
        """Take in that the blocks `[start, end)` of the path with `keys` leave."""
        self._clock = clock = self._clock + end - start
        if clock > self._turn:
            self._old, self._young = self._young, {}
            self._turn = clock + self._window
        self._remember(keys[start // ratio], (start, end, keys, clock))

    def _stored(self, keys: Keys[Key], start: int, end: int, ratio: int) -> None:
        """Take in that the blocks `[start, end)` of the path with `keys` are stored."""
        # What had left of a path begins where the rest of it is cached, one run after another.
        oldest = self._clock - self._window
        while start < end:
            run = self._taken(keys[start // ratio])
            if run is None:
                return
            first, last, path, clock = run
            stop = max(first, _agreement(path, keys, first, min(last, end), ratio))
            if clock >= oldest:
                self.blocks += stop - first
            if stop < last:
                self._remember(path[stop // ratio], (stop, last, path, clock))
            if stop <= start:
                return
            start = stop

    def _remember(self, key: Key, run: Gone) -> None:
        """Remember a run, and what has left after its end and began in the same key."""
        after = self._taken(key)
        if after is not None and after[0] == run[1]:
            run = run[0], after[1], after[2], run[3]
        self._young[key] = run

    def _taken(self, key: Key) -> Gone | None:
        """Forget the run that begins in `key`, and return it."""
        found = self._young.pop(key, None)
        return self._old.pop(key, None) if found is None else found


def _agreement(one: Keys[Key], other: Keys[Key], start: int, end: int, ratio: int) -> int:
    """Return where, from `start` to `end`, two paths part whose keys at `start` are equal."""
    low, high = start // ratio, (end - 1) // ratio
    if high <= low or one[high] == other[high]:
        return end
    while high - low > 1:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle
        else:
            high = middle
    return high * ratio
