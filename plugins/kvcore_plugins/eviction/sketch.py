"""How often keys were used, about: a count-min sketch with ageing and a doorkeeper."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from kvcore.request import Key

ROWS = 4
HIGHEST = 15
DOORS = 3
BITS = 8
"""Bits of the doorkeeper for each use in a period: with three doors, 3 % are false."""

_HALVES = bytes(count >> 1 for count in range(256))


class Sketch:
    """Counts uses of about `keys` keys, up to 16, with an error that is never negative.

    The first use in a period is only noted by the doorkeeper, a Bloom filter; later ones
    count in a count-min sketch of 4 rows. After `period` uses the counts are halved and the
    doorkeeper is emptied. Keys are told apart by a hash of their text form, the same on
    every run. O(1) a call but for the ageing, which is O(keys) every `period` uses. Memory:
    4 to 8 bytes a key, and 1 to 2 bytes a use in a period.

    Source: Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission
    policy", ACM ToS 2017, section 3; Cormode and Muthukrishnan, J. Algorithms 2005.
    """

    __slots__ = ("_counts", "_doors", "_uses", "_width", "period")

    def __init__(self, keys: int, period: int) -> None:
        """Start with all counts 0."""
        self.period = max(1, period)
        self._uses = 0
        self._width = _power_of_two(keys)
        self._counts = bytearray(ROWS * self._width)
        self._doors = bytearray(_power_of_two(BITS * self.period) // 8)

    def add(self, key: Key) -> None:
        """Count a use of `key`."""
        first, step = _hashes(key)
        if not self._enter(first, step):
            for cell in self._cells(first, step):
                if self._counts[cell] < HIGHEST:
                    self._counts[cell] += 1
        self._uses += 1
        if self._uses == self.period:
            self._uses //= 2
            self._counts = self._counts.translate(_HALVES)
            self._doors = bytearray(len(self._doors))

    def estimate(self, key: Key) -> int:
        """Return about how often `key` was used, 0 to 16, older uses counting less."""
        first, step = _hashes(key)
        least = min(self._counts[cell] for cell in self._cells(first, step))
        return least + all(self._doors[byte] & bit for byte, bit in self._bits(first, step))

    def state(self) -> Any:
        """Return what two sketches that estimate alike compare equal by. O(keys)."""
        return self.period, self._width, self._uses, bytes(self._counts), bytes(self._doors)

    @classmethod
    def restored(cls, state: Any) -> Sketch:
        """Return the sketch of that state."""
        period, width, uses, counts, doors = state
        sketch = cls(width, period)
        sketch._uses = uses
        sketch._counts, sketch._doors = bytearray(counts), bytearray(doors)
        return sketch

    def _enter(self, first: int, step: int) -> bool:
        """Let a key in; return whether it had not been seen in this period."""
        fresh = False
        for byte, bit in self._bits(first, step):
            fresh = fresh or not self._doors[byte] & bit
            self._doors[byte] |= bit
        return fresh

    def _cells(self, first: int, step: int) -> list[int]:
        width = self._width
        return [row * width + (first + row * step) % width for row in range(ROWS)]

    def _bits(self, first: int, step: int) -> list[tuple[int, int]]:
        places = ((first + door * step) % (8 * len(self._doors)) for door in range(DOORS))
        return [(place >> 3, 1 << (place & 7)) for place in places]


def _hashes(key: Key) -> tuple[int, int]:
    """Return two hashes of `key`, the second odd, so that its multiples reach every place."""
    digest = blake2b(repr(key).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8]), int.from_bytes(digest[8:]) | 1


def _power_of_two(least: int) -> int:
    return 1 << max(3, (least - 1).bit_length())
