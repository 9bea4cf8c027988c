"""Tiers: storage for K/V outside the pool, and the transfers between them."""

from kvcore.tiers.hierarchy import Load, Tiers
from kvcore.tiers.level import Level, Mover, Part, TierStats, path_ids
from kvcore.tiers.tier import (
    InstantLink,
    Link,
    StoredBlock,
    Tier,
    TierStore,
    WriteRule,
    bandwidth,
)

__all__ = [
    "InstantLink",
    "Level",
    "Link",
    "Load",
    "Mover",
    "Part",
    "StoredBlock",
    "Tier",
    "TierStats",
    "TierStore",
    "Tiers",
    "WriteRule",
    "bandwidth",
    "path_ids",
]
