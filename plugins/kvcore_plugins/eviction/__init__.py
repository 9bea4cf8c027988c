"""The built-in eviction policies."""

from kvcore_plugins.eviction.cost import Cost
from kvcore_plugins.eviction.fifo import FIFO
from kvcore_plugins.eviction.lfu import LFU
from kvcore_plugins.eviction.lru import LRU
from kvcore_plugins.eviction.mru import MRU
from kvcore_plugins.eviction.priority import Priority
from kvcore_plugins.eviction.random import Random
from kvcore_plugins.eviction.slru import SLRU
from kvcore_plugins.eviction.ttl import TTL

__all__ = ["FIFO", "LFU", "LRU", "MRU", "SLRU", "TTL", "Cost", "Priority", "Random"]
