"""LRU-K: least recently used, by the K-th last use."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar, TypeAlias

import attrs

from kvcore import InputError, ScoreEviction, Span
from kvcore.request import Key

Uses: TypeAlias = tuple[int, ...]
"""The serial of the latest use, then of the latest k uses that count, 0 where there is none."""


@attrs.define(slots=False, eq=False)
class LRUK(ScoreEviction):
    """Evict the span whose k-th last use is the longest ago; used less than k times: first.

    Ties, and so all spans used less than k times, go by LRU. Time is counted in admissions
    to the cache. A use within `correlated` admissions of the one before belongs to it: it
    does not count, and the time between the two is taken out of the past. Uses are
    remembered by block key when a block is evicted, so that one that comes back again and
    again is known; what was evicted the longest ago is forgotten.

    Fitted to spans: a span has one past. Blocks that are stored together get the past of
    the first of them, which is in as many prompts as the others or more. O(log leaves) per
    event, O(keys) for what is evicted.

    Variant: the published one, but that a span in its correlated period may be evicted,
    since somebody must be; and that the past is bounded by number, not by age.

    Options:
        k: which use is looked at, from the latest back.
        correlated: the correlated reference period, in admissions.
        history: keys remembered once evicted, as a share of those in the pool.

    Source: O'Neil, O'Neil and Weikum, "The LRU-K page replacement algorithm for database
    disk buffering", SIGMOD 1993, figure 2.1.
    """

    name: ClassVar[str] = "lruk"

    k: int = attrs.field(default=2)
    correlated: int = attrs.field(default=0)
    history: float = attrs.field(default=1.0)

    _past: OrderedDict[Key, Uses] = attrs.field(init=False, factory=OrderedDict, repr=False)

    @k.validator
    def _is_positive(self, _: object, value: int) -> None:
        if value < 1:
            msg = f"lruk: k={value} must be 1 or more"
            raise InputError(msg)

    @correlated.validator
    def _is_period(self, _: object, value: int) -> None:
        if value < 0:
            msg = f"lruk: correlated={value} must be a number of admissions, 0 or more"
            raise InputError(msg)

    @history.validator
    def _is_share(self, _: object, value: float) -> None:
        if not 0 <= value < float("inf"):
            msg = f"lruk: history={value} must be a share of the pool, 0 or more"
            raise InputError(msg)

    def on_insert(self, span: Span, now: int) -> None:
        """Count a use, after those remembered."""
        del now
        first = span.path_keys[span.start // span.geometry.ratio]
        _, *uses = self._past.get(first, (0,) * (self.k + 1))
        span.data = (span.last_hit_order, span.last_hit_order, *uses[:-1])

    def on_access(self, span: Span, now: int) -> None:
        """Count a use, if it does not belong to the one before."""
        del now
        last, *uses = span.data
        if span.last_hit_order - last > self.correlated:
            period = last - uses[0]
            older = (use and use + period for use in uses[:-1])
            uses = [span.last_hit_order, *older]
        span.data = (span.last_hit_order, *uses)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let both halves have the same past."""
        upper.data = lower.data
        super().on_split(upper, lower)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Remember what left."""
        self._remember(span, span.end, span.end + blocks)
        super().on_trim(span, blocks)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remember what left."""
        self._remember(span, span.start, span.end)
        super().on_remove(span, reason)

    def score(self, span: Span, now: int) -> int:
        """Return the serial of its k-th last use, 0 if there were fewer."""
        del now
        kth: int = span.data[self.k]
        return kth

    def state(self) -> Any:
        """Return the order, and the past of what was evicted."""
        return super().state(), tuple(self._past.items())

    def restore(self, state: Any) -> None:
        """Take both from `state`."""
        order, past = state
        super().restore(order)
        self._past = OrderedDict(past)

    def _remember(self, span: Span, start: int, end: int) -> None:
        """Remember the uses of `span` for its blocks `[start, end)`, the first longest."""
        past, ratio = self._past, span.geometry.ratio
        for key in reversed(span.path_keys[start // ratio : (end - 1) // ratio + 1]):
            past[key] = span.data
            past.move_to_end(key)
        while len(past) > int(self.history * self.blocks) // ratio:
            past.popitem(last=False)
