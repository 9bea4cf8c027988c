"""How long blocks rest before they are used again, or evicted, and which come back soon."""

from __future__ import annotations

from collections.abc import Sequence as Keys
from typing import Any

from kvcore.cache.histogram import Histogram
from kvcore.cache.refaults import Refaults
from kvcore.policy import Span
from kvcore.request import Key
from kvcore.units import NANOSECONDS

TIER = "gpu"
"""The tier whose blocks a pool holds: the only one there is."""

SERIES = (1, 2, 5)
AGES = [digit * 10**zeros for zeros in range(6, 14) for digit in SERIES]
"""Bounds of the buckets of times in JSON and metrics: 1 ms to 50,000 s, in nanoseconds."""

COUNTS = [0, *(digit * 10**zeros for zeros in range(3) for digit in SERIES), 1000]
"""Likewise of numbers of hits."""


class Residency:
    """Listens to a prefix cache: what is hit, stored and evicted in one tier, by block.

    Set it as `residency` of a prefix cache to have it told; where nobody does, nothing is
    paid. Times are nanoseconds, and the age of a block is that of its span: the time since
    this was stored (its first blocks, if it grew) or last hit by another request.

    An event costs O(spans it is about). Memory is bounded: the histograms, and the keys,
    by reference, of as many evicted blocks as the pool has.

    Args:
        blocks: of the pool; as many evicted blocks are remembered.
        tier: what to call it.

    Attributes:
        age_at_hit: time since the last access before a hit by another request.
        age_at_eviction: of what was evicted, how long it had been idle: likewise.
        lifetime: of what was evicted, the time since it was stored.
        hits_at_eviction: of what was evicted, how many other requests had hit it.
        stored_blocks: blocks that entered the tier.
        refaults: those of them that had been evicted for room, with no more than a pool
            of others after them.
        evicted_blocks: blocks that left, by reason: `capacity` or `expired`.
    """

    __slots__ = (
        "age_at_eviction",
        "age_at_hit",
        "blocks",
        "evicted_blocks",
        "hits_at_eviction",
        "lifetime",
        "refaults",
        "stored_blocks",
        "tier",
    )

    def __init__(self, blocks: int, tier: str = TIER) -> None:
        """Start empty."""
        self.blocks, self.tier = blocks, tier
        self.age_at_hit, self.age_at_eviction = Histogram(), Histogram()
        self.lifetime, self.hits_at_eviction = Histogram(), Histogram()
        self.stored_blocks = 0
        self.evicted_blocks = {"capacity": 0, "expired": 0}
        self.refaults = Refaults(blocks)

    def hit(self, span: Span, now: int) -> None:
        """Take in a hit of `span` and all before it, which is not written down in them yet."""
        add = self.age_at_hit.add
        while span.parent is not None:
            add(now - span.last_access, span.end - span.start)
            span = span.parent

    def stored(self, span: Span, blocks: int) -> None:
        """Take in that the last `blocks` blocks of `span` were stored just now."""
        self.entered(span.path_keys, span.end - blocks, span.end, span.shape.ratio)

    def evicted(self, span: Span, blocks: int, now: int, reason: str) -> None:
        """Take in that the last `blocks` blocks of `span` are about to leave."""
        self.left(blocks, now - span.last_access, now - span.created, span.hits, reason)
        if reason == "capacity":
            end = span.end
            self.refaults.evicted(span.path_keys, end - blocks, end, span.shape.ratio)

    def entered(self, keys: Keys[Key], first: int, end: int, ratio: int) -> None:
        """Take in that the blocks `[first, end)` of a path were stored; a key has `ratio`."""
        self.stored_blocks += end - first
        self.refaults.stored(keys, first, end, ratio)

    def left(self, blocks: int, idle: int, lifetime: int, hits: int, reason: str) -> None:
        """Take in how long blocks had rested that leave: `capacity` or `expired` is why."""
        self.evicted_blocks[reason] += blocks
        self.age_at_eviction.add(idle, blocks)
        self.lifetime.add(lifetime, blocks)
        self.hits_at_eviction.add(hits, blocks)

    @property
    def restored_blocks(self) -> int:
        """Blocks stored again that had been evicted for room within a pool of evictions."""
        return self.refaults.blocks

    @property
    def never_hit_blocks(self) -> int:
        """Blocks that no other request had hit when they left."""
        return self.hits_at_eviction.at_most([0])[0]

    @property
    def thrashing(self) -> bool:
        """Whether the tier spends itself on bringing back what it has just evicted.

        All of these hold, in blocks:

        * a whole pool has been evicted for room, so that there is something to judge by;
        * of what was evicted, more than half had never been hit;
        * some came back within a pool of evictions (`restored_blocks`), and no fewer than
          were hit.

        The last says that of what was wanted twice at a distance that a pool of twice the
        size holds, at least half was gone: that pool would hit about twice as much. What is
        read once and never again evicts a lot, and comes back never: it is no thrashing.

        Source: thrashing is Denning's ("Thrashing: its causes and prevention", 1968). The
        distance is the refault distance of Linux (mm/workingset.c, Weiner, 2014): pages
        evicted between a page's own eviction and its return, compared with the memory there
        is; as in the ghost lists of ARC (Megiddo and Modha, 2003), as many are remembered as
        there are. The thresholds are kvcore's.
        """
        gone = sum(self.evicted_blocks.values())
        return (
            self.evicted_blocks["capacity"] >= self.blocks
            and 2 * self.never_hit_blocks > gone
            and self.restored_blocks >= max(self.age_at_hit.weight, 1)
        )

    def as_dict(self) -> dict[str, Any] | None:
        """Return what JSON says of it; None if nothing was hit, and nothing left."""
        if not (self.age_at_hit.weight or self.lifetime.weight):
            return None
        return {
            "age_at_hit_s": self.age_at_hit.as_dict(NANOSECONDS, AGES),
            "age_at_eviction_s": self.age_at_eviction.as_dict(NANOSECONDS, AGES),
            "lifetime_s": self.lifetime.as_dict(NANOSECONDS, AGES),
            "hits_at_eviction": self.hits_at_eviction.as_dict(1, COUNTS),
            "stored_blocks": self.stored_blocks,
            "restored_blocks": self.restored_blocks,
            "evicted_blocks": dict(self.evicted_blocks),
            "never_hit_blocks": self.never_hit_blocks,
            "thrashing": self.thrashing,
        }

    def by_tier(self) -> dict[str, Any] | None:
        """Return that under the name of the tier, or None."""
        rested = self.as_dict()
        return None if rested is None else {self.tier: rested}
