"""ARC: recency and frequency, in a balance that the ghosts of both set."""

from __future__ import annotations

from typing import ClassVar

from kvcore import Request, Span
from kvcore.cache import LazyHeap
from kvcore_plugins.eviction.first_use import FirstUses
from kvcore_plugins.eviction.ghost import GhostTree
from kvcore_plugins.eviction.queues import QueuePolicy


class ARC(QueuePolicy):
    """Evict the least recent of the spans used once, or of the spans used again.

    Misses decide between the two. Queue `T1` has the spans used once, `T2` the spans used
    again, and `B1` and `B2` are their ghosts. A miss on keys in `B1` raises the target size of
    `T1`, a miss on keys in `B2` lowers it; the step is larger, the smaller that ghost is beside
    the other. The victim comes from `T1` if this is above its target. `T1` and `B1` together
    hold as many tokens as the pool at most, all four twice as many.

    Variant: as published, with a real-valued target and steps of max(1, ratio of the
    ghosts) per token.

    Fitted to spans: queues hold spans, sizes are tokens, and a step is taken for each
    token of the prompt that is remembered. A span is as recent as its last release. A
    victim is the least recent *evictable leaf* of its queue; one that loses its tail stays
    the victim until it has left or is pinned. A run enters `T2` if at least half of its
    tokens are remembered when it is first stored. O(log leaves) per event, besides the cost
    of the ghosts: O(runs on the path of a prompt).

    `span.data` is whether the span belongs to `T2`.

    Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST
    2003, figure 4.
    """

    name: ClassVar[str] = "arc"

    _target = 0.0
    _hit_b2: int | str | None = None

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool; create the queues and their ghosts."""
        super().attach(blocks, block_size)
        self._pool_tokens = blocks * block_size
        self._queues: tuple[LazyHeap[Span], LazyHeap[Span]] = LazyHeap(), LazyHeap()
        self._ghosts = GhostTree(self._pool_tokens), GhostTree(2 * self._pool_tokens)
        self._tokens = [0, 0]
        self._uses = FirstUses(follows=self.one_path)

    def enter(self, span: Span) -> None:
        """Insert `span` into its queue by the order of release."""
        self._queues[span.data].push((span.released_order, span.id, span))

    def queue_of(self, span: Span) -> LazyHeap[Span]:
        """Return the heap of T1 or T2."""
        return self._queues[span.data]

    def on_insert(self, span: Span, now: int) -> None:
        """Assign `span` to T1, or to T2 if it was evicted not long ago.

        What a request that was preempted stores again goes back to where it was.
        """
        once, again = (ghost.forget(span) for ghost in self._ghosts)
        returns = self._uses.count(span, span.start) > span.start
        span.data = 2 * (again if returns else once + again) >= span.tokens
        self._count(span, span.blocks)

    def on_extend(self, span: Span, blocks: int) -> None:
        """Count the new blocks."""
        for ghost in self._ghosts:
            ghost.forget(span)
        self._uses.count(span, span.end - blocks)
        self._count(span, blocks)

    def on_access(self, span: Span, now: int) -> None:
        """Assign `span` to T2."""
        self._count(span, -span.blocks)
        span.data = True
        self._uses.count(span, span.start)
        self._count(span, span.blocks)

    def on_end(self, request: Request, now: int) -> None:
        """Forget how far the request had come."""
        self._uses.end(request)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Move the blocks that left from their queue to its ghost."""
        self._count(span, -blocks)
        self._ghosts[span.data].add(span, blocks)

    def on_remove(self, span: Span, reason: str) -> None:
        """Move `span` from its queue to the ghost of that queue."""
        super().on_remove(span, reason)
        self.on_trim(span, span.blocks)

    def on_miss(self, request: Request, hit_blocks: int, now: int) -> None:
        """Move the target towards the queue whose ghost remembers the prompt."""
        once, again = (ghost.match(request) for ghost in self._ghosts)
        sizes = [ghost.tokens for ghost in self._ghosts]
        if once:
            step = max(1.0, sizes[1] / sizes[0])
            self._target = min(self._target + once * step, float(self._pool_tokens))
        if again:
            step = max(1.0, sizes[0] / sizes[1])
            self._target = max(self._target - again * step, 0.0)
        self._hit_b2 = request.id if again else None

    def victim(self, now: int) -> Span:
        """Return the least recent span of T1 if that is above its target, else of T2.

        If T1 is at its target, its span is returned only for a request with keys in B2.
        """
        if self._victim is None:
            tokens, target = self._tokens[0], self._target
            hits_b2 = self._hit_b2 is not None and self._hit_b2 == self.requester
            above = tokens > target or (hits_b2 and tokens == target)
            once, again = self._queues
            queue = once if above else again
            self._victim = (queue or once or again).first()
        return self._victim

    def _count(self, span: Span, blocks: int) -> None:
        """Add `blocks` blocks of `span` to its queue, and resize the ghosts to the rest."""
        self._tokens[span.data] += blocks * self.block_size
        once, again = self._ghosts
        once.resize(self._pool_tokens - self._tokens[0])
        again.resize(2 * self._pool_tokens - sum(self._tokens) - once.tokens)
