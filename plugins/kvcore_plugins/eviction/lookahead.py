"""Lookahead: eviction by the prompts of the waiting requests."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from math import inf
from typing import Any, ClassVar, Literal

from kvcore import InputError, Request, ScoreEviction, Span
from kvcore.request import Key


class Lookahead(ScoreEviction):
    """Evict blocks that no waiting request needs, by LRU; then those that are needed last.

    A block is needed by the first request, in the order of the queue, whose prompt contains
    it. Blocks of one span may be needed at different times: of a victim, only the end that is
    needed last, or not at all, is evicted at once. In a server the requests are those in its
    waiting queue, whatever the option; in untimed replay they are the next ones of the
    workload.

    With all requests known, it hits as much as the optimum that must admit every request.
    Without any, it is LRU. O(log leaves) per event; O(keys · log waiting) for a request that
    enters or leaves the queue.

    Options:
        requests: number of following requests that untimed replay announces; `all` reads
            the whole workload into memory.

    Source: Belady, IBM Systems Journal 1966, with a window; per block of a prefix tree.
    """

    name: ClassVar[str] = "lookahead"

    _first_turn = 0
    _last_turn = 0

    def __init__(self, requests: int | Literal["all"] = 64) -> None:
        """Store the option."""
        if requests != "all" and (isinstance(requests, str) or requests < 0):
            msg = f"lookahead: requests={requests} must be 0 or more, or all"
            raise InputError(msg)
        self.requests = requests
        self.lookahead = None if requests == "all" else requests

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool and create the empty queue."""
        super().attach(blocks, block_size)
        self._waiting: dict[int | str, tuple[int, Sequence[Key]]] = {}
        self._turns: dict[Key, list[int]] = {}
        self._leaf_of: dict[Key, Span] = {}

    def on_queued(self, request: Request, now: int, *, front: bool = False) -> None:
        """Number `request`, and add the number to each key of its prompt."""
        turn = self._first_turn - 1 if front else self._last_turn + 1
        self._first_turn = min(self._first_turn, turn)
        self._last_turn = max(self._last_turn, turn)
        self._waiting[request.id] = turn, request.keys
        for key in request.keys:
            turns = self._turns.setdefault(key, [])
            insort(turns, turn)
            if turns[0] == turn:
                self._rescore_leaf(key)

    def on_dequeued(self, request: Request, now: int) -> None:
        """Remove the turn of `request` from each key of its prompt."""
        turn, keys = self._waiting.pop(request.id)
        for key in keys:
            turns = self._turns[key]
            index = bisect_left(turns, turn)
            del turns[index]
            if not turns:
                del self._turns[key]
            if not index:
                self._rescore_leaf(key)

    def score(self, span: Span, now: int) -> tuple[bool, float]:
        """Return whether its tail block is needed, and when, the furthest lowest."""
        turn = self._next_turn(_last_key(span))
        return (False, 0) if turn == inf else (True, -turn)

    def evictable_blocks(self, span: Span) -> int:
        """Return the number of blocks at the end of `span` needed as late as its last one."""
        ratio, keys = span.geometry.ratio, span.path_keys
        last = (span.end - 1) // ratio
        # A request that needs a block needs those before it: turns only rise along a path.
        indices = range(span.start // ratio, last)
        index = bisect_left(
            indices, self._next_turn(keys[last]), key=lambda index: self._next_turn(keys[index])
        )
        return span.end - max(span.start, (indices.start + index) * ratio)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Insert the rest of `span` by its new last key."""
        self._remove_leaf(span, span.end + blocks)
        super().on_trim(span, blocks)

    def _enter(self, span: Span, now: int) -> tuple[Any, ...]:
        """Insert a leaf into the order, to be found by its last key."""
        self._leaf_of[_last_key(span)] = span
        return super()._enter(span, now)

    def _leave(self, span: Span) -> None:
        """Remove `span` from the order."""
        self._remove_leaf(span, span.end)
        super()._leave(span)

    def _next_turn(self, key: Key) -> float:
        """Return the turn of the first request that needs `key`; inf if none does."""
        turns = self._turns.get(key)
        return inf if turns is None else turns[0]

    def _rescore_leaf(self, key: Key) -> None:
        leaf = self._leaf_of.get(key)
        if leaf is not None:
            self.rescore(leaf)

    def _remove_leaf(self, span: Span, end: int) -> None:
        key = span.path_keys[(end - 1) // span.geometry.ratio]
        if self._leaf_of.get(key) is span:
            del self._leaf_of[key]


def _last_key(span: Span) -> Key:
    return span.path_keys[(span.end - 1) // span.geometry.ratio]
