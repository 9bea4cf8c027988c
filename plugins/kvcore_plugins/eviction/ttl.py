"""Time to live: a prompt cache whose entries expire."""

from __future__ import annotations

from typing import ClassVar

from kvcore import InputError, Span
from kvcore.units import NS_PER_S
from kvcore_plugins.eviction.lru import LRU


class TTL(LRU):
    """Expire spans `ttl` seconds after their last use; evict as LRU does.

    An expired span no longer matches, even if blocks are free. A hit, and the end of a use,
    restart its time. O(1) per event.

    Options:
        ttl: seconds of idleness after which a span expires.

    Source: the prompt caches of hosted models, e.g. Anthropic's of five minutes,
    refreshed by every use.
    """

    name: ClassVar[str] = "ttl"
    expires_spans: ClassVar[bool] = True

    def __init__(self, ttl: float = 300.0) -> None:
        """Store the option."""
        if not 0 < ttl < float("inf"):
            msg = f"ttl: ttl={ttl} must be a positive number of seconds"
            raise InputError(msg)
        self.ttl = ttl
        self._ttl_ns = round(ttl * NS_PER_S)

    def on_insert(self, span: Span, now: int) -> None:
        """Start the time of `span`."""
        span.expires = now + self._ttl_ns

    def on_access(self, span: Span, now: int) -> None:
        """Restart the time of `span`."""
        span.expires = now + self._ttl_ns

    def on_release(self, span: Span, now: int) -> None:
        """Append `span`, whose idle time begins now."""
        span.expires = now + self._ttl_ns
        super().on_release(span, now)
