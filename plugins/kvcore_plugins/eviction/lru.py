"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from kvcore import EvictionPolicy, Span


class LRU(EvictionPolicy):
    """Evict the span that has gone unused the longest.

    One ordered dict of the unpinned spans, appended to leaf → root as a path is released:
    children are then always older than their parents, so the first span is always an
    evictable leaf. No timestamps, no heap: O(1) per event.
    """

    name: ClassVar[str] = "lru"

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool and create the empty order."""
        super().attach(blocks, block_size)
        self._order: OrderedDict[Span, None] = OrderedDict()

    def on_pin(self, span: Span) -> None:
        """Remove `span` from the order."""
        del self._order[span]

    def on_release(self, span: Span, now: int) -> None:
        """Append `span`, which is the most recent now."""
        self._order[span] = None

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span` from the order."""
        del self._order[span]

    def victim(self, now: int) -> Span:
        """Return the least recent span."""
        return next(iter(self._order))
