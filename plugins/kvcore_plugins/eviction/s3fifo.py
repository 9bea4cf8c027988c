"""S3-FIFO: a small queue that filters, a main one that keeps, and a ghost."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import attrs

from kvcore import InputError, Span
from kvcore.cache import GhostTree
from kvcore_plugins.eviction.queues import Leaves, QueuePolicy, heir, one_past

MOST_USES = 3
"""Uses are counted in two bits."""


class Mark(NamedTuple):
    """Which queue a span is in, its turn there, and how often it was hit since."""

    main: bool
    turn: int
    uses: int


@attrs.define(slots=False, eq=False)
class S3FIFO(QueuePolicy):
    """Evict what is not hit while it passes through a small queue; keep what is.

    A span enters the small queue, or the main one if it was evicted from the small one
    not long ago. Victims come from the small queue while that has its share, else from
    the main one, the oldest first. The oldest of the small queue moves to the main one if
    it was hit `promote` times, and otherwise leaves, and is remembered as a ghost. The
    oldest of the main queue goes to its new end as often as it was hit, at most 3 times.

    Variant: that of the authors' simulator. A span's count begins anew in the main queue,
    to move there makes no room there at once, and once a victim is looked for in the small
    queue it is sought there until that has no more. Ghosts are looked up when a span is
    stored, after room has been made for it.

    Fitted to spans: the unit of the queues is the span and their sizes are tokens. A
    victim is the oldest *evictable leaf* of its queue: what is pinned or has children
    keeps its turn and its count. A span that loses its tail stays the victim until it is
    gone or pinned. A run counts as remembered if at least half of its tokens are when it
    is first stored. O(log leaves) per event; a span that is put back was hit before.

    Options:
        small: the small queue's share of the pool, above 0 and below 1.
        ghost: how much is remembered, as a share of the pool, 0 or more.
        promote: hits that take a span from the small queue to the main one, 1 to 3.

    Source: Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache
    eviction", SOSP 2023, algorithm 1.
    """

    name: ClassVar[str] = "s3fifo"

    small: float = attrs.field(default=0.1)
    ghost: float = attrs.field(default=0.9)
    promote: int = attrs.field(default=2)

    _small: Leaves = attrs.field(init=False, factory=Leaves, repr=False)
    _main: Leaves = attrs.field(init=False, factory=Leaves, repr=False)
    _held: int = attrs.field(init=False, default=0, repr=False)
    _turns: int = attrs.field(init=False, default=0, repr=False)
    _answer: Span | None = attrs.field(init=False, default=None, repr=False)

    @small.validator
    def _is_inner_share(self, _: object, value: float) -> None:
        if not 0 < value < 1:
            msg = f"s3fifo: small={value} must be a share of the pool, above 0 and below 1"
            raise InputError(msg)

    @ghost.validator
    def _is_finite(self, _: object, value: float) -> None:
        if not 0 <= value < float("inf"):
            msg = f"s3fifo: ghost={value} must be a share of the pool, 0 or more (1: all of it)"
            raise InputError(msg)

    @promote.validator
    def _is_counted(self, _: object, value: int) -> None:
        if not 1 <= value <= MOST_USES:
            msg = f"s3fifo: promote={value} must be 1 to {MOST_USES}: hits are counted so far"
            raise InputError(msg)

    def attach(self, blocks: int, block_size: int) -> None:
        """Work out the small queue's share, and make the ghost."""
        super().attach(blocks, block_size)
        tokens = blocks * block_size
        self._share = self.small * tokens
        self._ghosts = GhostTree(int(self.ghost * tokens))

    def enter(self, span: Span) -> None:
        """Put `span` into its queue, where its turn says."""
        (self._main if span.data.main else self._small).enter(span, span.data.turn)

    def leave(self, span: Span) -> None:
        """Take `span` out of the order of its queue."""
        (self._main if span.data.main else self._small).leave(span)
        if span is self._answer:
            self._answer = None

    def on_insert(self, span: Span, now: int) -> None:
        """Queue `span`: in the main queue if it was evicted not long ago."""
        del now
        self._turns += 1
        main = 2 * self._ghosts.forget(span) >= span.tokens
        span.data = Mark(main, self._turns, 0)
        self._count(span, span.blocks)

    def on_extend(self, span: Span, blocks: int) -> None:
        """Count the new blocks."""
        self._ghosts.forget(span)
        self._count(span, blocks)

    def on_access(self, span: Span, now: int) -> None:
        """Count a hit."""
        del now
        mark = span.data
        span.data = mark._replace(uses=min(mark.uses + 1, MOST_USES))

    def on_trim(self, span: Span, blocks: int) -> None:
        """Remember what left the small queue."""
        if not span.data.main:
            self._count(span, -blocks)
            self._ghosts.add(span, blocks)

    def on_remove(self, span: Span, reason: str) -> None:
        """Forget `span`, but for its ghost."""
        del reason
        following = heir(span) if span is self._answer else self._answer
        self.leave(span)
        self._answer = following
        self.on_trim(span, span.blocks)

    def victim(self, now: int) -> Span:
        """Return the oldest that nothing speaks for; move those on the way that were hit."""
        del now
        queue = self._main if self._held < self._share and self._main else self._small
        while self._answer is None:
            queue = queue or self._main
            span, _ = queue.first()
            uses = span.data.uses
            if queue is self._main and uses:
                self._move(span, uses - 1)
            elif queue is self._small and uses >= self.promote:
                self._move(span, 0)
            else:
                self._answer = span
        return self._answer

    def state(self) -> Any:
        """Return both queues, the ghosts, and what the next decision depends on besides."""
        queues = self._small.state(), self._main.state()
        return queues, self._ghosts.state(), self._held, self._turns, self._answer

    def restore(self, state: Any) -> None:
        """Take all of that from `state`."""
        (small, main), ghosts, self._held, self._turns, self._answer = state
        self._small.restore(small)
        self._main.restore(main)
        self._ghosts.restore(ghosts)

    def _move(self, span: Span, uses: int) -> None:
        """Put `span` at the new end of the main queue, with all that shares its past."""
        self.leave(span)
        self._turns += 1
        for part in one_past(span):
            self._count(part, -part.blocks)
            part.data = Mark(main=True, turn=self._turns, uses=uses)
        self.enter(span)

    def _count(self, span: Span, blocks: int) -> None:
        """Count `blocks` more blocks of `span`, if it is in the small queue."""
        if not span.data.main:
            self._held += blocks * self.block_size
