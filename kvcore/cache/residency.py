"""How long blocks rest before they are used again, or evicted."""

from __future__ import annotations

from array import array

from kvcore.policy import Span


class Residency:
    """Listens to a prefix cache: one row for each span that is hit, or leaves.

    Set it as `residency` of a prefix cache to have it told. Times are nanoseconds. A row
    is 12 to 28 bytes; its weight is the blocks of the span, or those of its tail that left.

    Attributes:
        hit_age, hit_blocks: time since the last access before a hit by another request.
        idle, lifetime, hits, evicted_blocks: of what was evicted, for room or because it
            expired: time since its last access and since it was stored, and by how many
            other requests it had been hit.
    """

    __slots__ = ("evicted_blocks", "hit_age", "hit_blocks", "hits", "idle", "lifetime")

    def __init__(self) -> None:
        """Start empty."""
        self.hit_age, self.hit_blocks = array("q"), array("i")
        self.idle, self.lifetime = array("q"), array("q")
        self.hits, self.evicted_blocks = array("i"), array("i")

    def hit(self, span: Span, now: int) -> None:
        """Take in a hit of `span` and all before it, which is not written down in them yet."""
        while span.parent is not None:
            self.hit_age.append(now - span.last_access)
            self.hit_blocks.append(span.end - span.start)
            span = span.parent

    def evicted(self, span: Span, blocks: int, now: int) -> None:
        """Take in that the last `blocks` blocks of `span` leave."""
        self.idle.append(now - span.last_access)
        self.lifetime.append(now - span.created)
        self.hits.append(span.hits)
        self.evicted_blocks.append(blocks)
