"""Eviction policies to test prefix caches with: each watches or disturbs them in one way."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import attrs

from kvcore.cache import ScoreEviction, Span

LIFETIME = 10


@attrs.define(slots=False, eq=False)
class Oldest(ScoreEviction):
    """Evicts what was released first."""

    name: ClassVar[str] = "oldest"

    def score(self, span: Span, now: int) -> int:
        """Return when it was released."""
        del now
        return span.released_order


@attrs.define(slots=False, eq=False)
class Mortal(Oldest):
    """Lets spans expire `LIFETIME` ns after they were stored or hit."""

    name: ClassVar[str] = "mortal"
    expires_spans: ClassVar[bool] = True

    def on_insert(self, span: Span, now: int) -> None:
        """Start its time."""
        span.expires = now + LIFETIME

    def on_access(self, span: Span, now: int) -> None:
        """Start its time again."""
        span.expires = now + LIFETIME


@attrs.define(slots=False, eq=False)
class Failing(Oldest):
    """Answers `wrong`, or raises it, when asked for a victim."""

    name: ClassVar[str] = "failing"

    wrong: Any = None

    def victim(self, now: int) -> Span:
        """Answer wrongly."""
        del now
        if isinstance(self.wrong, Exception):
            raise self.wrong
        answer: Span = self.wrong
        return answer


@attrs.define(slots=False, eq=False)
class Ledger(Oldest):
    """Keeps the spans, their sizes and whether they are pinned from what it is told alone."""

    name: ClassVar[str] = "ledger"

    sizes: Counter[Span] = attrs.field(init=False, factory=Counter)
    held: set[Span] = attrs.field(init=False, factory=set)

    def on_insert(self, span: Span, now: int) -> None:
        """Write down a new span, which is pinned."""
        del now
        self.sizes[span] = span.blocks
        self.held.add(span)

    def on_extend(self, span: Span, blocks: int) -> None:
        """Add what was appended."""
        self.sizes[span] += blocks

    def on_split(self, upper: Span, lower: Span) -> None:
        """Move the head of `lower` to `upper`, which is pinned."""
        self.sizes[upper] = upper.blocks
        self.sizes[lower] -= upper.blocks
        self.held.add(upper)

    def joined(self, upper: Span, lower: Span) -> None:
        """Move it back."""
        self.sizes[lower] += self.sizes.pop(upper)
        self.held.remove(upper)

    def on_pin(self, span: Span) -> None:
        """Write down that it is held."""
        super().on_pin(span)
        self.held.add(span)

    def on_release(self, span: Span, now: int) -> None:
        """Write down that it is not held any more."""
        super().on_release(span, now)
        self.held.remove(span)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Take off what was evicted."""
        super().on_trim(span, blocks)
        self.sizes[span] -= blocks

    def on_remove(self, span: Span, reason: str) -> None:
        """Strike it out."""
        super().on_remove(span, reason)
        del self.sizes[span]
