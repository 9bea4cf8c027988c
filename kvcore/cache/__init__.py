"""Blocks, block tables, pins: the mechanics of the KV cache."""

from kvcore.cache.kvcache import KVCache
from kvcore.cache.pool import BlockPool, CountingPool, Ids
from kvcore.cache.residency import Residency
from kvcore.cache.sequence import Sequence

__all__ = ["BlockPool", "CountingPool", "Ids", "KVCache", "Residency", "Sequence"]
