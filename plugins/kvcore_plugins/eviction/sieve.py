"""SIEVE: a queue, a bit, and a hand."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar, NamedTuple

import attrs

from kvcore import Span
from kvcore_plugins.eviction.queues import Leaves, QueuePolicy, one_past


class Mark(NamedTuple):
    """Where a span stands in the queue, and whether it was hit since the hand was there."""

    place: int
    visited: bool


@attrs.define(slots=False, eq=False)
class SIEVE(QueuePolicy):
    """Evict the next span that was not hit since the hand was there last.

    Spans stand in the order in which they were stored, for good. A hand moves from the
    oldest to the newest and begins again: it clears the bit of a span that was hit, and
    stops at one that was not.

    Fitted to spans: the unit of the queue is the span. The hand passes what is pinned or
    has children and leaves its bit alone. A span that loses its tail keeps the hand until
    it is gone or hit. On one-key requests this is the published algorithm.

    The hand does not walk: it takes the first of the evictable leaves that are ahead of
    it, and those behind wait for the next lap. So what it passes costs nothing, and each
    event O(log leaves), amortised: a bit that is cleared was set by a hit.

    Source: Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is simpler than LRU", NSDI 2024.
    """

    name: ClassVar[str] = "sieve"

    _ahead: Leaves = attrs.field(init=False, factory=Leaves, repr=False)
    _behind: Leaves = attrs.field(init=False, factory=Leaves, repr=False)
    _queue: OrderedDict[int, int] = attrs.field(init=False, factory=OrderedDict, repr=False)
    _hand: int = attrs.field(init=False, default=0, repr=False)

    def enter(self, span: Span) -> None:
        """Let the hand find `span`: in this lap if it is ahead, else in the next."""
        self._side(span).enter(span, span.data.place)

    def leave(self, span: Span) -> None:
        """Let the hand pass `span`."""
        self._side(span).leave(span)

    def on_insert(self, span: Span, now: int) -> None:
        """Put `span` at the new end of the queue."""
        del now
        span.data = Mark(span.created_order, visited=False)
        self._queue[span.created_order] = 1

    def on_access(self, span: Span, now: int) -> None:
        """Set its bit."""
        del now
        span.data = Mark(span.data.place, visited=True)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let both halves stand in one place, with one bit each."""
        super().on_split(upper, lower)
        self._queue[lower.data.place] += 1

    def joined(self, upper: Span, lower: Span) -> None:
        """Let the whole stand there again."""
        del upper
        self._queue[lower.data.place] -= 1

    def on_remove(self, span: Span, reason: str) -> None:
        """Forget `span`; if nothing newer is left for the hand, it begins again."""
        del reason
        self.leave(span)
        queue, place = self._queue, span.data.place
        queue[place] -= 1
        if not queue[place]:
            del queue[place]
        if not queue or next(reversed(queue)) < self._hand:
            self._begin_again()

    def victim(self, now: int) -> Span:
        """Move the hand to the next evictable leaf whose bit is clear."""
        del now
        while True:
            if not self._ahead:
                self._begin_again()
            span, self._hand = self._ahead.first()
            if not span.data.visited:
                return span
            for part in one_past(span):
                part.data = Mark(self._hand, visited=False)
            self._ahead.leave(span)
            self._behind.enter(span, self._hand)

    def state(self) -> Any:
        """Return the leaves ahead and behind, the places taken, and the hand."""
        leaves = self._ahead.state(), self._behind.state()
        return leaves, tuple(self._queue.items()), self._hand

    def restore(self, state: Any) -> None:
        """Take all of that from `state`."""
        (ahead, behind), queue, self._hand = state
        self._ahead.restore(ahead)
        self._behind.restore(behind)
        self._queue = OrderedDict(queue)

    def _side(self, span: Span) -> Leaves:
        """Return the leaves on the side of the hand that `span` is on."""
        return self._behind if span.data.place < self._hand else self._ahead

    def _begin_again(self) -> None:
        """Bring the hand back to the oldest."""
        self._ahead, self._behind = self._behind, self._ahead
        self._hand = 0
