"""The base class of queue policies, with queues of spans and heaps of evictable leaves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from kvcore import EvictionPolicy, Span
from kvcore.cache import LazyHeap


class QueuePolicy(EvictionPolicy):
    """Base of the policies that keep spans in queues.

    The position of a span in its queue is stored in `span.data`, a value that is replaced
    and never changed. A split copies it. A victim is searched for among the evictable
    leaves alone, so a heap for each queue holds these, in the order of the queue.

    A derived class that stores its victim in `_victim` keeps it until the span has left the
    cache or is pinned.
    """

    _victim: Span | None = None

    @abstractmethod
    def queue_of(self, span: Span) -> LazyHeap[Span]:
        """Return the heap with the evictable leaves of the queue that `span` is in."""

    @abstractmethod
    def enter(self, span: Span) -> None:
        """Insert `span`, which has become an evictable leaf, into the heap of its queue."""

    def leave(self, span: Span) -> None:
        """Remove `span` from the heap of its queue if it is there."""
        self.queue_of(span).discard(span)
        if span is self._victim:
            self._victim = None

    def on_split(self, upper: Span, lower: Span) -> None:
        """Copy the position to the upper half."""
        upper.data = lower.data

    def on_pin(self, span: Span) -> None:
        """Remove `span` from the order; it keeps its position in the queue."""
        self.leave(span)

    def on_release(self, span: Span, now: int) -> None:
        """Insert `span` if it is a leaf; an inner span is inserted by `on_leaf`."""
        if not span.children:
            self.enter(span)

    def on_leaf(self, span: Span) -> None:
        """Insert a span that has become a leaf."""
        self.enter(span)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span`; if a split had cut off its first blocks, they are the next victim."""
        victim = _evictable_rest(span) if span is self._victim else self._victim
        self.leave(span)
        self._victim = victim


def same_history(span: Span) -> Iterator[Span]:
    """Yield `span` and the spans above it that splits have cut off from it.

    The same requests created and hit them, so a queue moves them together, as it would have
    moved the undivided span.
    """
    yield span
    above = span.parent
    identity = span.created_order, span.hit_count
    while above is not None and (above.created_order, above.hit_count) == identity:
        yield above
        above = above.parent


def _evictable_rest(span: Span) -> Span | None:
    """Return the span that a split had cut off from `span`, which is being removed.

    None if there is none, or if it is not evictable.
    """
    parts = same_history(span)
    next(parts)
    above = next(parts, None)
    return above if above is not None and above.is_leaf and not above.ref_count else None
