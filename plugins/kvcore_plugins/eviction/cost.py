"""Cost-aware eviction: GreedyDual."""

from __future__ import annotations

from typing import ClassVar

from kvcore import ScoreEviction, Span


class Cost(ScoreEviction):
    """Evict the block with the lowest frequency × recompute cost, with ageing.

    The score of a block is H = L + frequency · cost. Its cost is the seconds to compute it
    again, which grow with its depth, since its queries attend to all tokens before it. L,
    the inflation value, rises to the score of every victim, and H has the L of the last use:
    blocks that have not been used for long have lower scores than new ones. All blocks have
    one size, so the division by size in the published formula has no effect. L is a sum in
    floating point, so H of two blocks that would be equal may differ by its rounding: then
    they are no tie, and the least recent need not go first. O(log leaves) per event.

    `span.data` is L at the latest use.

    Source: Cao and Irani, "Cost-aware WWW proxy caching algorithms", USITS 1997
    (GreedyDual-Size); Cherkasova, HP Labs 1998 (with frequency).
    """

    name: ClassVar[str] = "cost"

    _inflation = 0.0

    def on_insert(self, span: Span, now: int) -> None:
        """Store L at the first use."""
        span.data = self._inflation

    def on_access(self, span: Span, now: int) -> None:
        """Store L at the latest use."""
        span.data = self._inflation

    def on_split(self, upper: Span, lower: Span) -> None:
        """Copy L to the upper half. A score is that of the tail block: no half is rescored."""
        upper.data = lower.data

    def score(self, span: Span, now: int) -> float:
        """Return H of the tail block of `span`, the one that would be evicted."""
        inflation: float = span.data
        return inflation + (span.hit_count + 1) * span.recompute_seconds

    def victim(self, now: int) -> Span:
        """Return the span with the lowest score, and raise L to that score."""
        span = super().victim(now)
        self._inflation = max(self._inflation, self.score(span, now))
        return span
