"""The eviction contract: which unpinned leaf leaves the cache when blocks are missing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any, ClassVar, Generic, TypeVar

from kvcore.cache.span import Span
from kvcore.plugins.base import Plugin, has_no_order
from kvcore.request import Request


class EvictionPolicy(Plugin):
    """Orders the evictable spans, and returns one victim at a time.

    `victim` is the only method that a policy must have. The callbacks, whose names start
    with `on_`, do nothing here. A callback that a policy does not override is never called,
    so it costs nothing. `now` is in nanoseconds and never decreases. Spans compare by
    identity.

    A policy keeps its options in `__init__` and creates its state in `attach`, which every
    override calls on `super()` as well. One instance serves one cache. After an exception in
    any method the cache refuses every further call, so a policy needs no code that repairs
    its state.

    Attributes:
        expires_spans: whether the policy ever sets `span.expires`.
        fixed_order: whether the order of victims depends on nothing but earlier callbacks:
            neither on the time, nor on `requester`, nor on how many blocks a span has left. A
            simulation may then evict the blocks of the next steps of a batch at once. The
            cache reads it from the class itself: a subclass may decide otherwise.
        by_release: whether the victim is the unpinned span of lowest `released_order`, and
            `on_pin`, `on_release` and `on_remove` do nothing but keep that order. The core in C
            then keeps it, calls `on_release` alone, of the spans that are left at its end, and
            sets no `requester`. Read as `fixed_order`.
        blocks, block_size: size of the pool in blocks and of a block in tokens, set by
            `attach`.
        requester: id of the request that needs the blocks of the next victim.
        lookahead: number of following requests that untimed replay announces by
            `on_queued`, where no queue exists (None: all of them). Set in `__init__`.
        one_path: whether the blocks of a request are one path, until its `on_end`. A tier and
            a cache of several groups set it False before `attach`.
    """

    kind: ClassVar[str] = "eviction"
    expires_spans: ClassVar[bool] = False
    fixed_order: ClassVar[bool] = False
    by_release: bool = False

    blocks: int = 0
    block_size: int = 0
    requester: int | str | None = None
    lookahead: int | None = 0
    one_path: bool = True

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool; called once, before any other method."""
        self.blocks = blocks
        self.block_size = block_size

    def on_insert(self, span: Span, now: int) -> None:
        """Called when computed blocks were committed as a new span, `span`. It is pinned."""

    def on_access(self, span: Span, now: int) -> None:
        """Called when the first admission of another request hit `span`. It is pinned.

        The blocks that this admission needed have been evicted before.
        """

    def on_extend(self, span: Span, blocks: int) -> None:
        """Called when the creator of `span` appended `blocks` blocks to it. It is pinned."""

    def on_split(self, upper: Span, lower: Span) -> None:
        """Called when the head of `lower` became the new span `upper`, its parent.

        `lower` keeps its `id`, its place in the order and its `data`. `upper` is pinned and
        has the statistics of `lower`, but no `data`: copy `lower.data` if the policy uses it.
        """

    def on_pin(self, span: Span) -> None:
        """Called when `span.ref_count` rose from 0: it is not evictable any more."""

    def on_release(self, span: Span, now: int) -> None:
        """Called when `span.ref_count` fell to 0.

        A path is released from its deepest span up to the root, so the callback also comes
        for inner spans, which are not evictable before `on_leaf`.
        """

    def on_leaf(self, span: Span) -> None:
        """Called when an unpinned span lost its last child: it is evictable now."""

    def on_trim(self, span: Span, blocks: int) -> None:
        """Called when the last `blocks` blocks of a victim were evicted; the rest stays."""

    def on_remove(self, span: Span, reason: str) -> None:
        """Called when the whole of `span` leaves the cache.

        The reason is `capacity` for a victim, or `expired`; in a tier it may be `moved` (its
        blocks were loaded and do not stay), `corrupt`, `gone` or `failed`.

        Its parent's `children` do not contain it any more, but `span.keys()`, `span.parent`
        and `span.data` can be read for the last time. `on_leaf` of the parent may follow.
        """

    def on_miss(self, request: Request, hit_blocks: int, now: int) -> None:
        """Called when a first admission hit fewer blocks of its prompt than it could have.

        No block has been evicted for this admission yet.
        """

    def on_queued(self, request: Request, now: int, *, front: bool = False) -> None:
        """Called when `request` enters the waiting queue: it arrived or was preempted.

        The order is that of entry, not the scheduler's: the last, or the first with `front`.
        """

    def on_dequeued(self, request: Request, now: int) -> None:
        """Called when `request` leaves the waiting queue, as when it is admitted."""

    def on_end(self, request: Request, now: int) -> None:
        """Called when `request` has ended; `on_release` of spans that no other uses follows."""

    @abstractmethod
    def victim(self, now: int) -> Span:
        """Return the unpinned leaf to evict next, and keep it.

        The cache evicts as many blocks of it as are missing, last block first, and calls
        `on_trim` or `on_remove`. Without such a call in between the answer stays the same.
        `victim` is called only while an unpinned leaf exists. Spans that a client has demoted
        are evicted without a call.
        """

    def evictable_blocks(self, span: Span) -> int:
        """Return how many blocks, 1 or more, at the end of the victim `span` may leave.

        `victim` is called again before more of it leaves: for policies to which the blocks
        of one span differ in value. The default is all blocks of the span.
        """
        return span.end - span.start


Item = TypeVar("Item")


