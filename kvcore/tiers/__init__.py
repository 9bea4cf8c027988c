"""Tiers: storage for K/V outside the pool, and the transfers between them."""

from kvcore.tiers.tier import StoredBlock, Tier, TierStore, WriteRule, bandwidth

__all__ = ["StoredBlock", "Tier", "TierStore", "WriteRule", "bandwidth"]
