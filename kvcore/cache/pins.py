"""Pins of clients: paths that the eviction policy cannot evict before a time."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from kvcore.cache.pool import CountingPool
from kvcore.cache.sequence import Sequence
from kvcore.cache.span import Span

PIN_SHARE = 0.5
"""Share of the pool that the pins of clients hold at most."""


class Pin(NamedTuple):
    """A client's pin: the path from the root to `span`, until it expires.

    It counts in `ref_count` of these spans, as an open sequence does, so it holds for every
    eviction policy.

    Attributes:
        until: the time (ns) at which it ends.
        serial: its serial number, which orders pins that end at one time.
        span: the deepest span.
    """

    until: int
    serial: int
    span: Span


class PinnedTree(Protocol):
    """The attributes and methods of `SpanTree` that pins use: its module imports this one."""

    root: Span
    pool: CountingPool
    unpinned_blocks: int

    def split(self, lower: Span, position: int) -> Span:
        """Cut `lower` at block `position`; return the upper half, pinned once more."""

    def close(self, span: Span, now: int) -> None:
        """Unpin the path down to `span`, leaf to root."""


class ClientPins:
    """The pins of clients in a tree, in a heap by the time at which they end.

    Attributes:
        held: the number of pins on each span that has any.
        blocks: blocks in these spans.
        refused_blocks: blocks that were not pinned, since they exceeded the share of pins.
        yielded: pins that ended early, for a request without blocks while none was open.
    """

    __slots__ = ("_heap", "_serial", "_tree", "blocks", "held", "refused_blocks", "yielded")

    def __init__(self, tree: PinnedTree) -> None:
        """Pin nothing in `tree` yet."""
        self._tree = tree
        self._heap: list[Pin] = []
        self._serial = 0
        self.held: dict[Span, int] = {}
        self.blocks = self.refused_blocks = self.yielded = 0

    def __len__(self) -> int:
        """Return the number of pins; without any, the object is false."""
        return len(self._heap)

    def __iter__(self) -> Iterator[Pin]:
        """Yield the pin that ends first, then the others in no particular order."""
        return iter(self._heap)

    @property
    def next_end(self) -> int:
        """The time (ns) at which the next pin ends. There must be a pin."""
        return self._heap[0].until

    def pin(self, seq: Sequence, until: int) -> None:
        """Pin the path of `seq` until `until` (ns), as far as the share of pins allows.

        The span in which the share ends is split. O(its spans).
        """
        tree, held = self._tree, self.held
        above = span = seq.span
        while above is not tree.root and above not in held:
            above = above.parent  # type: ignore[assignment]
        # Of the blocks that no client pins yet, those behind `above`, some have room.
        end = min(span.end, above.end + int(PIN_SHARE * tree.pool.blocks) - self.blocks)
        self.refused_blocks += span.end - end
        while span is not above and span.start >= end:
            span = span.parent  # type: ignore[assignment]
        if span.end > end:
            span = tree.split(span, end)
            span.ref_count -= 1  # the pin of who splits
        if span is tree.root:
            return
        self.blocks += end - above.end
        self._serial += 1
        heappush(self._heap, Pin(until, self._serial, span))
        while span is not tree.root:
            span.ref_count += 1
            held[span] = held.get(span, 0) + 1
            span = span.parent  # type: ignore[assignment]

    def on_split(self, upper: Span, lower: Span) -> None:
        """Called when the head of `lower` became `upper`, which the same pins hold."""
        if lower in self.held:
            self.held[upper] = self.held[lower]

    def end(self, now: int) -> None:
        """Remove expired pins. O(their spans)."""
        while self._heap and self._heap[0].until <= now:
            self._end_first(now)

    def make_way(self, blocks: int, now: int) -> bool:
        """Remove pins, in order of expiry, until `blocks` blocks are free or evictable.

        Returns False, and removes none, if the blocks would be too few even without pins.
        O(pinned spans).
        """
        tree = self._tree
        alone = sum(span.blocks for span, pins in self.held.items() if pins == span.ref_count)
        if blocks > tree.pool.free_blocks + tree.unpinned_blocks + alone:
            return False
        while blocks > tree.pool.free_blocks + tree.unpinned_blocks:
            self._end_first(now)
            self.yielded += 1
        return True

    def _end_first(self, now: int) -> None:
        """Remove the pin that expires first."""
        span = deepest = heappop(self._heap).span
        while span is not self._tree.root:
            self.held[span] -= 1
            if not self.held[span]:
                del self.held[span]
                self.blocks -= span.blocks
            span = span.parent  # type: ignore[assignment]
        self._tree.close(deepest, now)
