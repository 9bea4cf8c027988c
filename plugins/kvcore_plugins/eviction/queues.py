"""What queue policies are made of: an order of evictable leaves, and spans with one past."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any, TypeAlias

import attrs

from kvcore import EvictionPolicy, Span

Entry: TypeAlias = tuple[Any, int, Span]

SLACK = 4
"""How many entries the heap may hold for each one that counts, before it is made anew."""


class Leaves:
    """The evictable leaves of a queue, first to last.

    A lazy heap: to enter, and to find the first, cost O(log leaves), amortised; to leave
    costs O(1). What is pinned or has children is not in it, so no search ever passes that.
    """

    __slots__ = ("_entries", "_heap")

    def __init__(self) -> None:
        """Begin without leaves."""
        self._entries: dict[Span, Entry] = {}
        self._heap: list[Entry] = []

    def __bool__(self) -> bool:
        """Say whether there is any."""
        return bool(self._entries)

    def enter(self, span: Span, place: Any) -> None:
        """Put `span` at `place`, wherever it was before."""
        entry = self._entries[span] = place, span.id, span
        heappush(self._heap, entry)
        if len(self._heap) > SLACK * (len(self._entries) + SLACK):
            self._heap = sorted(self._entries.values())

    def leave(self, span: Span) -> None:
        """Take `span` out, if it is in."""
        self._entries.pop(span, None)

    def first(self) -> tuple[Span, Any]:
        """Return the first leaf and its place. There must be one."""
        heap, entries = self._heap, self._entries
        while entries.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        place, _, span = heap[0]
        return span, place

    def state(self) -> Any:
        """Return the leaves in order, each with its place and its data."""
        return tuple((span, place, span.data) for place, _, span in self._in_order())

    def restore(self, state: Any) -> None:
        """Take leaves, places and data from `state`."""
        for span, _, data in state:
            span.data = data
        self._heap = [(place, span.id, span) for span, place, _ in state]
        self._entries = {entry[2]: entry for entry in self._heap}

    def _in_order(self) -> list[Entry]:
        return sorted(self._entries.values())


@attrs.define(slots=False, eq=False)
class QueuePolicy(EvictionPolicy):
    """Base of the policies that keep spans in queues.

    Where a span stands is in its `data`, a value that is replaced and never changed. A
    split copies it. Only evictable leaves are looked at, so a derived class says how one
    enters the order that `victim` reads, and how it leaves.
    """

    @abstractmethod
    def enter(self, span: Span) -> None:
        """Put `span`, which has become an evictable leaf, into the order."""

    @abstractmethod
    def leave(self, span: Span) -> None:
        """Take `span` out of the order, if it is in."""

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let both halves have the same past."""
        upper.data = lower.data

    def on_pin(self, span: Span) -> None:
        """Take `span` out of the order; its place in the queue stays its own."""
        self.leave(span)

    def on_release(self, span: Span, now: int) -> None:
        """Enter `span` if it is a leaf; an inner span enters with `on_leaf`."""
        del now
        if not span.children:
            self.enter(span)

    def on_leaf(self, span: Span) -> None:
        """Enter a span that has become a leaf."""
        self.enter(span)


def one_past(span: Span) -> Iterator[Span]:
    """Yield `span`, and those above it that have the same past.

    They were one span once, and nothing but a border tells them apart: a queue moves them
    together, as it would have moved the whole.
    """
    above = span.parent
    yield span
    while above is not None and (above.created_order, above.hit_count) == (
        span.created_order,
        span.hit_count,
    ):
        yield above
        above = above.parent


def heir(span: Span) -> Span | None:
    """Return what is left of the past of `span`, which has just left, if that may go now."""
    past = one_past(span)
    next(past)
    above = next(past, None)
    return above if above is not None and above.is_leaf and not above.ref_count else None
