"""Registers the built-in eviction policies."""

from __future__ import annotations

from kvcore import EvictionPolicy
from kvcore.hookspecs import hookimpl
from kvcore_plugins.eviction.cost import Cost
from kvcore_plugins.eviction.fifo import FIFO
from kvcore_plugins.eviction.lfu import LFU
from kvcore_plugins.eviction.lru import LRU
from kvcore_plugins.eviction.mru import MRU
from kvcore_plugins.eviction.priority import Priority
from kvcore_plugins.eviction.random import Random
from kvcore_plugins.eviction.slru import SLRU
from kvcore_plugins.eviction.ttl import TTL


@hookimpl
def kvcore_eviction_policies() -> list[type[EvictionPolicy]]:
    """Return the built-in eviction policies."""
    return [Cost, FIFO, LFU, LRU, MRU, Priority, Random, SLRU, TTL]
