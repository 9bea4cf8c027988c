"""First in, first out."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import ScoreEviction, Span


@attrs.define(slots=False, eq=False)
class FIFO(ScoreEviction):
    """Evict the span stored first, used since or not: the baseline that ignores reuse."""

    name: ClassVar[str] = "fifo"

    def score(self, span: Span, now: int) -> int:
        """Return the serial of its creation."""
        del now
        return span.created_order
