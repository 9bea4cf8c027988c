"""The eviction contract: which unpinned leaf leaves when blocks are missing."""

from __future__ import annotations

from abc import abstractmethod
from heapq import heappop, heappush
from typing import Any, ClassVar, Self, TypeAlias

from kvcore.cache.span import Span
from kvcore.plugins.base import Plugin
from kvcore.request import Request


class EvictionPolicy(Plugin):
    """Keeps an order of the evictable spans; the core asks it for one victim at a time.

    Every method but `victim` does nothing here: override what the policy needs to know.
    What is not overridden is never called, so it costs nothing. `now` is in nanoseconds
    and never decreases. Spans are told apart by identity.

    One instance serves one cache.

    Attributes:
        expires_spans: whether the policy ever sets `span.expires`.
        blocks, block_size: the pool it serves, set by `attach`.
        requester: id of the request for whom victims are being asked.
        lookahead: how many requests to come untimed replay tells it of (None: all of them),
            since nothing waits there; see `on_queued`. Set it before the cache is made.
    """

    kind: ClassVar[str] = "eviction"
    expires_spans: ClassVar[bool] = False

    blocks: int = 0
    block_size: int = 0
    requester: int | str | None = None
    lookahead: int | None = 0

    def attach(self, blocks: int, block_size: int) -> None:
        """Learn the pool's size in blocks and a block's in tokens. Called once."""
        self.blocks = blocks
        self.block_size = block_size

    def on_insert(self, span: Span, now: int) -> None:
        """Learn that `span` was committed as a new span. It is pinned."""

    def on_access(self, span: Span, now: int) -> None:
        """Learn that another request's admission hit `span`. It is pinned."""

    def on_extend(self, span: Span, blocks: int) -> None:
        """Learn that its creator appended `blocks` blocks to `span`. It is pinned."""

    def on_split(self, upper: Span, lower: Span) -> None:
        """Learn that `lower` lost its head to the new span `upper`, its parent now.

        `lower` keeps its place and its `data`. `upper` starts pinned, with copied
        statistics and no data: copy `lower.data` here if the policy uses it.
        """

    def joined(self, upper: Span, lower: Span) -> None:
        """Learn that a split was taken back (a later step of the same call failed)."""

    def on_pin(self, span: Span) -> None:
        """Learn that the pins of `span` rose from 0: it may not be a victim now."""

    def on_release(self, span: Span, now: int) -> None:
        """Learn that the pins of `span` fell to 0.

        Called along a path from leaf to root, so for inner spans as well.
        """

    def unpinned(self, span: Span, now: int) -> None:
        """Learn that a pin was taken back (a later step of the same call failed).

        The pins of `span` are 0 again, its recency is what it was, and it belongs where
        it stood before `on_pin`. Unless overridden this is `on_release`.
        """
        self.on_release(span, now)

    def on_leaf(self, span: Span) -> None:
        """Learn that an unpinned span lost its last child."""

    def on_trim(self, span: Span, blocks: int) -> None:
        """Learn that the last `blocks` blocks of `span` were evicted; the rest stays."""

    def on_remove(self, span: Span, reason: str) -> None:
        """Learn that `span` leaves the cache (`capacity` or `expired`).

        `span.keys()` and `span.parent` can still be read.
        """

    def on_miss(self, request: Request, hit_blocks: int, now: int) -> None:
        """Learn that a first admission hit only `hit_blocks` blocks of its prompt."""

    def on_queued(self, request: Request, now: int, *, front: bool = False) -> None:
        """Learn that `request` waits to be served: it arrived, or was preempted.

        It goes behind those that wait already, or with `front` before them: the order in
        which they queued up, not the scheduler's.
        """

    def on_dequeued(self, request: Request, now: int) -> None:
        """Learn that `request` waits no longer: it has a seat, or is about to wait anew."""

    @abstractmethod
    def victim(self, now: int) -> Span:
        """Return the unpinned leaf to evict next, without forgetting it.

        The core evicts from its tail as much as it misses, and says so by `on_trim` or
        `on_remove`. Asked only while an unpinned leaf exists.
        """

    def evictable_blocks(self, span: Span) -> int:
        """Return how many blocks, 1 or more, at the end of a victim may leave at once.

        Before more of it goes, `victim` is asked again: for policies to which not all
        blocks of a span are worth the same. Unless overridden, all of them.
        """
        return span.end - span.start

    def state(self) -> Any:
        """Return a value that two policies which decide alike compare equal by.

        It may refer to spans. `restore` brings it back while those spans are cached.
        """
        return None

    def restore(self, state: Any) -> None:
        """Go back to what `state()` returned."""


Entry: TypeAlias = tuple[Any, int, int, int, Span]


Timer: TypeAlias = tuple[int, int, Span]


SLACK = 4
"""How many entries a heap may hold for each one that counts, before it is made anew."""


