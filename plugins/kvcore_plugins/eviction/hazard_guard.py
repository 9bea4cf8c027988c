"""The guard of `hazard`: LRU, until it hits less of what is asked for than the other order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf, sqrt

import attrs

from kvcore_plugins.eviction.survival import WaitClass

_WINDOW = 1000
"""Requests that return after which a difference of hits counts for 1/e."""

_SPREADS, _UNSURE, _LIMIT = 2.0, 2.6, 1.25
"""Spreads that the sum of differences must exceed to end LRU; by how many more after one
difference, and after n of them by a root of n less, since the spread of few is itself
uncertain; and the maximum of the sum, in these."""

_CLIP, _KNOWN = 1.5, 4
"""Root mean squares of the differences that one may count for, once so many are known."""

_SLACK = 16
"""A shadow shrinks by this share of the pool below its size, from as much above it."""


@attrs.define(eq=False)
class Wait:
    """The time since a use of a span, which ends with the next one; its ghost shares it.

    Attributes:
        above: the wait of the span above; None at the root.
        turn: the number of requests of the conversation when the span was computed.
        pause: the time between the last two uses, in octaves; -1 before there are two.
        counts: whether it is counted: of the spans of a request, the first is.
        since: the time in ns at which the use ended.
        kind: its class; None while the span is in use.
        end: the end in blocks of what waits, without a last key that is not used again yet.
    """

    above: Wait | None = None
    turn: int = 0
    pause: int = -1
    counts: bool = False
    since: int = 0
    kind: WaitClass | None = None
    end: int = 0


class Shadow:
    """How many blocks of each wait an order would keep in the pool. It holds no block.

    Args:
        blocks: the size of the pool.
        order: returns waits in the order in which they leave at a time in ns.
    """

    def __init__(
        self, blocks: int, order: Callable[[Iterable[Wait], int], Iterable[Wait]]
    ) -> None:
        """Keep nothing."""
        slack = blocks // _SLACK
        self._high, self._low, self._order = blocks + slack, blocks - slack, order
        self._kept: dict[Wait, int] = {}
        self._total = 0
        self._reach: float = inf

    def add(self, wait: Wait, blocks: int, now: int) -> None:
        """Keep the `blocks` blocks of a wait that begins; evict when they are too many."""
        self._total += blocks - self._kept.pop(wait, 0)
        self._kept[wait] = blocks
        if self._total > self._high:
            for first in [*self._order(self._kept, now)]:
                excess = self._total - self._low
                if excess < self._kept[first]:
                    self._kept[first] -= excess
                    self._total = self._low
                    return
                self._total -= self._kept.pop(first)

    def split(self, upper: Wait, lower: Wait, blocks: int) -> None:
        """Keep the first `blocks` blocks of `lower` for `upper`."""
        kept = self._kept.get(lower, 0)
        if kept:
            self._kept[upper] = min(kept, blocks)
            self._kept[lower] = kept - self._kept[upper]

    def end(self, wait: Wait, start: int, end: int) -> None:
        """Remove a wait that ends, as a request asks for its blocks from `start` to `end`."""
        kept = self._kept.pop(wait, 0)
        self._total -= kept
        if start + kept < end:
            self._reach = min(self._reach, start + kept)

    def hits(self, blocks: int) -> float:
        """Return how many of the first `blocks` blocks the request hits, whose waits ended."""
        hits, self._reach = min(self._reach, blocks), inf
        return hits


class Guard:
    """Decides between LRU and the order of an index, of both of which it keeps a shadow.

    The differences of the hits of requests in the shadows, faded, make a sum with a spread, the
    root of the sum of their squares. Above two spreads, and more while differences are few, LRU
    ends, and below 0 it begins again. Since this is asked after every request, a sum that only
    chance moves would exceed fewer spreads every now and then. A few long prompts, of which one
    order has happened to keep more, prove little: each counts for about as much as the others.

    Attributes:
        is_lru: whether to evict as LRU.
    """

    def __init__(self, blocks: int, index: Callable[[Wait, int], float]) -> None:
        """Begin as LRU in a pool of `blocks` blocks; the lowest `index` leaves first."""
        self._index, self.is_lru = index, True
        self._own = Shadow(blocks, self._by_index)
        self._lru = Shadow(blocks, lambda waits, _: waits)
        self._request: int | str | None = None
        self._end = 0
        self._path: set[Wait] = set()
        self._above: Wait | None = None
        self._sum = self._squares = self._differences = 0.0

    def add(self, wait: Wait, blocks: int, now: int) -> None:
        """Begin a wait, after those of what continues the prompt."""
        if wait is not self._above:
            self._path.clear()
        self._path.add(wait)
        self._above = wait.above
        self._own.add(wait, blocks, now)
        self._lru.add(wait, blocks, now)

    def split(self, upper: Wait, lower: Wait, blocks: int) -> None:
        """Cut the first `blocks` blocks of `lower` off, as `upper`."""
        self._own.split(upper, lower, blocks)
        self._lru.split(upper, lower, blocks)

    def end(self, wait: Wait, request: int | str, start: int, end: int) -> None:
        """End a wait, since `request` asks for its blocks from `start` to `end`."""
        if request != self._request:
            self._decide()
            self._request, self._end = request, 0
        self._end = max(self._end, end)
        self._own.end(wait, start, end)
        self._lru.end(wait, start, end)

    def _decide(self) -> None:
        """Compare the hits of the request before, and decide."""
        gain = self._own.hits(self._end) - self._lru.hits(self._end)
        keep = 1 - 1 / _WINDOW
        if self._differences >= _KNOWN:
            clip = _CLIP * sqrt(self._squares / self._differences)
            gain = max(-clip, min(gain, clip))
        self._squares = self._squares * keep * keep + gain * gain
        self._differences = self._differences * keep + (gain != 0)
        unsure = _UNSURE / sqrt(max(self._differences, 1.0))
        bound = (_SPREADS + unsure) * sqrt(self._squares)
        # Without a limit the gains of an hour would have to be lost before LRU begins again.
        limit = _LIMIT * bound
        self._sum = max(-limit, min(self._sum * keep + gain, limit))
        if self._sum > bound:
            self.is_lru = False
        elif self._sum < 0:
            self.is_lru = True

    def _by_index(self, waits: Iterable[Wait], now: int) -> Iterable[Wait]:
        """Return waits by their index; what continues a prompt leaves before the prompt."""
        # A running request needs all of its prompt at once.
        ranks: dict[Wait | None, float] = dict.fromkeys(self._path, inf)
        rank_of, index_of = ranks.get, self._index
        for wait in waits:
            rank = rank_of(wait, 0.0)
            if rank < inf:
                index = index_of(wait, now)
                if index > rank:
                    rank = index
                ranks[wait] = rank
            if rank_of(wait.above, 0.0) < rank:
                ranks[wait.above] = rank
        return sorted(waits, key=ranks.__getitem__)
