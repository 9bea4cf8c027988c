"""Tiers: levels of K/V storage below the pool, in host memory, on disk, or in Redis."""
