"""S3-FIFO: a small queue, a main queue, and a ghost queue."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import attrs
from attrs.validators import ge, gt, le, lt

from kvcore import Request, Span
from kvcore.cache import LazyHeap
from kvcore_plugins.bounds import bounded
from kvcore_plugins.eviction.first_use import FirstUses
from kvcore_plugins.eviction.ghost import GhostTree
from kvcore_plugins.eviction.queues import QueuePolicy, same_history

MAX_FREQUENCY = 3
"""Hits are counted in two bits."""


class Position(NamedTuple):
    """The queue of a span, its serial number there, and its hits since, at most 3."""

    in_main: bool
    order: int
    frequency: int


@attrs.define(slots=False, eq=False, repr=False, on_setattr=attrs.setters.NO_OP)
class S3FIFO(QueuePolicy):
    """Evict spans that are not hit while they are in a small queue; keep the others.

    A span enters the small queue S, or the main queue M if its keys are in the ghost queue G.
    Victims come from S while it has its share of the pool, otherwise from M, the oldest
    first. The oldest span of S moves to M if it was hit `promote` times; otherwise it is
    evicted, and its keys enter G. The oldest span of M is reinserted at the new end as often
    as it was hit, at most 3 times.

    Variant: that of the authors' simulator. The frequency of a span is reset to 0 when it
    moves to M, a move to M does not evict from M, and a search for a victim in S goes on there
    until S is empty. G is looked up when a span is stored, after the evictions for it.

    Fitted to spans: the unit of the queues is the span, and their sizes are tokens. A
    victim is the oldest *evictable leaf* of its queue: a span that is pinned or has children
    keeps its position and its frequency. A span that loses its tail stays the victim until
    it has left or is pinned. A span is in G if at least half of its tokens are when it is
    first stored. O(log leaves) per event, amortised: a span that is reinserted was hit before.

    `span.data` is the `Position` of the span.

    Options:
        small: the share of the pool for the small queue, above 0 and below 1.
        ghost: tokens in the ghost queue, as a share of the pool, 0 or more.
        promote: hits that move a span from the small queue to the main one, 1 to 3.

    Source: Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache
    eviction", SOSP 2023, algorithm 1.
    """

    name: ClassVar[str] = "s3fifo"

    small: float = bounded(0.1, "a share of the pool, above 0 and below 1", gt(0), lt(1))
    # Nobody has more than 1,000.
    ghost: float = bounded(0.9, "a share of the pool, 0 to 1,000", ge(0), le(1000))
    promote: int = bounded(
        2, f"1 to {MAX_FREQUENCY}: hits are counted so far", ge(1), le(MAX_FREQUENCY)
    )

    _small_tokens = 0
    _last_order = 0

    def attach(self, blocks: int, block_size: int) -> None:
        """Compute the size of the small queue; create the queues and the ghost."""
        super().attach(blocks, block_size)
        tokens = blocks * block_size
        self._small_target = self.small * tokens
        self._small: LazyHeap[Span] = LazyHeap()
        self._main: LazyHeap[Span] = LazyHeap()
        self._ghosts = GhostTree(int(self.ghost * tokens))
        self._uses = FirstUses(follows=self.one_path)

    def queue_of(self, span: Span) -> LazyHeap[Span]:
        """Return the heap of the main queue, or of the small one."""
        return self._main if span.data.in_main else self._small

    def on_insert(self, span: Span, now: int) -> None:
        """Append `span` to a queue: to the main one if its keys are in the ghost queue.

        Not if they were left there by its own request, which was preempted.
        """
        self._last_order += 1
        remembered = 2 * self._ghosts.forget(span) >= span.tokens
        in_main = self._uses.count(span, span.start) == span.start and remembered
        span.data = Position(in_main, self._last_order, 0)
        self._count(span, span.blocks)

    def on_extend(self, span: Span, blocks: int) -> None:
        """Count the new blocks."""
        self._ghosts.forget(span)
        self._uses.count(span, span.end - blocks)
        self._count(span, blocks)

    def on_access(self, span: Span, now: int) -> None:
        """Count a hit."""
        position = span.data
        span.data = position._replace(frequency=min(position.frequency + 1, MAX_FREQUENCY))
        self._uses.count(span, span.start)

    def on_end(self, request: Request, now: int) -> None:
        """Forget how far the request had come."""
        self._uses.end(request)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Add blocks that left the small queue to the ghost queue."""
        if not span.data.in_main:
            self._count(span, -blocks)
            self._ghosts.add(span, blocks)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span` from its queue; from the small one it enters the ghost queue."""
        super().on_remove(span, reason)
        self.on_trim(span, span.blocks)

    def victim(self, now: int) -> Span:
        """Return the oldest span with too few hits; spans before it move to the main queue."""
        queue = (
            self._main
            if self._small_tokens < self._small_target and self._main
            else self._small
        )
        while self._victim is None:
            queue = queue or self._main
            span = queue.first()
            frequency = span.data.frequency
            if queue is self._main and frequency:
                self._append_to_main(span, frequency - 1)
            elif queue is self._small and frequency >= self.promote:
                self._append_to_main(span, 0)
            else:
                self._victim = span
        return self._victim

    def _append_to_main(self, span: Span, frequency: int) -> None:
        """Move `span` to the new end of the main queue, with the spans of its history."""
        self.leave(span)
        self._last_order += 1
        for part in same_history(span):
            self._count(part, -part.blocks)
            part.data = Position(in_main=True, order=self._last_order, frequency=frequency)
        self.enter(span)

    def _count(self, span: Span, blocks: int) -> None:
        """Add `blocks` blocks to the size of the small queue if `span` is in it."""
        if not span.data.in_main:
            self._small_tokens += blocks * self.block_size
