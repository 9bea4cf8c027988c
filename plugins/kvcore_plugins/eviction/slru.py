"""Segmented LRU."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

import attrs
from attrs.validators import ge, le

from kvcore import EvictionPolicy, Span
from kvcore_plugins.bounds import bounded


@attrs.define(slots=False, eq=False, repr=False, on_setattr=attrs.setters.NO_OP)
class SLRU(EvictionPolicy):
    """Evict spans used once, least recent first, before spans used again.

    A span starts in the probationary segment; a hit moves it to the protected segment. While
    the protected segment is larger than its share of the pool, its least recent span moves
    whole to the recent end of the probationary segment. Segments contain unpinned spans, and
    their sizes are blocks. O(1) per event.

    `span.data` is whether the span belongs to the protected segment.

    Options:
        protected: the share of the pool for the protected segment, 0 to 1.

    Source: Karedla, Love and Wherry, "Caching strategies to improve disk system
    performance", IEEE Computer 1994. Published for objects of equal size; here the unit
    of both queues is the span.
    """

    name: ClassVar[str] = "slru"

    protected: float = bounded(0.5, "a share of the pool, 0 to 1", ge(0), le(1))

    _protected_blocks = 0

    def attach(self, blocks: int, block_size: int) -> None:
        """Compute the capacity of the protected segment and create both segments."""
        super().attach(blocks, block_size)
        self._capacity = int(self.protected * blocks)
        self._probation: OrderedDict[Span, None] = OrderedDict()
        self._protected: OrderedDict[Span, None] = OrderedDict()

    def on_insert(self, span: Span, now: int) -> None:
        """Assign `span` to the probationary segment."""
        span.data = False

    def on_access(self, span: Span, now: int) -> None:
        """Promote `span`."""
        span.data = True

    def on_split(self, upper: Span, lower: Span) -> None:
        """Assign both halves to one segment; the upper is pinned and so in neither order."""
        upper.data = lower.data
        if lower in self._protected:
            self._protected_blocks -= upper.blocks

    def on_pin(self, span: Span) -> None:
        """Remove `span` from its segment."""
        if span in self._protected:
            del self._protected[span]
            self._protected_blocks -= span.blocks
        else:
            del self._probation[span]

    def on_release(self, span: Span, now: int) -> None:
        """Append `span` to its segment; demote spans if the protected one is too large."""
        if not span.data:
            self._probation[span] = None
            return
        self._protected[span] = None
        self._protected_blocks += span.blocks
        while self._protected_blocks > self._capacity:
            oldest, _ = self._protected.popitem(last=False)
            self._protected_blocks -= oldest.blocks
            oldest.data = False
            self._probation[oldest] = None

    def on_trim(self, span: Span, blocks: int) -> None:
        """Subtract the blocks that left."""
        if span in self._protected:
            self._protected_blocks -= blocks

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span` from its segment."""
        self.on_pin(span)

    def victim(self, now: int) -> Span:
        """Return the least recent probationary span, else the least recent protected one."""
        return next(iter(self._probation or self._protected))
