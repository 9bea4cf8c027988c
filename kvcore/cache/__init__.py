"""The KV cache: pool, sequences, spans; eviction, prefix, retention and tier contracts."""

from kvcore.cache.eviction import EvictionPolicy, LazyHeap, ScoreEviction
from kvcore.cache.kvcache import KVCache
from kvcore.cache.layout import BlockLayout, PromptBlocks, common_prefix
from kvcore.cache.pool import BlockPool, CountingPool, Ids
from kvcore.cache.prefix import PrefixIndex, PrefixMatch
from kvcore.cache.recorder import Recorder
from kvcore.cache.residency import Residency
from kvcore.cache.retention import RetentionPolicy
from kvcore.cache.sequence import Sequence
from kvcore.cache.span import Span
from kvcore.cache.tree import SpanTree
from kvcore.lazy import former

__all__ = [
    "BlockLayout",
    "BlockPool",
    "CountingPool",
    "EvictionPolicy",
    "Ids",
    "KVCache",
    "LazyHeap",
    "PrefixIndex",
    "PrefixMatch",
    "PromptBlocks",
    "Recorder",
    "Residency",
    "RetentionPolicy",
    "ScoreEviction",
    "Sequence",
    "Span",
    "SpanTree",
    "common_prefix",
]

__getattr__ = former(__name__)
