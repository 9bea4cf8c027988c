"""Most recently used."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import ScoreEviction, Span


@attrs.define(slots=False, eq=False)
class MRU(ScoreEviction):
    """Evict the span used most recently: right for scans longer than the cache.

    Where prompts come round in a cycle that does not fit, LRU evicts each just before it
    is used again; MRU keeps a part of the cycle. Source: Chou and DeWitt, "An evaluation
    of buffer management strategies for relational database systems", VLDB 1985.
    """

    name: ClassVar[str] = "mru"

    def score(self, span: Span, now: int) -> int:
        """Return its recency, the highest first."""
        del now
        return -span.released_order
