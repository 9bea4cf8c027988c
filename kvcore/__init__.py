"""kvcore: a plugin framework and workbench for the KV cache of LLM serving."""

from kvcore.api import compare, run, simulate
from kvcore.cache import (
    EvictionPolicy,
    KVCache,
    PrefixIndex,
    RetentionPolicy,
    ScoreEviction,
    Span,
)
from kvcore.engine import Backend, Generator
from kvcore.errors import (
    InputError,
    KvcoreError,
    OutOfBlocks,
    PluginError,
    PolicyError,
    StorageError,
    TraceError,
)
from kvcore.hookspecs import hookimpl
from kvcore.plugins import Plugins
from kvcore.request import SLO, Request
from kvcore.serving import Job, LatencyModel, Scheduler
from kvcore.trace import Trace
from kvcore.workloads import Workload

__all__ = [
    "SLO",
    "Backend",
    "EvictionPolicy",
    "Generator",
    "InputError",
    "Job",
    "KVCache",
    "KvcoreError",
    "LatencyModel",
    "OutOfBlocks",
    "PluginError",
    "Plugins",
    "PolicyError",
    "PrefixIndex",
    "Request",
    "RetentionPolicy",
    "Scheduler",
    "ScoreEviction",
    "Span",
    "StorageError",
    "Trace",
    "TraceError",
    "Workload",
    "compare",
    "hookimpl",
    "run",
    "simulate",
]
