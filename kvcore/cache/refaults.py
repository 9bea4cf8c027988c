"""Which stored blocks had been evicted just before: the refaults of a cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Keys
from typing import TypeAlias

from kvcore.request import Key

Gone: TypeAlias = tuple[int, int, Keys[Key], int]
"""Blocks `[start, end)` of the path with these keys, and blocks evicted up to then."""


class Refaults:
    """Counts blocks that are stored again after at most `window` others were evicted.

    What was evicted is remembered as runs, by the key in which they begin, their keys by
    reference; of pieces that begin in one key, as one run, which left with the last of them.
    Evicting costs O(1), storing a look-up a key. Memory is that of the runs evicted in two
    windows.

    Attributes:
        blocks: how many were stored again.

    Source: the refault distance of Linux (mm/workingset.c, Weiner, 2014), which counts what
    was evicted between the eviction of a page and its return: a cache larger by that much
    would have kept it.
    """

    __slots__ = ("_clock", "_gone", "_window", "blocks")

    def __init__(self, window: int) -> None:
        """Remember nothing yet."""
        self.blocks = self._clock = 0
        self._window = window
        self._gone: OrderedDict[Key, Gone] = OrderedDict()

    def evicted(self, keys: Keys[Key], start: int, end: int, ratio: int) -> None:
        """Take in that the blocks `[start, end)` of a path leave; a key has `ratio` blocks."""
        gone = self._gone
        self._clock += end - start
        self._remember((start, end, keys, self._clock), ratio)
        oldest = self._clock - self._window
        while gone and next(iter(gone.values()))[3] < oldest:
            gone.popitem(last=False)

    def stored(self, keys: Keys[Key], start: int, end: int, ratio: int) -> None:
        """Take in that the blocks `[start, end)` of the path with `keys` are stored."""
        gone = self._gone
        oldest = self._clock - self._window
        inside = keys[start // ratio : (end - 1) // ratio + 1]
        for key in [key for key in inside if key in gone]:
            first, last, path, clock = gone.pop(key)
            stop = max(first, _agreement(path, keys, first, min(last, end), ratio))
            if clock >= oldest:
                self.blocks += stop - first
            if stop < last:
                self._remember((stop, last, path, clock), ratio)

    def _remember(self, run: Gone, ratio: int) -> None:
        """Remember a run, and what has left after its end and began in the same key."""
        start, end, keys, clock = run
        key = keys[start // ratio]
        after = self._gone.pop(key, None)
        if after is not None and after[0] == end:
            run = start, after[1], after[2], clock
        self._gone[key] = run


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
