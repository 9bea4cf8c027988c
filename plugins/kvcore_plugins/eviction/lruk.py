"""LRU-K: least recently used, by the K-th last use."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar, TypeAlias

import attrs
from attrs.validators import ge, le

from kvcore import Request, ScoreEviction, Span
from kvcore.request import Key
from kvcore_plugins.bounds import bounded
from kvcore_plugins.eviction.first_use import FirstUses

Uses: TypeAlias = tuple[int, ...]
"""LAST and HIST of the paper: serial number of the latest use, then of the latest k
uncorrelated uses, 0 where there is none."""


@attrs.define(slots=False, eq=False, repr=False, on_setattr=attrs.setters.NO_OP)
class LRUK(ScoreEviction):
    """Evict the span whose k-th last use is the longest ago; spans with fewer uses first.

    LRU decides ties, and so among all spans with fewer than k uses. Time is counted in
    admissions to the cache. A use within `correlated` admissions of the previous one does not
    count, and the time between the two is removed from the history. When a block is evicted,
    its uses are retained by block key, so that they count if it is stored again; the history
    of the block evicted the longest ago is dropped first.

    Fitted to spans: a span has one history. Blocks that are stored together get the history
    of the first of them, which is in at least as many prompts as the others. O(log leaves)
    per event, O(keys) for blocks that are evicted.

    Variant: the published one, except that a span in its correlated period may be evicted,
    since a cache cannot wait; and that the retained history is bounded by number, not by age.

    `span.data` is the `Uses` of the span.

    Options:
        k: which use decides, counted from the latest back.
        correlated: the correlated reference period, in admissions.
        history: keys whose uses are retained after eviction, as a share of those in the pool.

    Source: O'Neil, O'Neil and Weikum, "The LRU-K page replacement algorithm for database
    disk buffering", SIGMOD 1993, figure 2.1.
    """

    name: ClassVar[str] = "lruk"

    # The highest are more than anybody has.
    k: int = bounded(2, "from 1 to 1,000", ge(1), le(1000))
    correlated: int = bounded(0, "a number of admissions, 0 or more", ge(0))
    history: float = bounded(1.0, "a share of the pool, 0 to 1,000", ge(0), le(1000))

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool and create an empty history."""
        super().attach(blocks, block_size)
        self._retained: OrderedDict[Key, Uses] = OrderedDict()
        self._uses = FirstUses(follows=self.one_path)

    def on_insert(self, span: Span, now: int) -> None:
        """Count a use, in addition to the retained ones: not if a request returns to it."""
        first = span.path_keys[span.start // span.geometry.ratio]
        retained = self._retained.get(first)
        if self._uses.count(span, span.start) > span.start and retained is not None:
            span.data = retained
            return
        _, *uses = retained or (0,) * (self.k + 1)
        span.data = (span.last_hit_order, span.last_hit_order, *uses[:-1])

    def on_extend(self, span: Span, blocks: int) -> None:
        """Follow how far its request has come."""
        self._uses.count(span, span.end - blocks)

    def on_access(self, span: Span, now: int) -> None:
        """Count a use, unless it is correlated with the one before."""
        last, *uses = span.data
        if span.last_hit_order - last > self.correlated:
            period = last - uses[0]
            older = (use and use + period for use in uses[:-1])
            uses = [span.last_hit_order, *older]
        span.data = (span.last_hit_order, *uses)
        self._uses.count(span, span.start)

    def on_end(self, request: Request, now: int) -> None:
        """Forget how far the request had come."""
        self._uses.end(request)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Copy the history to the upper half."""
        upper.data = lower.data
        super().on_split(upper, lower)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Retain the history of the blocks that left."""
        self._retain(span, span.end, span.end + blocks)
        super().on_trim(span, blocks)

    def on_remove(self, span: Span, reason: str) -> None:
        """Retain the history of `span`."""
        self._retain(span, span.start, span.end)
        super().on_remove(span, reason)

    def score(self, span: Span, now: int) -> int:
        """Return the serial number of the k-th last use, or 0 if there were fewer."""
        kth: int = span.data[self.k]
        return kth

    def _retain(self, span: Span, start: int, end: int) -> None:
        """Retain the uses of `span` for its blocks `[start, end)`, the first longest."""
        retained, ratio = self._retained, span.geometry.ratio
        for key in reversed(span.path_keys[start // ratio : (end - 1) // ratio + 1]):
            retained[key] = span.data
            retained.move_to_end(key)
        while len(retained) > int(self.history * self.blocks) // ratio:
            retained.popitem(last=False)
