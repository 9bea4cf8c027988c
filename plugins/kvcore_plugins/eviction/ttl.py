"""Time to live: a prompt cache whose entries expire."""

from __future__ import annotations

from math import inf
from typing import ClassVar

import attrs
from attrs.validators import gt, lt

from kvcore import Span
from kvcore.units import NS_PER_S
from kvcore_plugins.bounds import bounded
from kvcore_plugins.eviction.lru import LRU


@attrs.define(slots=False, eq=False, repr=False, on_setattr=attrs.setters.NO_OP)
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

    ttl: float = bounded(300.0, "a positive number of seconds", gt(0), lt(inf))

    def __attrs_post_init__(self) -> None:
        """Convert the option to nanoseconds."""
        self._ttl_ns = round(self.ttl * NS_PER_S)

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
