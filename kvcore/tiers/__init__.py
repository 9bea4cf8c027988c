"""Tiers: storage for K/V outside the pool, and the transfers between them."""

from kvcore.lazy import former
from kvcore.tiers.tier import StoredBlock, Tier, TierStore, WriteRule, bandwidth

__all__ = ["StoredBlock", "Tier", "TierStore", "WriteRule", "bandwidth"]

__getattr__ = former(__name__)
