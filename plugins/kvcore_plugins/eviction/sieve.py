"""SIEVE: a queue, a bit for each span, and a hand."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar, NamedTuple

from kvcore import Span
from kvcore.cache import LazyHeap
from kvcore_plugins.eviction.queues import QueuePolicy, same_history


class Position(NamedTuple):
    """The place of a span in the queue, and whether it was hit since the hand passed it."""

    order: int
    visited: bool


class SIEVE(QueuePolicy):
    """Evict the next span that was not hit since the hand passed it.

    Spans stay in the order in which they were stored. A hand moves from the oldest to the
    newest and begins again: it clears the bit of a span that was hit, and stops at one that
    was not.

    Fitted to spans: the unit of the queue is the span. The hand passes a span that is pinned
    or has children and leaves its bit alone. A span that loses its tail keeps the hand until
    it has left or is hit. On one-key requests this is the published algorithm.

    The hand does not visit each span: it moves to the first of the evictable leaves ahead of
    it, and those behind it are next in the following lap. So spans between cost nothing, and
    each event O(log leaves), amortised: a bit that is cleared was set by a hit.

    `span.data` is the `Position` of the span.

    Source: Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is simpler than LRU", NSDI 2024.
    """

    name: ClassVar[str] = "sieve"
    fixed_order: ClassVar[bool] = True

    _hand = 0

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool and create the empty queue."""
        super().attach(blocks, block_size)
        self._ahead: LazyHeap[Span] = LazyHeap()
        self._behind: LazyHeap[Span] = LazyHeap()
        # The number of spans by their order: the parts of a split share one.
        self._spans_by_order: OrderedDict[int, int] = OrderedDict()

    def queue_of(self, span: Span) -> LazyHeap[Span]:
        """Return the leaves on the side of the hand on which `span` is.

        The hand meets those ahead of it in this lap, those behind it in the next.
        """
        return self._behind if span.data.order < self._hand else self._ahead

    def on_insert(self, span: Span, now: int) -> None:
        """Append `span` to the queue."""
        span.data = Position(span.created_order, visited=False)
        self._spans_by_order[span.created_order] = 1

    def on_access(self, span: Span, now: int) -> None:
        """Set the bit of `span`."""
        span.data = Position(span.data.order, visited=True)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Keep both halves in one place of the queue, with a bit each."""
        super().on_split(upper, lower)
        self._spans_by_order[lower.data.order] += 1

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span`; if the queue ends before the hand, the hand begins again."""
        self.leave(span)
        spans, order = self._spans_by_order, span.data.order
        spans[order] -= 1
        if not spans[order]:
            del spans[order]
        if not spans or next(reversed(spans)) < self._hand:
            self._begin_again()

    def victim(self, now: int) -> Span:
        """Move the hand to the next evictable leaf whose bit is clear, and return that."""
        while True:
            if not self._ahead:
                self._begin_again()
            span = self._ahead.first()
            self._hand = span.data.order
            if not span.data.visited:
                return span
            for part in same_history(span):
                part.data = Position(self._hand, visited=False)
            self._ahead.discard(span)
            self._behind.push((self._hand, span.id, span))

    def _begin_again(self) -> None:
        """Move the hand back to the oldest span."""
        self._ahead, self._behind = self._behind, self._ahead
        self._hand = 0
