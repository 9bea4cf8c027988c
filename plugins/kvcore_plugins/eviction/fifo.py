"""First in, first out."""

from __future__ import annotations

from typing import ClassVar

from kvcore import ScoreEviction, Span


class FIFO(ScoreEviction):
    """Evict the span stored first, used since or not: the baseline that ignores reuse."""

    name: ClassVar[str] = "fifo"
    fixed_order: ClassVar[bool] = True

    def score(self, span: Span, now: int) -> int:
        """Return the serial number of the creation of `span`."""
        return span.created_order
