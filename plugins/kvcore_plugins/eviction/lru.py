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

    Options:
        renew_split: whether a hit that ends inside a span makes the rest of the span, which it
            does not hit, the most recent, as in SGLang.
    """

    name: ClassVar[str] = "lru"
    fixed_order: ClassVar[bool] = True
    by_release = True
    later_options = ("renew_split",)
    renew_split = False

    def __init__(self, renew_split: bool = False) -> None:  # noqa: FBT001, FBT002
        """Store the option."""
        self.renew_split = renew_split
        self.by_release = not renew_split

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool and create the empty order."""
        super().attach(blocks, block_size)
        self._order: OrderedDict[Span, None] = OrderedDict()

    def on_pin(self, span: Span) -> None:
        """Remove `span` from the order."""
        del self._order[span]

    def on_release(self, span: Span, now: int) -> None:
        """Append `span` as the most recent one."""
        self._order[span] = None

    def on_split(self, upper: Span, lower: Span) -> None:
        """Make `lower` the most recent, if splits renew and no request uses it."""
        if self.renew_split and not lower.ref_count:
            self._order.move_to_end(lower)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span` from the order."""
        del self._order[span]

    def victim(self, now: int) -> Span:
        """Return the least recent span."""
        return next(iter(self._order))
