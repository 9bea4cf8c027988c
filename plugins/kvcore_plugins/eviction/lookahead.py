"""Look-ahead: the queue of waiting requests as an oracle."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Keys
from math import inf
from typing import Any, ClassVar, Literal

import attrs

from kvcore import InputError, Request, ScoreEviction, Span
from kvcore.request import Key


@attrs.define(slots=False, eq=False)
class Lookahead(ScoreEviction):
    """Evict what no waiting request needs, as LRU does; then what is needed furthest ahead.

    A block is needed by the first request, in the order in which they queued up, whose
    prompt it is part of. Blocks of one span may be needed at different times: of a victim
    only the end that is needed last, or not at all, leaves at once. In a server the
    requests are those in its waiting queue, whatever the option says; in untimed replay
    they are the next ones of the workload.

    Told of all requests, it hits what the optimum hits that must admit. Told of none, it
    is LRU. O(log leaves) per event; O(keys · log waiting) for a request that starts or
    ceases to wait.

    Options:
        requests: how many requests ahead untimed replay tells of; `all` reads all there
            are into memory.

    Source: Belady, IBM Systems Journal 1966, with a window; per block of a prefix tree.
    """

    name: ClassVar[str] = "lookahead"

    requests: int | Literal["all"] = attrs.field(default=64)

    _waiting: dict[int | str, tuple[int, Keys[Key]]] = attrs.field(
        init=False, factory=dict, repr=False
    )
    _needs: dict[Key, list[int]] = attrs.field(init=False, factory=dict, repr=False)
    _ends: tuple[int, int] = attrs.field(init=False, default=(0, 0), repr=False)
    _leaves: dict[Key, Span] = attrs.field(init=False, factory=dict, repr=False)

    @requests.validator
    def _is_count(self, _: object, value: int | str) -> None:
        if value != "all" and (isinstance(value, str) or value < 0):
            msg = f"lookahead: requests={value} must be 0 or more, or all"
            raise InputError(msg)

    def __attrs_post_init__(self) -> None:
        """Say how far ahead it wants to look."""
        self.lookahead = None if self.requests == "all" else self.requests

    def on_queued(self, request: Request, now: int, *, front: bool = False) -> None:
        """Note that `request` needs its blocks."""
        del now
        first, last = self._ends
        turn = first - 1 if front else last + 1
        self._ends = min(first, turn), max(last, turn)
        self._waiting[request.id] = turn, request.keys
        self._need(turn, request.keys)

    def on_dequeued(self, request: Request, now: int) -> None:
        """Note that `request` needs nothing any more."""
        del now
        turn, keys = self._waiting.pop(request.id)
        for key in keys:
            turns = self._needs[key]
            place = bisect_left(turns, turn)
            del turns[place]
            if not turns:
                del self._needs[key]
            if not place:
                self._rescore_leaf(key)

    def score(self, span: Span, now: int) -> tuple[bool, float]:
        """Return whether its tail block is needed, and when, the furthest lowest."""
        del now
        turn = self._turn(_last_key(span))
        return (False, 0) if turn == inf else (True, -turn)

    def evictable_blocks(self, span: Span) -> int:
        """Return how many blocks at its end are needed no sooner than the last one."""
        ratio, keys = span.geometry.ratio, span.path_keys
        last = (span.end - 1) // ratio
        # Whoever needs a block needs those before it: turns only rise along a path.
        places = range(span.start // ratio, last)
        place = bisect_left(places, self._turn(keys[last]), key=lambda at: self._turn(keys[at]))
        return span.end - max(span.start, (places.start + place) * ratio)

    def on_release(self, span: Span, now: int) -> None:
        """Enter `span` if it is a leaf."""
        if span.is_leaf:
            self._leaves[_last_key(span)] = span
        super().on_release(span, now)

    def on_leaf(self, span: Span) -> None:
        """Enter `span`."""
        self._leaves[_last_key(span)] = span
        super().on_leaf(span)

    def on_pin(self, span: Span) -> None:
        """Take `span` out."""
        self._forget(span, span.end)
        super().on_pin(span)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Enter what is left of `span` by its new last key."""
        self._forget(span, span.end + blocks)
        self._leaves[_last_key(span)] = span
        super().on_trim(span, blocks)

    def on_remove(self, span: Span, reason: str) -> None:
        """Forget `span`."""
        self._forget(span, span.end)
        super().on_remove(span, reason)

    def state(self) -> Any:
        """Return the order, the leaves by key, and who waits for what."""
        return super().state(), dict(self._leaves), dict(self._waiting), self._ends

    def restore(self, state: Any) -> None:
        """Take all of it from `state`."""
        order, leaves, waiting, self._ends = state
        super().restore(order)
        self._leaves, self._waiting, self._needs = dict(leaves), dict(waiting), {}
        for turn, keys in waiting.values():
            self._need(turn, keys)

    def _need(self, turn: int, keys: Keys[Key]) -> None:
        for key in keys:
            turns = self._needs.setdefault(key, [])
            insort(turns, turn)
            if turns[0] == turn:
                self._rescore_leaf(key)

    def _turn(self, key: Key) -> float:
        """Return the turn of the first request that needs `key`."""
        turns = self._needs.get(key)
        return inf if turns is None else turns[0]

    def _rescore_leaf(self, key: Key) -> None:
        leaf = self._leaves.get(key)
        if leaf is not None:
            self.rescore(leaf)

    def _forget(self, span: Span, end: int) -> None:
        key = span.path_keys[(end - 1) // span.geometry.ratio]
        if self._leaves.get(key) is span:
            del self._leaves[key]


def _last_key(span: Span) -> Key:
    return span.path_keys[(span.end - 1) // span.geometry.ratio]