class ScoreEviction(EvictionPolicy):
    """Evicts the unpinned leaf with the lowest score.

    Ties go to the lower recency, then the deeper span, then the lower id. Scores are
    kept in a heap and computed when a span becomes evictable or is trimmed, which is
    right for scores that change only on access: O(log leaves) per event.

    A score that changes by itself says so in one of two ways. `changes_at` gives the
    moment of the next step of a score that moves in steps; it is then computed again
    exactly then. `drifts = True` is for scores that move all the time relative to one
    another: the `sample` lowest are scored anew whenever a victim is asked for, a bound
    on the work and an approximation.
    """

    drifts: ClassVar[bool] = False
    sample: ClassVar[int] = 32

    _heap: list[Entry]
    _entries: dict[Span, Entry]
    _timers: list[Timer]
    _due: dict[Span, int]
    _answer: Span | None = None
    _now: int = 0

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Create an instance with an empty order, which no constructor has to make."""
        policy = super().__new__(cls, *args, **kwargs)
        policy._heap, policy._timers = [], []
        policy._entries, policy._due = {}, {}
        return policy

    @abstractmethod
    def score(self, span: Span, now: int) -> Any:
        """Return what orders the victims, any comparable value: the lowest goes first."""

    def changes_at(self, span: Span, now: int) -> int | None:
        """Return when (ns) the score of `span` will change by itself; None: it won't."""
        del span, now
        return None

    def rescore(self, span: Span) -> None:
        """Score `span` anew, if it is evictable, because what its score is made of changed.

        To be called by the policy itself. O(log leaves).
        """
        if span in self._entries:
            self._enter(span, self._now)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Score the lower half anew: it is shorter now, and begins deeper."""
        del upper
        self.rescore(lower)

    def joined(self, upper: Span, lower: Span) -> None:
        """Score the lower half as the whole that it is again."""
        self.on_split(upper, lower)

    def on_pin(self, span: Span) -> None:
        """Take `span` out of the order."""
        self._leave(span)

    def on_release(self, span: Span, now: int) -> None:
        """Enter `span` if it is a leaf; an inner span enters with `on_leaf`."""
        self._now = now
        if not span.children:
            self._enter(span, now)

    def on_leaf(self, span: Span) -> None:
        """Enter a span that has become a leaf."""
        self._enter(span, self._now)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Score what is left of `span`."""
        del blocks
        self._enter(span, self._now)

    def on_remove(self, span: Span, reason: str) -> None:
        """Forget `span`."""
        del reason
        self._leave(span)

    def victim(self, now: int) -> Span:
        """Return the evictable span with the lowest score."""
        if self.drifts and self._answer is not None and now == self._now:
            return self._answer
        self._now = now
        while self._timers and self._timers[0][0] <= now:
            due, _, span = heappop(self._timers)
            if self._due.get(span) == due:
                self._enter(span, now)
        if self.drifts:
            self._answer = self._rescored(now)
            return self._answer
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[4]) is entry:
                return entry[4]
            heappop(heap)
        msg = "no span is evictable"
        raise LookupError(msg)

    def state(self) -> Any:
        """Return the evictable spans in order, with all that later scores depend on."""
        timers = sorted((due, span.id, span) for span, due in self._due.items())
        return sorted(self._entries.values()), timers, self._now, self._answer

    def restore(self, state: Any) -> None:
        """Rebuild the heaps from `state`."""
        entries, timers, self._now, self._answer = state
        self._heap, self._timers = list(entries), list(timers)
        self._entries = {entry[4]: entry for entry in entries}
        self._due = {span: due for due, _, span in timers}

    def _enter(self, span: Span, now: int) -> None:
        self._answer = None
        score = self.score(span, now)
        if score != score:  # noqa: PLR0124  (not a number: it would be below nothing)
            msg = f"score() of {span!r} is {score!r}, which has no place in an order"
            raise ValueError(msg)
        entry = (score, span.released_order, -span.start, span.id, span)
        self._entries[span] = entry
        heap = self._heap
        heappush(heap, entry)
        if len(heap) > SLACK * (len(self._entries) + SLACK):
            self._heap = sorted(self._entries.values())
        due = self.changes_at(span, now)
        if due is None:
            self._due.pop(span, None)
        elif self._due.get(span) != due:
            self._due[span] = due
            heappush(self._timers, (due, span.id, span))
            if len(self._timers) > SLACK * (len(self._due) + SLACK):
                self._timers = sorted((due, span.id, span) for span, due in self._due.items())

    def _leave(self, span: Span) -> None:
        self._answer = None
        self._entries.pop(span, None)
        self._due.pop(span, None)

    def _rescored(self, now: int) -> Span:
        lowest: list[Span] = []
        while self._heap and len(lowest) < self.sample:
            entry = heappop(self._heap)
            if self._entries.get(entry[4]) is entry:
                lowest.append(entry[4])
        for span in lowest:
            self._enter(span, now)
        return min(self._entries[span] for span in lowest)[4]
