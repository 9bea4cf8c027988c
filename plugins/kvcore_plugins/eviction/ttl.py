"""Time to live: what a prompt cache with a lifetime does."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import InputError, Span
from kvcore.units import NS_PER_S
from kvcore_plugins.eviction.lru import LRU


@attrs.define(slots=False, eq=False)
class TTL(LRU):
    """Let a span expire when nobody used it for `ttl` seconds; under pressure, evict as LRU.

    An expired span no longer matches, however much room there is. A hit, and the end of a
    use, give it its full time again. O(1) per event.

    Options:
        ttl: seconds of idleness after which a span is gone.

    Source: the prompt caches of hosted models, e.g. Anthropic's of five minutes,
    refreshed by every use.
    """

    name: ClassVar[str] = "ttl"
    expires_spans: ClassVar[bool] = True

    ttl: float = attrs.field(default=300.0)

    @ttl.validator
    def _is_positive(self, _: object, value: float) -> None:
        if not 0 < value < float("inf"):
            msg = f"ttl: ttl={value} must be a positive number of seconds"
            raise InputError(msg)

    def on_insert(self, span: Span, now: int) -> None:
        """Start its time."""
        span.expires = now + round(self.ttl * NS_PER_S)

    def on_access(self, span: Span, now: int) -> None:
        """Give it its full time again."""
        span.expires = now + round(self.ttl * NS_PER_S)

    def on_release(self, span: Span, now: int) -> None:
        """Append `span`, whose idle time begins now."""
        span.expires = now + round(self.ttl * NS_PER_S)
        super().on_release(span, now)
