"""A pool of its own for the windows, or for the states, of cached spans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import ClassVar, Literal

from kvcore import Span


class SidePool(ABC):
    """The windows, or the states, of cached spans: slots that are free, private or cached.

    A span has what it needs to resume at its end, or it is a *tombstone*: its K/V of full
    attention alone is cached. The least recently used span that no request needs loses what it
    has first; a leaf leaves with it, any other span becomes a tombstone.

    Args:
        slots: number of slots.
        evict: called with this pool and the span that loses what it has; it has to call `drop`.

    Attributes:
        name: name of the pool in traces.
        slots: number of slots; free: those that are neither private nor cached.
        evictable: number of slots of spans that no request needs.
    """

    name: ClassVar[Literal["window", "state"]]

    def __init__(self, slots: int, evict: Callable[[SidePool, Span], None]) -> None:
        self.slots = self.free = slots
        self.evictable = 0
        self._evict = evict
        self._clock = 0
        self._used: dict[Span, int] = {}  # of the spans that are no tombstones
        self._locks: dict[Span, int] = {}  # of tombstones too
        # By last use. Spans of one use, and halves of a span that was split, are in order of
        # position: the first is the oldest. Entries of a use or a position before are stale.
        self._oldest: list[tuple[int, int, int, Span]] = []

    def __contains__(self, span: Span) -> bool:
        """Return True if `span` is no tombstone."""
        return span in self._used

    @property
    def available(self) -> int:
        """Number of slots that are free or can be evicted."""
        return self.free + self.evictable

    @abstractmethod
    def slots_of(self, span: Span) -> int:
        """Return the slots of a span that is no tombstone."""

    def unlocked(self, spans: Iterable[Span]) -> int:
        """Return how many slots of `spans` no request needs."""
        return sum(
            self.slots_of(span)
            for span in spans
            if span in self._used and span not in self._locks
        )

    def add(self, span: Span) -> None:
        """Give private slots to a tombstone, which becomes the most recent span."""
        if span not in self._locks:
            self.evictable += self.slots_of(span)
        self._used[span] = 0
        self.touch([span])

    def touch(self, spans: Iterable[Span]) -> None:
        """Make those of `spans` that are no tombstones the most recent ones."""
        self._clock += 1
        for span in spans:
            if span in self._used:
                self._used[span] = self._clock
                self._push(span)

    def lock(self, spans: Iterable[Span]) -> None:
        """Keep what `spans` have, and what they may get, for a request."""
        for span in spans:
            locks = self._locks.get(span, 0)
            if not locks and span in self._used:
                self.evictable -= self.slots_of(span)
            self._locks[span] = locks + 1

    def unlock(self, spans: Iterable[Span]) -> None:
        """End a lock."""
        for span in spans:
            self._locks[span] -= 1
            if not self._locks[span]:
                del self._locks[span]
                if span in self._used:
                    self.evictable += self.slots_of(span)
                    self._push(span)

    @abstractmethod
    def split(self, upper: Span, lower: Span) -> None:
        """Called when the first blocks of `lower` have moved to the new span `upper`."""

    def drop(self, span: Span) -> None:
        """Free what `span` has, which no request needs."""
        if self._used.pop(span, None) is not None:
            self.free += self.slots_of(span)
            self.evictable -= self.slots_of(span)

    def take(self, slots: int) -> None:
        """Allocate private slots; evict what is missing, which must be evictable."""
        while self.free < slots:
            clock, start, _, span = heappop(self._oldest)
            if self._used.get(span) != clock or span.start != start or span in self._locks:
                continue
            self._evict(self, span)
        self.free -= slots

    def _push(self, span: Span) -> None:
        if len(self._oldest) > 64 + 4 * len(self._used):
            kept = self._used.items()
            self._oldest = [(used, span.start, span.id, span) for span, used in kept]
            heapify(self._oldest)
        heappush(self._oldest, (self._used[span], span.start, span.id, span))

    def check(self, private: int) -> None:
        """Check that slots are free, cached, or among `private` ones.

        Raises:
            AssertionError: they are not; the message has the numbers.
        """
        cached = sum(map(self.slots_of, self._used))
        evictable = self.unlocked(self._used)
        if self.free + cached + private != self.slots or evictable != self.evictable:
            msg = (
                f"{self.free} free, {cached} cached and {private} private slots are not "
                f"{self.slots}; {evictable} can be evicted, counted are {self.evictable}"
            )
            raise AssertionError(msg)


class Windows(SidePool):
    """K/V of layers with a window, in as many slots as a span has blocks."""

    name = "window"

    def slots_of(self, span: Span) -> int:
        """Return the blocks of `span`."""
        return span.end - span.start

    def split(self, upper: Span, lower: Span) -> None:
        """Give both halves what `lower` had."""
        if lower in self._locks:
            self._locks[upper] = self._locks[lower]
        if lower in self._used:
            self._used[upper] = self._used[lower]
            self._push(upper)
            self._push(lower)


class States(SidePool):
    """States of recurrent layers: one slot for a span, with the state at its end."""

    name = "state"

    def slots_of(self, span: Span) -> int:
        """Return 1."""
        return 1

    def split(self, upper: Span, lower: Span) -> None:
        """Leave the state with `lower`: that at the end of `upper` is not known."""
        if lower in self._used:
            self._push(lower)