class LazyHeap(Generic[Item]):
    """A priority queue from which any item can be removed in O(1).

    An entry is a tuple that ends with its item; the elements before the item order the
    entries and must differ between items. Removing an item, or pushing it again with another
    order, leaves its old entry in the heap as garbage. Garbage is dropped when it comes to
    the top, and all at once when it is most of the heap: `push` and `first` cost O(log items)
    amortised, and the memory is O(items).
    """

    __slots__ = ("_entries", "_heap")

    def __init__(self) -> None:
        """Create an empty queue."""
        self._entries: dict[Item, tuple[Any, ...]] = {}
        self._heap: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        """Return True if `item` is in the queue."""
        return item in self._entries

    def __iter__(self) -> Iterator[Item]:
        """Yield the items in no particular order."""
        return iter(self._entries)

    def push(self, entry: tuple[Any, ...]) -> None:
        """Insert the item that `entry` ends with, ordered by the elements before it.

        An item that is in the queue moves.
        """
        entries, heap = self._entries, self._heap
        entries[entry[-1]] = entry
        heappush(heap, entry)
        if len(heap) > _GARBAGE * (len(entries) + _GARBAGE):
            self._heap = sorted(entries.values())

    def discard(self, item: Item) -> None:
        """Remove `item` if it is in the queue."""
        self._entries.pop(item, None)

    def first_entry(self) -> tuple[Any, ...]:
        """Return the lowest entry. Raises LookupError if there is none."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[-1]) is entry:
                return entry
            heappop(heap)
        msg = "the queue is empty"
        raise LookupError(msg)

    def first(self) -> Item:
        """Return the item of the lowest entry. Raises LookupError if there is none."""
        item: Item = self.first_entry()[-1]
        return item

    def pop(self) -> Item:
        """Remove the item of the lowest entry and return it."""
        item = self.first()
        heappop(self._heap)
        del self._entries[item]
        return item


_GARBAGE = 4
"""Entries that a lazy heap may hold for each item before it is rebuilt."""


class ScoreEviction(EvictionPolicy):
    """Evicts the unpinned leaf with the lowest score; `score` is all that must be written.

    Ties go to the lower `released_order`, then to the deeper span, then to the lower `id`.
    A score is computed when a span becomes evictable, is trimmed, or is cut by a split, and
    kept in a heap. That is right for scores that change only when a span is used. A score
    that changes by itself at a known time (a priority that ends) overrides `changes_at`.
    With `drifts`, for scores that change all the time, the `sample` lowest leaves are scored
    again whenever a victim is needed.

    O(log leaves) per event. The callbacks that this class overrides must be called on
    `super()` by an override in a subclass.

    Attributes:
        drifts: whether scores change with time.
        sample: number of leaves that are scored again for each victim, if they do.
    """

    drifts: ClassVar[bool] = False
    sample: ClassVar[int] = 32

    _now = 0
    _answer: Span | None = None

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool and create the empty order."""
        super().attach(blocks, block_size)
        self._leaves: LazyHeap[Span] = LazyHeap()
        self._timers: LazyHeap[Span] = LazyHeap()
        self._timed = type(self).changes_at is not ScoreEviction.changes_at

    @abstractmethod
    def score(self, span: Span, now: int) -> Any:
        """Return the score of `span`: the lowest leaves first.

        Scores are any values that compare with one another; None and NaN do not.
        """

    def changes_at(self, span: Span, now: int) -> int | None:
        """Return the time (ns), after `now`, at which the score changes by itself, or None."""
        return None

    def rescore(self, span: Span) -> None:
        """Compute the score of `span` again if it is evictable. O(log leaves).

        For subclasses to call when something changed that the score depends on.
        """
        if span in self._leaves:
            self._enter(span, self._now)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Rescore the lower half: it is shorter now and begins deeper."""
        self.rescore(lower)

    def on_pin(self, span: Span) -> None:
        """Remove `span` from the order."""
        self._leave(span)

    def on_release(self, span: Span, now: int) -> None:
        """Insert `span` if it is a leaf; an inner span is inserted by `on_leaf`."""
        self._now = now
        if not span.children:
            self._enter(span, now)

    def on_leaf(self, span: Span) -> None:
        """Insert a span that has become a leaf."""
        self._enter(span, self._now)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Rescore the rest of `span`."""
        self._enter(span, self._now)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span` from the order."""
        self._leave(span)

    def victim(self, now: int) -> Span:
        """Return the evictable span with the lowest score."""
        if self.drifts and self._answer is not None and now == self._now:
            return self._answer
        self._now = now
        if self._timed:
            timers = self._timers
            while timers and timers.first_entry()[0] <= now:
                self._enter(timers.pop(), now)
        if self.drifts:
            self._answer = self._lowest_of_sample(now)
            return self._answer
        return self._leaves.first()

    def _enter(self, span: Span, now: int) -> tuple[Any, ...]:
        self._answer = None
        score = self.score(span, now)
        if has_no_order(score):
            hint = ": is a `return` missing?" if score is None else ""
            msg = f"score() of {span!r} is {score!r}, which has no place in an order{hint}"
            raise ValueError(msg)
        entry = (score, span.released_order, -span.start, span.id, span)
        self._leaves.push(entry)
        if self._timed:
            due = self.changes_at(span, now)
            if due is None:
                self._timers.discard(span)
            elif type(due) is int and due > now:
                self._timers.push((due, span.id, span))
            else:
                msg = f"changes_at() of {span!r} is {due!r}: give whole ns after {now}, or None"
                raise ValueError(msg)
        return entry

    def _leave(self, span: Span) -> None:
        self._answer = None
        self._leaves.discard(span)
        if self._timed:
            self._timers.discard(span)

    def _lowest_of_sample(self, now: int) -> Span:
        """Score the `sample` lowest leaves again and return the lowest of them."""
        count = min(self.sample, len(self._leaves))
        lowest = [self._leaves.pop() for _ in range(count)]
        victim: Span = min(self._enter(span, now) for span in lowest)[-1]
        return victim
