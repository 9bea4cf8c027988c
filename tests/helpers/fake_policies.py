"""Eviction policies for tests of prefix caches: one expires spans, one records callbacks."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from kvcore.cache import Span
from kvcore.testing.prefix import Oldest

LIFETIME_NS = 10


class ExpiringPolicy(Oldest):
    """A policy whose spans expire `LIFETIME_NS` after they were stored or hit."""

    name: ClassVar[str] = "expiring"
    expires_spans: ClassVar[bool] = True

    def on_insert(self, span: Span, now: int) -> None:
        """Start the lifetime of `span`."""
        span.expires = now + LIFETIME_NS

    def on_access(self, span: Span, now: int) -> None:
        """Restart the lifetime of `span`."""
        span.expires = now + LIFETIME_NS


class BookkeepingPolicy(Oldest):
    """Derives the spans, their sizes and which of them are pinned from its callbacks alone.

    Attributes:
        sizes: the blocks of each span.
        pinned: the spans that are pinned.
    """

    name: ClassVar[str] = "bookkeeping"

    def attach(self, blocks: int, block_size: int) -> None:
        """Create empty records."""
        super().attach(blocks, block_size)
        self.sizes: Counter[Span] = Counter()
        self.pinned: set[Span] = set()

    def on_insert(self, span: Span, now: int) -> None:
        """Record a new span, which is pinned."""
        self.sizes[span] = span.blocks
        self.pinned.add(span)

    def on_extend(self, span: Span, blocks: int) -> None:
        """Add the blocks that were appended."""
        self.sizes[span] += blocks

    def on_split(self, upper: Span, lower: Span) -> None:
        """Move the head of `lower` to `upper`, which is pinned."""
        self.sizes[upper] = upper.blocks
        self.sizes[lower] -= upper.blocks
        self.pinned.add(upper)

    def on_pin(self, span: Span) -> None:
        """Record that `span` is pinned."""
        super().on_pin(span)
        self.pinned.add(span)

    def on_release(self, span: Span, now: int) -> None:
        """Record that `span` is not pinned any more."""
        super().on_release(span, now)
        self.pinned.remove(span)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Subtract the blocks that were evicted."""
        super().on_trim(span, blocks)
        self.sizes[span] -= blocks

    def on_remove(self, span: Span, reason: str) -> None:
        """Delete the record of `span`."""
        super().on_remove(span, reason)
        del self.sizes[span]
