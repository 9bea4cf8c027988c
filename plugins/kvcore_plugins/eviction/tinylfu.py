"""W-TinyLFU: a window, and a main part that only the more frequent enter."""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from typing import Any, ClassVar

import attrs

from kvcore import InputError, ScoreEviction, Span
from kvcore_plugins.eviction.sketch import Sketch

Order = OrderedDict[Span, None]

PROBATION, PROTECTED, WINDOW = range(3)
"""The segments, in the order in which victims are looked for in them."""


@attrs.define
class Place:
    """Where a span belongs: its segment, and its turn in the order of that segment."""

    segment: int = WINDOW
    turn: int = 0


@attrs.define(slots=False, eq=False)
class TinyLFU(ScoreEviction):
    """Let new spans into the main part only if they are used more than what would leave.

    New spans enter the window, an LRU of a small share of the pool. What the window has no
    room for goes to the main part, a segmented LRU: to the recent end of probation, where
    it is on trial. At the next eviction the least recent span of the main part (of
    probation, else of the protected) stands against the oldest on trial: the one used less
    often leaves, at a tie the one on trial. If it wins it stays, and the next one on trial
    comes up; once none is left the least recent leaves. A hit in the main part promotes to
    the protected segment, whose least recent spans go back to probation.

    Frequencies are those of block keys in a count-min sketch with a doorkeeper, sized by
    the pool, which ages: counts are halved after `period` uses a key of the pool.

    Fitted to spans and leaves: a use of a span is a use of each of its keys; it is compared
    by its last, the one that would leave. Only leaves stand trial. The published policy
    compares as it inserts; here what was inserted is cached in any case, and compared when
    room is needed next, so trials are over with the eviction that follows. A partly evicted
    span stays the victim until it is gone or used. Segments hold unpinned spans, whole, and
    are measured in blocks. O(log leaves) per event, O(keys) for a use.

    Options:
        window: the window's share of the pool, 0 to 1.
        protected: the protected segment's share of the main part, 0 to 1.
        period: uses after which counts are halved, for each key that the pool can hold.

    Source: Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission
    policy", ACM ToS 2017 (W-TinyLFU).
    """

    name: ClassVar[str] = "tinylfu"

    window: float = attrs.field(default=0.01)
    protected: float = attrs.field(default=0.8)
    period: int = attrs.field(default=10)

    _sketch: Sketch | None = attrs.field(init=False, default=None, repr=False)
    _orders: dict[int, Order] = attrs.field(init=False, repr=False)
    _held: dict[int, int] = attrs.field(init=False, repr=False)
    _trial: Order = attrs.field(init=False, factory=OrderedDict, repr=False)
    _tried: bool = attrs.field(init=False, default=False, repr=False)
    _loser: Span | None = attrs.field(init=False, default=None, repr=False)
    _turns: int = attrs.field(init=False, default=0, repr=False)

    @window.validator
    @protected.validator
    def _is_share(self, field: attrs.Attribute[float], value: float) -> None:
        if not 0 <= value <= 1:
            msg = f"tinylfu: {field.name}={value} must be a share, 0 to 1"
            raise InputError(msg)

    @period.validator
    def _is_positive(self, _: object, value: int) -> None:
        if value < 1:
            msg = f"tinylfu: period={value} must be 1 or more uses a key"
            raise InputError(msg)

    def attach(self, blocks: int, block_size: int) -> None:
        """Work out the capacities."""
        super().attach(blocks, block_size)
        main = self.protected * (1 - self.window)
        self._capacity = {WINDOW: int(self.window * blocks), PROTECTED: int(main * blocks)}
        self._orders = {WINDOW: OrderedDict(), PROTECTED: OrderedDict()}
        self._held = {WINDOW: 0, PROTECTED: 0}

    def on_insert(self, span: Span, now: int) -> None:
        """Put `span` into the window, and count a use."""
        del now
        span.data = Place()
        self._count(span, span.start)

    def on_extend(self, span: Span, blocks: int) -> None:
        """Count a use of what was appended."""
        self._count(span, span.end - blocks)

    def on_access(self, span: Span, now: int) -> None:
        """Promote `span`, if it is in the main part, and count a use."""
        del now
        if span.data.segment == PROBATION:
            span.data.segment = PROTECTED
        self._count(span, span.start)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let both halves be of one segment; the upper is pinned and so in no order."""
        upper.data = copy(lower.data)
        if lower in self._orders.get(lower.data.segment, ()):
            self._held[lower.data.segment] -= upper.blocks
        super().on_split(upper, lower)

    def joined(self, upper: Span, lower: Span) -> None:
        """Count the upper half again."""
        if lower in self._orders.get(lower.data.segment, ()):
            self._held[lower.data.segment] += upper.blocks
        super().on_split(upper, lower)

    def on_pin(self, span: Span) -> None:
        """Take `span` out of its segment."""
        self._take_out(span)
        super().on_pin(span)

    def on_release(self, span: Span, now: int) -> None:
        """Append `span` to its segment, and move on what no longer fits."""
        self._append(span, span.data.segment)
        super().on_release(span, now)
        for segment in (WINDOW, PROTECTED):
            while self._held[segment] > self._capacity[segment]:
                self._move_on(segment)

    def unpinned(self, span: Span, now: int) -> None:
        """Put `span` back where its turn says. O(spans), after a failure alone."""
        segment = span.data.segment
        order = self._orders.get(segment)
        if order is not None:
            spans = sorted([*order, span], key=lambda span: span.data.turn)
            self._orders[segment] = OrderedDict.fromkeys(spans)
            self._held[segment] += span.blocks
        super().on_release(span, now)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Count what is left."""
        if span.data.segment in self._held:
            self._held[span.data.segment] -= blocks
        super().on_trim(span, blocks)

    def on_remove(self, span: Span, reason: str) -> None:
        """Forget `span`."""
        self._take_out(span)
        super().on_remove(span, reason)

    def score(self, span: Span, now: int) -> tuple[int, int]:
        """Return its segment, and its turn there."""
        del now
        return span.data.segment, span.data.turn

    def victim(self, now: int) -> Span:
        """Return the loser of a trial, or else the least recent of the main part."""
        if self._loser is None:
            self._tried = True
            self._loser = self._less_used(super().victim(now))
        return self._loser

    def state(self) -> Any:
        """Return order, segments, trials and frequencies, and the segment of each span."""
        orders = tuple((name, tuple(order)) for name, order in self._orders.items())
        sketch = None if self._sketch is None else self._sketch.state()
        mine = orders, tuple(self._held.items()), tuple(self._trial), sketch
        return super().state(), *mine, self._tried, self._loser, self._turns

    def restore(self, state: Any) -> None:
        """Take all of it from `state`."""
        order, orders, held, trial, sketch, self._tried, self._loser, self._turns = state
        super().restore(order)
        self._orders = {segment: OrderedDict.fromkeys(spans) for segment, spans in orders}
        self._held, self._trial = dict(held), OrderedDict.fromkeys(trial)
        self._sketch = None if sketch is None else Sketch.restored(sketch)

    def _less_used(self, victim: Span) -> Span:
        """Return who leaves: `victim`, or the oldest on trial, if that is not used more."""
        while self._trial:
            candidate, _ = self._trial.popitem(last=False)
            if candidate.is_leaf:
                return victim if self._uses(candidate) > self._uses(victim) else candidate
        return victim

    def _uses(self, span: Span) -> int:
        assert self._sketch is not None
        return self._sketch.estimate(span.path_keys[(span.end - 1) // span.geometry.ratio])

    def _count(self, span: Span, start: int) -> None:
        """Count a use of each key that begins in the blocks of `span` from `start` on."""
        ratio = span.geometry.ratio
        if self._sketch is None:
            keys = max(1, self.blocks // ratio)
            self._sketch = Sketch(keys, self.period * keys)
        for key in span.path_keys[-(-start // ratio) : -(-span.end // ratio)]:
            self._sketch.add(key)

    def _append(self, span: Span, segment: int) -> None:
        self._turns += 1
        span.data.segment, span.data.turn = segment, self._turns
        if segment in self._orders:
            self._orders[segment][span] = None
            self._held[segment] += span.blocks

    def _move_on(self, segment: int) -> None:
        """Move the least recent span of `segment` to probation: from the window, on trial."""
        span, _ = self._orders[segment].popitem(last=False)
        self._held[segment] -= span.blocks
        self._append(span, PROBATION)
        self.rescore(span)
        if segment == WINDOW:
            if self._tried:
                self._trial.clear()
                self._tried = False
            self._trial[span] = None

    def _take_out(self, span: Span) -> None:
        segment = span.data.segment
        if segment in self._orders:
            del self._orders[segment][span]
            self._held[segment] -= span.blocks
        self._trial.pop(span, None)
        if span is self._loser:
            self._loser = None
