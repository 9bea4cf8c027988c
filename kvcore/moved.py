"""Names that rooms had in the release before, and where they are now, for one release.

Beside `kvcore/__init__.py` this is the only file of the core that names what is in packages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

MOVED = {
    "kvcore.api": {
        "kvcore": "compare find_capacity plan run simulate_cluster validate",
        "kvcore.config.cluster_options": "ClusterOptions",
        "kvcore.config.engine_options": "EngineOptions",
    },
    "kvcore.cluster": {
        "kvcore.cluster.cluster": "Cluster Failure",
        "kvcore.cluster.dispatcher": "Dispatcher PrefixView",
        "kvcore.cluster.result": "ClusterResult",
        "kvcore.cluster.simulate": "simulate_cluster",
        "kvcore.cluster.views": "parse_view",
    },
    "kvcore.config": {"kvcore.config.engine": "EngineParts"},
    "kvcore.engine": {
        "kvcore.engine.compaction": "Compactor",
        "kvcore.engine.drafter": "Draft DraftSequence TokenDrafter",
        "kvcore.engine.retention": "HeldTokens Reads ScoreRetention TokenRetention",
    },
    "kvcore.kv_events": {
        "kvcore.kv_events.export": "ExportSize MooncakeRows block_hash "
        "dynamo_batches event_batches write_lines",
    },
    "kvcore.serving.calibration": {
        "kvcore.serving.measured_steps": "write_steps",
    },
    "kvcore.tiers": {
        "kvcore.tiers.hierarchy": "Load Tiers",
        "kvcore.tiers.level": "Level Mover Part TierStats path_ids",
        "kvcore.tiers.link": "InstantLink Link",
    },
    "kvcore.trace": {
        "kvcore.trace.check": "Report check_trace replay",
        "kvcore.trace.replicas": "ServerReader",
        "kvcore.trace.residency": "rebuild_residency",
        "kvcore.trace.server_check": "TraceChecker",
        "kvcore.trace.state": "CacheState",
    },
    "kvcore_plugins.drafter": {
        "kvcore_plugins.drafter.draft_model": "DraftModel",
        "kvcore_plugins.drafter.medusa": "Medusa",
        "kvcore_plugins.drafter.prompt_lookup": "PromptLookup",
    },
    "kvcore_plugins.retention": {
        "kvcore_plugins.retention.expected": "Expected",
        "kvcore_plugins.retention.h2o": "H2O",
        "kvcore_plugins.retention.knorm": "KNorm",
        "kvcore_plugins.retention.random": "Random",
        "kvcore_plugins.retention.snapkv": "SnapKV",
        "kvcore_plugins.retention.tova": "TOVA",
        "kvcore_plugins.retention.window": "Window",
    },
    "kvcore_plugins.workload": {"kvcore_plugins.workload.kv_events": "KvEvents"},
}
"""By room, the modules that define the names which it exported before."""


def former(room: str, stacklevel: int = 2) -> Callable[[str], Any]:
    """Return the `__getattr__` of a room: a name that it had is found, with a FutureWarning.

    `stacklevel` is that of the warning: 3 where `deferred` calls the function.
    """
    modules = {name: new for new, names in MOVED[room].items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in modules:
            msg = f"module {room!r} has no attribute {name!r}"
            raise AttributeError(msg)
        text = f"{room}.{name} is {modules[name]}.{name} now; import that"
        warnings.warn(text, FutureWarning, stacklevel=stacklevel)
        return getattr(import_module(modules[name]), name)

    return get
