"""An eviction policy: which cached blocks leave a full pool."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import ScoreEviction, Span


@attrs.define(slots=False, eq=False)
class Example(ScoreEviction):
    """Evict the span with the fewest hits, of equal ones that which was used longest ago.

    Options:
        keep: number of blocks at the beginning of prompts that are evicted last.
    """

    name: ClassVar[str] = "example"
    keep: int = attrs.field(default=0, validator=attrs.validators.ge(0))

    def score(self, span: Span, now: int) -> tuple[bool, int, int]:
        """Return the worth of a span, of which the lowest is evicted first."""
        del now
        return span.depth < self.keep, span.hit_count, span.released_order
