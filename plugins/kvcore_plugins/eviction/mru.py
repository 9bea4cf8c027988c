"""Most recently used."""

from __future__ import annotations

from typing import ClassVar

from kvcore import ScoreEviction, Span


class MRU(ScoreEviction):
    """Evict the span used most recently: right for scans longer than the cache.

    Where prompts repeat in a cycle that does not fit, LRU evicts each just before its next
    use; MRU keeps a part of the cycle.

    Source: Chou and DeWitt, "An evaluation of buffer management strategies for relational
    database systems", VLDB 1985.
    """

    name: ClassVar[str] = "mru"
    fixed_order: ClassVar[bool] = True

    def score(self, span: Span, now: int) -> int:
        """Return the negative serial number of the last release of `span`."""
        return -span.released_order
