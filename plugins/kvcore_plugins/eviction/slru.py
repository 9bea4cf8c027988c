"""Segmented LRU."""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from typing import Any, ClassVar

import attrs

from kvcore import EvictionPolicy, InputError, Span

Order = OrderedDict[Span, None]


@attrs.define
class Place:
    """Where a span belongs: its segment, and its turn in the order of that segment."""

    protected: bool = False
    turn: int = 0


@attrs.define(slots=False, eq=False)
class SLRU(EvictionPolicy):
    """Evict what has been used once, least recent first, before what was used again.

    A span starts on probation; a hit takes it to the protected segment. When the
    protected segment outgrows its share of the pool, its least recent spans go back to
    the recent end of probation, whole, until it fits. Segments hold unpinned spans and
    are measured in blocks. O(1) per event.

    Options:
        protected: the protected segment's share of the pool, 0 to 1.

    Source: Karedla, Love and Wherry, "Caching strategies to improve disk system
    performance", IEEE Computer 1994. Published for objects of equal size; here the unit
    of both queues is the span.
    """

    name: ClassVar[str] = "slru"

    protected: float = attrs.field(default=0.5)

    _probation: Order = attrs.field(init=False, factory=OrderedDict, repr=False)
    _protected: Order = attrs.field(init=False, factory=OrderedDict, repr=False)
    _held: int = attrs.field(init=False, default=0, repr=False)
    _turns: int = attrs.field(init=False, default=0, repr=False)

    @protected.validator
    def _is_share(self, _: object, value: float) -> None:
        if not 0 <= value <= 1:
            msg = f"slru: protected={value} must be a share of the pool, 0 to 1"
            raise InputError(msg)

    def attach(self, blocks: int, block_size: int) -> None:
        """Work out the protected segment's capacity."""
        super().attach(blocks, block_size)
        self._capacity = int(self.protected * blocks)

    def on_insert(self, span: Span, now: int) -> None:
        """Put `span` on probation."""
        del now
        span.data = Place()

    def on_access(self, span: Span, now: int) -> None:
        """Promote `span`."""
        del now
        span.data.protected = True

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let both halves be of one segment; the upper is pinned and so in neither order."""
        upper.data = copy(lower.data)
        if lower in self._protected:
            self._held -= upper.blocks

    def joined(self, upper: Span, lower: Span) -> None:
        """Count the upper half again."""
        if lower in self._protected:
            self._held += upper.blocks

    def on_pin(self, span: Span) -> None:
        """Take `span` out of its segment."""
        if span in self._protected:
            del self._protected[span]
            self._held -= span.blocks
        else:
            del self._probation[span]

    def on_release(self, span: Span, now: int) -> None:
        """Append `span` to its segment, and demote what no longer fits."""
        del now
        if not span.data.protected:
            self._append(self._probation, span)
            return
        self._append(self._protected, span)
        self._held += span.blocks
        while self._held > self._capacity:
            oldest, _ = self._protected.popitem(last=False)
            self._held -= oldest.blocks
            oldest.data.protected = False
            self._append(self._probation, oldest)

    def unpinned(self, span: Span, now: int) -> None:
        """Put `span` back where its turn says. O(spans), after a failure alone."""
        del now
        segment = self._protected if span.data.protected else self._probation
        order = sorted([*segment, span], key=lambda span: span.data.turn)
        segment.clear()
        segment.update(dict.fromkeys(order))
        self._held += span.blocks if span.data.protected else 0

    def on_trim(self, span: Span, blocks: int) -> None:
        """Count what is left."""
        if span in self._protected:
            self._held -= blocks

    def on_remove(self, span: Span, reason: str) -> None:
        """Forget `span`."""
        del reason
        self.on_pin(span)

    def victim(self, now: int) -> Span:
        """Return the least recent span on probation, else of the protected ones."""
        del now
        return next(iter(self._probation or self._protected))

    def state(self) -> Any:
        """Return both segments, least recent first, and the turns so far."""
        return tuple(self._probation), tuple(self._protected), self._turns

    def restore(self, state: Any) -> None:
        """Take both segments from `state`."""
        probation, protected, self._turns = state
        self._probation = OrderedDict.fromkeys(probation)
        self._protected = OrderedDict.fromkeys(protected)
        self._held = sum(span.blocks for span in protected)
        for span in (*probation, *protected):
            span.data.protected = span in self._protected

    def _append(self, segment: Order, span: Span) -> None:
        self._turns += 1
        span.data.turn = self._turns
        segment[span] = None
