"""What was noted last of every block, by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Generic, TypeAlias, TypeVar

Note = TypeVar("Note")

Piece: TypeAlias = tuple[int, int, Note | None]
"""Blocks from a first up to a last, and what was noted of them; None: nothing."""


class Ledger(Generic[Note]):
    """Remembers of every block the latest note, such as what evicted it.

    A key stands for `ratio` blocks. Mostly they have one note; else the key has pieces, by
    position within the key. A note is no tuple, and not None.
    """

    __slots__ = ("_of", "_ratio")

    def __init__(self, ratio: int) -> None:
        """Start with nothing noted."""
        self._ratio = ratio
        self._of: dict[Any, Note | tuple[Piece[Note], ...]] = {}

    def add(self, keys: Sequence[Any], first: int, end: int, note: Note) -> None:
        """Note something of the blocks of `keys` from `first` up to `end`. O(keys) in C."""
        ratio = self._ratio
        low, high = -(-first // ratio), end // ratio
        self._of.update(dict.fromkeys(keys[low:high], note))
        if first % ratio:
            self._add_part(keys[low - 1], low - 1, first, end, note)
        if end % ratio and high >= low:
            self._add_part(keys[high], high, first, end, note)

    def pieces(self, keys: Sequence[Any], first: int, end: int) -> Iterator[Piece[Note]]:
        """Yield the blocks from `first` up to `end`, by note."""
        for note, run in groupby(self._runs(keys, first, end), key=itemgetter(2)):
            parts = list(run)
            yield parts[0][0], parts[-1][1], note

    def _add_part(self, key: Any, index: int, first: int, end: int, note: Note) -> None:
        """Note something of a part of a key's blocks; what is noted of the others stays."""
        base, ratio = index * self._ratio, self._ratio
        start, stop = max(first - base, 0), min(end - base, ratio)
        before = self._of.get(key)
        if not isinstance(before, tuple):
            before = ((0, ratio, before),)
        earlier = ((a, min(b, start), of) for a, b, of in before if a < start)
        later = ((max(a, stop), b, of) for a, b, of in before if b > stop)
        self._of[key] = (*earlier, (start, stop, note), *later)

    def _runs(self, keys: Sequence[Any], first: int, end: int) -> Iterator[Piece[Note]]:
        """Yield the blocks by runs of keys that have one note, and by pieces of the others."""
        ratio = self._ratio
        low, high = first // ratio, -(-end // ratio)
        at = low * ratio
        for of, run in groupby(map(self._of.get, keys[low:high])):
            many = ratio * sum(1 for _ in run)
            if isinstance(of, tuple):
                bases = range(at, at + many, ratio)
                pieces = [(base + a, base + b, note) for base in bases for a, b, note in of]
            else:
                pieces = [(at, at + many, of)]
            for a, b, note in pieces:
                if max(a, first) < min(b, end):
                    yield max(a, first), min(b, end), note
            at += many
