"""Blocks, block tables, pins: the mechanics of the KV cache."""

from kvcore.cache.eviction import EvictionPolicy, LazyHeap, ScoreEviction
from kvcore.cache.ghost import GhostTree
from kvcore.cache.kvcache import KVCache
from kvcore.cache.pool import BlockPool, CountingPool, Ids
from kvcore.cache.prefix import Match, PrefixCache
from kvcore.cache.recorder import Recorder
from kvcore.cache.residency import Residency
from kvcore.cache.retention import RetentionPolicy
from kvcore.cache.sequence import Sequence
from kvcore.cache.span import Span, SpanGeometry, common_prefix, root_span

__all__ = [
    "BlockPool",
    "CountingPool",
    "EvictionPolicy",
    "GhostTree",
    "Ids",
    "KVCache",
    "LazyHeap",
    "Match",
    "PrefixCache",
    "Recorder",
    "Residency",
    "RetentionPolicy",
    "ScoreEviction",
    "Sequence",
    "Span",
    "SpanGeometry",
    "common_prefix",
    "root_span",
]
