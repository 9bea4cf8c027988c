"""The base class of queue policies, with queues of spans and heaps of evictable leaves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from kvcore import EvictionPolicy, Span
from kvcore.cache import LazyHeap


class QueuePolicy(EvictionPolicy):
    """Base of the policies that keep spans in queues.

    The position of a span in its queue is stored in `span.data`, a value that is replaced
    and never changed, with an `order`. A split copies it. A victim is searched for among the
    evictable leaves alone, so a heap for each queue holds these, in the order of the queue.

    A derived class that stores its victim in `_victim` keeps it until the span has left the
    cache or is pinned.
    """

    _victim: Span | None = None

    @abstractmethod
    def queue_of(self, span: Span) -> LazyHeap[Span]:
        """Return the heap with the evictable leaves of the queue that `span` is in."""

    def enter(self, span: Span) -> None:
        """Insert `span`, which has become an evictable leaf, into the heap of its queue."""
        self.queue_of(span).push((span.data.order, span.id, span))

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


class ScannedLeaves:
    """Orders evictable leaves by scores that change with time; the lowest is the first.

    A scan scores all leaves. The lowest eighth are candidates, and so are leaves that enter
    later with a score as low. The next scan follows when these are used up, or when the leaves
    have aged by an eighth: O(leaves) for each eighth of them that leaves. Ties go to the lower
    `released_order`.

    Args:
        score: returns the score of a leaf at a time in ns.
    """

    def __init__(self, score: Callable[[Span, int], float]) -> None:
        """Create an empty order."""
        self._score = score
        # The leaves with their entries in the heap; an entry that is no leaf's is garbage.
        self._leaves: dict[Span, tuple[float, int, Span] | None] = {}
        self._candidates: list[tuple[float, int, Span]] = []
        self._limit, self._scan_at = 0.0, 0

    def add(self, leaf: Span, now: int) -> None:
        """Insert a leaf, or move it when what its score depends on has changed."""
        score = self._score(leaf, now)
        self._leaves[leaf] = None
        if score <= self._limit:
            self._leaves[leaf] = entry = (score, leaf.released_order, leaf)
            heappush(self._candidates, entry)
            if len(self._candidates) > _GARBAGE * len(self._leaves):
                self.scan(now)

    def discard(self, span: Span) -> None:
        """Remove `span` if it is in the order."""
        self._leaves.pop(span, None)

    def first(self, now: int) -> Span:
        """Return the candidate with the lowest score."""
        if now >= self._scan_at:
            self.scan(now)
        entry_of = self._leaves.get
        while True:
            while self._candidates:
                entry = self._candidates[0]
                if entry_of(entry[2]) is entry:
                    return entry[2]
                heappop(self._candidates)
            self.scan(now)

    def scan(self, now: int) -> None:
        """Score all leaves, and choose the candidates."""
        leaves = list(self._leaves)
        if not leaves:
            return
        score_of = self._score
        scores = [score_of(leaf, now) for leaf in leaves]
        self._limit = limit = sorted(scores)[len(leaves) // _SCANS]
        ages = len(leaves) * now - sum([leaf.last_access for leaf in leaves])
        self._scan_at = now + 1 + ages // (_SCANS * len(leaves))
        self._candidates = [
            (score, leaf.released_order, leaf)
            for score, leaf in zip(scores, leaves, strict=True)
            if score <= limit
        ]
        for entry in self._candidates:
            self._leaves[entry[2]] = entry
        heapify(self._candidates)


_SCANS, _GARBAGE = 8, 4
"""Of the leaves, the share that are candidates after a scan, and of their ages, the growth
until the next one; entries of the heap for each leaf that are too many."""
