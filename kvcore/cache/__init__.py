"""The KV cache: pool, sequences, spans; eviction, prefix, retention and tier contracts.

To read, in this order:

    span.py, sequence.py    cached blocks with one history; the blocks of one request
    layout.py, pool.py      prompts as blocks; which blocks are free
    kvcache.py              open, extend, commit, close: what the serving loop calls
    tree.py                 matches, pins, splits and evicts spans
    eviction.py, prefix.py  the contracts that the tree calls; ready parts of policies
    retention.py            the contract of policies that drop blocks of open sequences
    tiers.py                the contract of tiers, and the calls of a cache to what lies below
    hints.py, pins.py       what requests ask for: priorities, expiry, pins
    recorder.py             every decision as a call, for traces
    checkpoint.py           the contract of policies of where windows and states are kept
    served.py               the calls of any cache that serving makes; plans of other caches
    residency.py            statistics: hits, and how long blocks stay
    integrity.py            all invariants in one place
"""

from typing import TYPE_CHECKING

from kvcore.cache.eviction import EvictionPolicy, LazyHeap, ScoreEviction
from kvcore.cache.kvcache import KVCache
from kvcore.cache.layout import BlockLayout, PromptBlocks, common_prefix
from kvcore.cache.pool import BlockPool, CountingPool, Ids
from kvcore.cache.prefix import PrefixIndex, PrefixMatch
from kvcore.cache.recorder import Recorder
from kvcore.cache.residency import Residency
from kvcore.cache.retention import RetentionPolicy
from kvcore.cache.sequence import Sequence
from kvcore.cache.served import LayerPlan, ServedCache
from kvcore.cache.span import Span
from kvcore.cache.tree import SpanTree
from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore.cache.checkpoint import CheckpointPolicy, Segment
else:  # of cache groups alone
    __getattr__, __dir__ = deferred(__name__, {"checkpoint": "CheckpointPolicy Segment"})

__all__ = [
    "BlockLayout",
    "BlockPool",
    "CheckpointPolicy",
    "CountingPool",
    "EvictionPolicy",
    "Ids",
    "KVCache",
    "LayerPlan",
    "LazyHeap",
    "PrefixIndex",
    "PrefixMatch",
    "PromptBlocks",
    "Recorder",
    "Residency",
    "RetentionPolicy",
    "ScoreEviction",
    "Segment",
    "Sequence",
    "ServedCache",
    "Span",
    "SpanTree",
    "common_prefix",
]
