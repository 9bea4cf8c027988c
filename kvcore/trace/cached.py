"""What is cached, as a count of blocks a key: no block is, without those before it."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any


class CachedKeys:
    """Counts the cached blocks of every key, for prompts whose keys stand for `ratio` blocks.

    A prompt's hit is then a bisection over its keys, whatever spans they are stored in.
    """

    def __init__(self, ratio: int) -> None:
        """Start with nothing cached."""
        self._ratio = ratio
        self._blocks: dict[Any, int] = {}

    def match(self, keys: list[Any]) -> int:
        """Return how many blocks are cached of a prompt, from the first on. O(log keys)."""
        cached = self._blocks
        missing = bisect_left(keys, 1, key=lambda key: key not in cached)
        return (missing - 1) * self._ratio + cached[keys[missing - 1]] if missing else 0

    def store(self, keys: list[Any], first: int, end: int) -> bool:
        """Store the blocks `[first, end)` of a prompt; say whether none of them was there."""
        cached, ratio = self._blocks, self._ratio
        low, high = first // ratio, (end - 1) // ratio
        later = keys[low + 1 : high + 1]
        if cached.get(keys[low], 0) != first - low * ratio or not cached.keys().isdisjoint(
            later
        ):
            return False
        cached[keys[low]] = ratio
        cached.update(dict.fromkeys(later, ratio))
        cached[keys[high]] = end - high * ratio
        return True

    def forget(self, keys: list[Any], first: int, end: int) -> None:
        """Take the last blocks stored of a prompt, `[first, end)`, out again."""
        whole, part = divmod(first, self._ratio)
        for key in keys[whole : (end - 1) // self._ratio + 1]:
            self._blocks.pop(key, None)
        if part:
            self._blocks[keys[whole]] = part
