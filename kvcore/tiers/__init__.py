"""Tiers: where K/V rests outside the pool, and how it moves."""

from kvcore.tiers.hierarchy import Level, Load, Mover, Part, Tiers, TierStats, path_ids
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
