"""The built-in eviction policies."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred_plugins

if TYPE_CHECKING:
    from kvcore_plugins.eviction.arc import ARC
    from kvcore_plugins.eviction.cost import Cost
    from kvcore_plugins.eviction.fifo import FIFO
    from kvcore_plugins.eviction.hazard import Hazard
    from kvcore_plugins.eviction.lfu import LFU
    from kvcore_plugins.eviction.lookahead import Lookahead
    from kvcore_plugins.eviction.lru import LRU
    from kvcore_plugins.eviction.lruk import LRUK
    from kvcore_plugins.eviction.mru import MRU
    from kvcore_plugins.eviction.priority import Priority
    from kvcore_plugins.eviction.random import Random
    from kvcore_plugins.eviction.s3fifo import S3FIFO
    from kvcore_plugins.eviction.sieve import SIEVE
    from kvcore_plugins.eviction.slru import SLRU
    from kvcore_plugins.eviction.tail_lru import TailLRU
    from kvcore_plugins.eviction.tinylfu import TinyLFU
    from kvcore_plugins.eviction.tool_ttl import ToolTTL
    from kvcore_plugins.eviction.ttl import TTL
    from kvcore_plugins.eviction.workload_aware import WorkloadAware
else:
    from kvcore_plugins.hooks import kvcore_eviction_policies

    __getattr__, __dir__ = deferred_plugins(__name__, kvcore_eviction_policies())

__all__ = [
    "ARC",
    "FIFO",
    "LFU",
    "LRU",
    "LRUK",
    "MRU",
    "S3FIFO",
    "SIEVE",
    "SLRU",
    "TTL",
    "Cost",
    "Hazard",
    "Lookahead",
    "Priority",
    "Random",
    "TailLRU",
    "TinyLFU",
    "ToolTTL",
    "WorkloadAware",
]
