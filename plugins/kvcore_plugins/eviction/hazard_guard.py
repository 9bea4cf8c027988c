"""The guard of `hazard`: LRU, until two shadows of the pool show that it hits less."""

from __future__ import annotations

from bisect import bisect_left
from math import sqrt
from typing import ClassVar

from kvcore import KVCache, Request, Span
from kvcore_plugins.eviction.hazard_model import LeafOrder, Model, Wait
from kvcore_plugins.eviction.lru import LRU

_WINDOW = 2000
"""Requests after which a difference of hits counts for 1/e."""

_START, _LIMIT = 1.5, 2.0
"""Spreads that the sum of differences must exceed to end LRU; and its maximum."""

_LEAST = 20
"""Requests that must have differed by then: the spread of fewer is itself uncertain."""

_SMALLEST = 750
"""Blocks of a pool below four times which the shadows see every conversation."""


class Shadow(LeafOrder):
    """Evicts from a shadow of the pool by the model and the classes of the policy itself."""

    name: ClassVar[str] = "hazard-shadow"

    def __init__(self, model: Model) -> None:
        """Use the indices of `model`."""
        self.follow(model)
        self.path: list[tuple[int, Wait]] = []
        self._ends: list[int] = []

    def use(self, path: list[tuple[int, Wait]], ratio: int) -> None:
        """Give the next spans that are released the classes of the spans of `path`.

        These are (end in blocks, wait), in the order of their release; `ratio` blocks are one
        block of the shadow.
        """
        self.path = path[::-1]
        self._ends = [-(-end // ratio) for end, _ in self.path]

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let a request go past the lower half."""
        upper.data = lower.data
        if not lower.ref_count:
            lower.data.entry = 0
            wait = lower.data = lower.data.next(-1, lower.data.since)
            wait.kind = self.model.passed_by
            if not lower.children:
                self.enter(lower, wait)

    def on_release(self, span: Span, now: int) -> None:
        """Begin a wait of the class that the span of the same blocks has in the policy."""
        self._now = now
        index = bisect_left(self._ends, span.end)
        model = self.path[min(index, len(self.path) - 1)][1]
        wait = span.data = model.next(-1, now)
        wait.kind = model.kind
        if not span.children:
            wait.last = not span.hit_count
            self.enter(span, wait)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Move `span` when its last key has left."""
        if span.data.last:
            span.data.last = False
            self.enter(span, span.data)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span` from the order."""
        self.leave(span)


class Guard:
    """Decides between LRU and the order by index, which it compares in two shadows of the pool.

    The shadows are caches that count blocks of one key, and hold none. When a request has
    ended both replay the one before: one evicts by LRU, one by the model. The differences of
    their hits, faded over requests, make a sum with a spread, the root of the sum of their
    squares. Above 1.5 spreads LRU ends, and below 0 it begins again.

    Shadows of large pools replay a share of the conversations, and are smaller by this share:
    1/2 from 3,000 blocks, 1/4 from 12,000, and so on.

    Attributes:
        safe: whether to evict as LRU.
        path: the spans that were released since the latest request ended, deepest first: the
            end in blocks and the wait.
        shadows: with LRU and with the model; None before the first request.
    """

    def __init__(self, blocks: int, block_size: int, model: Model) -> None:
        """Begin as LRU in a pool of `blocks` blocks of `block_size` tokens."""
        self._tokens, self._block_size, self._model = blocks * block_size, block_size, model
        self.safe = True
        self.path: list[tuple[int, Wait]] = []
        self.shadows: tuple[KVCache, KVCache] | None = None
        self._share = 1
        self._sum = self._squares = self._differences = 0.0
        self._request: Request | None = None

    def end(self, request: Request, now: int) -> bool:
        """Replay the request before `request`, which has ended; return whether to be safe."""
        before, path = self._request, self.path
        self._request, self.path = request, []
        if before is None or not path or not before.keys:
            return self.safe
        size = before.key_tokens
        if self.shadows is None:
            blocks = max(1, self._tokens // size)
            self._share = 1 << max(0, (blocks // _SMALLEST).bit_length() - 1) // 2
            self._shadow = Shadow(self._model)
            lru, own = (
                KVCache(max(1, blocks // self._share), size, eviction=policy, accounting="keys")
                for policy in (LRU(), self._shadow)
            )
            self.shadows = lru, own
        lru, own = self.shadows
        if path[0][1].conversation % self._share or size != lru.geometry.block_size:
            return self.safe
        self._shadow.use(path, max(1, size // self._block_size))
        gain = _hits(own, before, now) - _hits(lru, before, now)
        keep = 1 - self._share / _WINDOW
        self._sum = self._sum * keep + gain
        self._squares = self._squares * keep * keep + gain * gain
        spread = sqrt(self._squares)
        # Without a limit the gains of an hour would have to be lost before LRU begins again.
        self._sum = max(-_LIMIT * spread, min(self._sum, _LIMIT * spread))
        self._differences = self._differences * keep + (gain != 0)
        if self._sum > _START * spread and self._differences > _LEAST:
            self.safe = False
        elif self._sum < 0:
            self.safe = True
        return self.safe


def _hits(shadow: KVCache, request: Request, now: int) -> int:
    """Return the blocks of `request` that hit in a shadow, which serves it at once."""
    size, before = shadow.geometry.block_size, shadow.stats.hit_blocks
    tokens, room = len(request.keys) * size, shadow.pool.blocks * size
    first = None if tokens <= room else room - shadow.probe(request, now) * size
    seq = shadow.open(request, first, now)
    shadow.commit(seq, seq.tokens - seq.computed, now)
    shadow.close(seq, now)
    return shadow.stats.hit_blocks - before
