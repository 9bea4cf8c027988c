"""Retention priority."""

from __future__ import annotations

from typing import ClassVar

from kvcore import ScoreEviction, Span


class Priority(ScoreEviction):
    """Evict the span with the lowest retention priority, least recent first among equals.

    Priorities, 1 to 100, come with requests by token range (`Request.retention`); without
    a hint a span has 35, and so it has after the duration of its hint. Without hints this is
    LRU. O(log leaves) per event.

    Source: the retention hints of TensorRT-LLM (`KvCacheRetentionConfig`).
    """

    name: ClassVar[str] = "priority"

    def score(self, span: Span, now: int) -> int:
        """Return the priority that holds at `now`."""
        return span.priority_at(now)

    def changes_at(self, span: Span, now: int) -> int | None:
        """Return the end of the hint, in ns."""
        until = span.priority_until
        return until if until is not None and until > now else None
