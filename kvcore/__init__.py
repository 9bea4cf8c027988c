"""kvcore: a plugin framework and workbench for the KV cache of LLM serving."""

from importlib import import_module

TYPE_CHECKING = False  # without `typing`, whose import takes longer than this one
if TYPE_CHECKING:
    from typing import Any

    from kvcore.api import compare, plan, run, simulate, simulate_cluster, validate
    from kvcore.cache import (
        EvictionPolicy,
        KVCache,
        PrefixIndex,
        RetentionPolicy,
        ScoreEviction,
        Span,
    )
    from kvcore.cluster import Replica, Router
    from kvcore.engine import Backend, Codec, Generator
    from kvcore.engine.retention import ScoreRetention
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
    from kvcore.serving.drafter import Drafter
    from kvcore.tiers import Tier
    from kvcore.trace import Trace
    from kvcore.workloads import Workload

_CALLS = ("compare", "plan", "run", "simulate", "simulate_cluster", "validate")

_ROOMS = (
    *("errors", "request", "plugins", "hookspecs", "workloads", "cache", "trace", "serving"),
    *("engine", "engine.retention", "tiers", "cluster", "serving.drafter"),
)
"""Where all but the calls are defined, lower rooms first."""

__all__ = [
    "SLO",
    "Backend",
    "Codec",
    "Drafter",
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
    "Replica",
    "Request",
    "RetentionPolicy",
    "Router",
    "Scheduler",
    "ScoreEviction",
    "ScoreRetention",
    "Span",
    "StorageError",
    "Tier",
    "Trace",
    "TraceError",
    "Workload",
    "compare",
    "hookimpl",
    "plan",
    "run",
    "simulate",
    "simulate_cluster",
    "validate",
]


def __getattr__(name: str) -> "Any":
    """Return a name of the front door, whose room is imported when it is first asked for."""
    if name in _ROOMS:
        return import_module(f"kvcore.{name}")
    if name in __all__:
        for room in ("api",) if name in _CALLS else _ROOMS:
            found = getattr(import_module(f"kvcore.{room}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
    msg = f"module 'kvcore' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
