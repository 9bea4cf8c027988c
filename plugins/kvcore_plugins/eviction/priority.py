"""Retention priority."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import ScoreEviction, Span


@attrs.define(slots=False, eq=False)
class Priority(ScoreEviction):
    """Evict the span with the lowest retention priority, least recent first among equals.

    Priorities, 1 to 100, come with requests by token range (`Request.retention`); without
    a hint a span has 35. When a hint's duration ends the span has 35 again, from that
    very moment. With no hints at all this is LRU. O(log leaves) per event.

    Source: the retention hints of TensorRT-LLM (`KvCacheRetentionConfig`).
    """

    name: ClassVar[str] = "priority"

    def score(self, span: Span, now: int) -> int:
        """Return the priority that holds now."""
        return span.priority_at(now)

    def changes_at(self, span: Span, now: int) -> int | None:
        """Return when its hint ends."""
        until = span.priority_until
        return until if until is not None and until > now else None
