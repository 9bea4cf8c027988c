"""kvcore: a plugin framework and workbench for the KV cache of LLM serving."""

from kvcore.cache import BlockPool, CountingPool, Ids, KVCache, Sequence
from kvcore.errors import (
    InputError,
    KvcoreError,
    OutOfBlocks,
    PluginError,
    PolicyError,
    StorageError,
    TraceError,
)
from kvcore.keys import block_keys
from kvcore.plugins import Plugins
from kvcore.policy import (
    EvictionPolicy,
    Match,
    PrefixCache,
    Recorder,
    ScoreEviction,
    Shape,
    Span,
    Workload,
    broken,
    overridden,
    root_span,
)
from kvcore.request import DEFAULT_PRIORITY, Key, Request, Retention
from kvcore.trace import Trace

__all__ = [
    "DEFAULT_PRIORITY",
    "BlockPool",
    "CountingPool",
    "EvictionPolicy",
    "Ids",
    "InputError",
    "KVCache",
    "Key",
    "KvcoreError",
    "Match",
    "OutOfBlocks",
    "PluginError",
    "Plugins",
    "PolicyError",
    "PrefixCache",
    "Recorder",
    "Request",
    "Retention",
    "ScoreEviction",
    "Sequence",
    "Shape",
    "Span",
    "StorageError",
    "Trace",
    "TraceError",
    "Workload",
    "block_keys",
    "broken",
    "overridden",
    "root_span",
]
