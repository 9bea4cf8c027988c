"""The easy tier of eviction policies: a policy is one function, its score."""

from __future__ import annotations

from abc import abstractmethod
from heapq import heappop, heappush
from typing import Any, ClassVar, TypeAlias

import attrs

from kvcore.policy.eviction import EvictionPolicy
from kvcore.policy.span import Span

Entry: TypeAlias = tuple[Any, int, int, int, Span]
Timer: TypeAlias = tuple[int, int, Span]

SLACK = 4
"""How many entries a heap may hold for each one that counts, before it is made anew."""


@attrs.define(slots=False, eq=False)
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

    _heap: list[Entry] = attrs.field(init=False, factory=list, repr=False)
    _entries: dict[Span, Entry] = attrs.field(init=False, factory=dict, repr=False)
    _timers: list[Timer] = attrs.field(init=False, factory=list, repr=False)
    _due: dict[Span, int] = attrs.field(init=False, factory=dict, repr=False)
    _answer: Span | None = attrs.field(init=False, default=None, repr=False)
    _now: int = attrs.field(init=False, default=0, repr=False)

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

    def split(self, upper: Span, lower: Span) -> None:
        """Score the lower half anew: it is shorter now, and begins deeper."""
        del upper
        self.rescore(lower)

    def joined(self, upper: Span, lower: Span) -> None:
        """Score the lower half as the whole that it is again."""
        self.split(upper, lower)

    def pinned(self, span: Span) -> None:
        """Take `span` out of the order."""
        self._leave(span)

    def released(self, span: Span, now: int) -> None:
        """Enter `span` if it is a leaf; an inner span enters with `leaf`."""
        self._now = now
        if not span.children:
            self._enter(span, now)

    def leaf(self, span: Span) -> None:
        """Enter a span that has become a leaf."""
        self._enter(span, self._now)

    def trimmed(self, span: Span, blocks: int) -> None:
        """Score what is left of `span`."""
        del blocks
        self._enter(span, self._now)

    def removed(self, span: Span, reason: str) -> None:
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
        entry = (score, span.recency, -span.start, span.id, span)
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
