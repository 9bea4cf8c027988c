"""First in, first out."""

from __future__ import annotations

from typing import ClassVar

from kvcore import ScoreEviction, Span


class FIFO(ScoreEviction):
    """Evict the span that was stored first, whether it was used or not: a baseline."""

    name: ClassVar[str] = "fifo"
    fixed_order: ClassVar[bool] = True

    def score(self, span: Span, now: int) -> int:
        """Return the serial number of the creation of `span`."""
        return span.created_order
