"""Cost-aware eviction: GreedyDual."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from kvcore import ScoreEviction, Span


@attrs.define(slots=False, eq=False)
class Cost(ScoreEviction):
    """Evict what is cheapest to lose: frequency × recompute cost per block, with ageing.

    A block's score is `L + uses · seconds to recompute it`. The seconds grow with its
    depth, since its queries attend to all before it. L rises to the score of every victim,
    so what was used long ago is overtaken in the end. Blocks are of one size, so the
    division by size of the published formula has no effect. O(log leaves) per event.

    Source: Cao and Irani, "Cost-aware WWW proxy caching algorithms", USITS 1997
    (GreedyDual-Size); Cherkasova, HP Labs 1998 (with frequency).
    """

    name: ClassVar[str] = "cost"

    _age: float = attrs.field(init=False, default=0.0, repr=False)

    def on_insert(self, span: Span, now: int) -> None:
        """Remember the age at its first use."""
        del now
        span.data = self._age

    def on_access(self, span: Span, now: int) -> None:
        """Remember the age at its latest use."""
        del now
        span.data = self._age

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let both halves be of one age."""
        upper.data = lower.data

    def score(self, span: Span, now: int) -> float:
        """Return the score of its tail block, the one that would go."""
        del now
        age: float = span.data
        return age + (span.hit_count + 1) * span.recompute_seconds

    def victim(self, now: int) -> Span:
        """Return the span with the lowest score, and age to that score."""
        span = super().victim(now)
        self._age = max(self._age, self.score(span, now))
        return span

    def state(self) -> Any:
        """Return the order and the age."""
        return super().state(), self._age

    def restore(self, state: Any) -> None:
        """Take the order and the age from `state`."""
        order, self._age = state
        super().restore(order)
