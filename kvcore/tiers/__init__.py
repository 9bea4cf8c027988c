"""Tiers: storage for K/V outside the pool, and the transfers between them."""

from kvcore.cache.tiers import StoredBlock, Tier, TierStore, WriteRule, bandwidth
from kvcore.moved import former

__all__ = ["StoredBlock", "Tier", "TierStore", "WriteRule", "bandwidth"]

__getattr__ = former(__name__)
