"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar

import attrs

from kvcore import EvictionPolicy, Span


@attrs.define(slots=False, eq=False)
class LRU(EvictionPolicy):
    """Evict the span that has gone unused the longest.

    One ordered dict of the unpinned spans, appended to leaf → root as a path is released:
    children are then always older than their parents, so the first span is always an
    evictable leaf. No timestamps, no heap: O(1) per event.
    """

    name: ClassVar[str] = "lru"

    _order: OrderedDict[Span, None] = attrs.field(init=False, factory=OrderedDict, repr=False)

    def on_pin(self, span: Span) -> None:
        """Take `span` out."""
        del self._order[span]

    def on_release(self, span: Span, now: int) -> None:
        """Append `span`, the most recent now."""
        del now
        self._order[span] = None

    def unpinned(self, span: Span, now: int) -> None:
        """Put `span` back where its recency says. O(spans), after a failure alone."""
        del now
        spans = sorted([*self._order, span], key=lambda span: span.released_order)
        self._order = OrderedDict.fromkeys(spans)

    def on_remove(self, span: Span, reason: str) -> None:
        """Forget `span`."""
        del reason
        del self._order[span]

    def victim(self, now: int) -> Span:
        """Return the least recent span."""
        del now
        return next(iter(self._order))

    def state(self) -> Any:
        """Return the spans, least recent first."""
        return tuple(self._order)

    def restore(self, state: Any) -> None:
        """Take the order from `state`."""
        self._order = OrderedDict.fromkeys(state)
