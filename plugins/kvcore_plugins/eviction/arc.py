"""ARC: recency and frequency, in a balance that the ghosts of both set."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from kvcore import Request, Span
from kvcore.cache import GhostTree
from kvcore_plugins.eviction.queues import Leaves, QueuePolicy, heir


@attrs.define(slots=False, eq=False)
class ARC(QueuePolicy):
    """Evict the least recent of what was used once, or of what was used again.

    Which of the two learns from misses. `T1` is what was used once, `T2` what was used
    again, `B1` and `B2` are the ghosts of both. A miss on what `B1` remembers raises the
    target size of `T1`, one on what `B2` remembers lowers it, the more so the smaller
    that ghost is beside the other. The victim comes from `T1` if that is above its
    target. `T1` and `B1` together hold a pool's worth at most, all four twice that.

    Variant: as published, with a real-valued target and steps of max(1, ratio of the
    ghosts) per token.

    Fitted to spans: queues hold spans, sizes are tokens, and a step is taken for each
    token of the prompt that is remembered. A span is as recent as its last release. A
    victim is the least recent *evictable leaf* of its queue; one that loses its tail stays
    the victim until it is gone or pinned. A run enters `T2` if at least half of its
    tokens are remembered when it is first stored. O(log leaves) per event, besides what
    the ghosts cost: O(runs on a prompt's path).

    Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST
    2003, figure 4.
    """

    name: ClassVar[str] = "arc"

    _once: Leaves = attrs.field(init=False, factory=Leaves, repr=False)
    _again: Leaves = attrs.field(init=False, factory=Leaves, repr=False)
    _held: list[int] = attrs.field(init=False, factory=lambda: [0, 0], repr=False)
    _target: float = attrs.field(init=False, default=0.0, repr=False)
    _returning: int | str | None = attrs.field(init=False, default=None, repr=False)
    _answer: Span | None = attrs.field(init=False, default=None, repr=False)

    def attach(self, blocks: int, block_size: int) -> None:
        """Learn the pool's size, and make the ghosts."""
        super().attach(blocks, block_size)
        self._tokens = blocks * block_size
        self._ghosts = GhostTree(self._tokens), GhostTree(2 * self._tokens)

    def enter(self, span: Span) -> None:
        """Put `span` into its queue, where its recency says."""
        (self._again if span.data else self._once).enter(span, span.released_order)

    def leave(self, span: Span) -> None:
        """Take `span` out of the order of its queue."""
        (self._again if span.data else self._once).leave(span)
        if span is self._answer:
            self._answer = None

    def on_insert(self, span: Span, now: int) -> None:
        """Put `span` into T1, or into T2 if it was evicted not long ago."""
        del now
        span.data = 2 * self._forget(span) >= span.tokens
        self._count(span, span.blocks)

    def on_extend(self, span: Span, blocks: int) -> None:
        """Count the new blocks."""
        self._forget(span)
        self._count(span, blocks)

    def on_access(self, span: Span, now: int) -> None:
        """Move `span` to T2."""
        del now
        self._count(span, -span.blocks)
        span.data = True
        self._count(span, span.blocks)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Remember what left."""
        self._count(span, -blocks)
        self._ghosts[span.data].add(span, blocks)

    def on_remove(self, span: Span, reason: str) -> None:
        """Forget `span`, but for its ghost."""
        del reason
        following = heir(span) if span is self._answer else self._answer
        self.leave(span)
        self._answer = following
        self.on_trim(span, span.blocks)

    def on_miss(self, request: Request, hit_blocks: int, now: int) -> None:
        """Move the target towards the queue whose ghost remembers the prompt."""
        del hit_blocks, now
        once, again = (ghost.match(request) for ghost in self._ghosts)
        sizes = [ghost.tokens for ghost in self._ghosts]
        if once:
            step = max(1.0, sizes[1] / sizes[0])
            self._target = min(self._target + once * step, float(self._tokens))
        if again:
            step = max(1.0, sizes[0] / sizes[1])
            self._target = max(self._target - again * step, 0.0)
        self._returning = request.id if again else None

    def victim(self, now: int) -> Span:
        """Return the least recent of T1 if that is above its target, else of T2.

        At its target it is T2 that gives, but to a request that B2 remembers.
        """
        del now
        if self._answer is None:
            held, target = self._held[0], self._target
            returns = self._returning is not None and self._returning == self.requester
            queue = self._once if held > target or (returns and held == target) else self._again
            self._answer, _ = (queue or self._once or self._again).first()
        return self._answer

    def state(self) -> Any:
        """Return queues, ghosts, sizes, target, and who returns from B2."""
        queues = self._once.state(), self._again.state()
        ghosts = [ghost.state() for ghost in self._ghosts]
        rest = tuple(self._held), self._target, self._returning, self._answer
        return queues, ghosts, rest

    def restore(self, state: Any) -> None:
        """Take all of that from `state`."""
        queues, ghosts, (held, self._target, self._returning, self._answer) = state
        self._held = list(held)
        for queue, leaves in zip((self._once, self._again), queues, strict=True):
            queue.restore(leaves)
        for ghost, remembered in zip(self._ghosts, ghosts, strict=True):
            ghost.restore(remembered)

    def _forget(self, span: Span) -> int:
        return sum(ghost.forget(span) for ghost in self._ghosts)

    def _count(self, span: Span, blocks: int) -> None:
        """Count `blocks` more blocks of `span`, and give the ghosts the room that is left."""
        self._held[span.data] += blocks * self.block_size
        once, again = self._ghosts
        once.resize(self._tokens - self._held[0])
        again.resize(2 * self._tokens - sum(self._held) - once.tokens)
