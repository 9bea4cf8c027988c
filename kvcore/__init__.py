"""kvcore: a plugin framework and workbench for the KV cache of LLM serving.

This package is the core: how a request is served, and the contract (the base class) of every
kind of plugin. All else is in packages of `plugins/`, which add to the core by hooks. Begin
with `request.py`, then `cache` and `serving`, the mechanism itself; `plugins` and `config` make
the parts of a run from options; in `api.py` a run begins, as in `kvcore_cli`, the command line.
"""

import sys
from importlib import import_module
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # without `typing`, whose import takes longer than this one
if TYPE_CHECKING:
    from typing import Any

    from kvcore.api import simulate
    from kvcore.cache import (
        CheckpointPolicy,
        EvictionPolicy,
        KVCache,
        PrefixIndex,
        RetentionPolicy,
        ScoreEviction,
        Segment,
        Span,
    )
    from kvcore.cache.tiers import Tier
    from kvcore.engine import Backend, Codec, Generator
    from kvcore.errors import (
        InputError,
        KvcoreError,
        OutOfBlocks,
        PluginError,
        PolicyError,
        StorageError,
        TraceError,
    )
    from kvcore.hookspecs import Mode, Ran, Running, Verb, hookimpl
    from kvcore.plugins import Plugins
    from kvcore.request import SLO, Request
    from kvcore.serving import Job, LatencyModel, Rules, Scheduler
    from kvcore.serving.drafter import Drafter
    from kvcore.serving.router import Replica, Router
    from kvcore.trace import Trace
    from kvcore.workloads import Workload
    from kvcore_cli.main import main
    from kvcore_cluster.api import simulate_cluster
    from kvcore_engine.api import run
    from kvcore_engine.retention.token_retention import ScoreRetention
    from kvcore_hosting.groups import HostedGroups
    from kvcore_lab.api import compare, find_capacity, plan, plan_devices, sweep
    from kvcore_lab.contiguous.fragmentation import MeasuredAllocator, Occupancy
    from kvcore_lab.curves.mrc import curve
    from kvcore_lab.measured.validation import validate
    from kvcore_lab.report.notebook import report_html, report_on, report_text
    from kvcore_lab.router_comparison import compare_routers
    from kvcore_plugins.cache_groups import GroupedCache, LayerGroup, groups_of
    from kvcore_plugins.drafter.speculation import Speculation, SpeculativeSimulator
    from kvcore_plugins.load import Saturation, load_of, saturation_of
    from kvcore_plugins.models.huggingface import read_config
    from kvcore_plugins.traces.reader import read_events
    from kvcore_replay.misses.explain import explain
    from kvcore_replay.recorded.config import recorded_config
    from kvcore_replay.what_if import whatif
    from kvcore_tiers.grouped import GroupTiers
    from kvcore_tiers.hierarchy import Tiers

_MODULES = {
    "kvcore.api": "simulate",
    "kvcore.cache": "CheckpointPolicy EvictionPolicy KVCache PrefixIndex RetentionPolicy "
    "ScoreEviction Segment Span",
    "kvcore.cache.tiers": "Tier",
    "kvcore.engine": "Backend Codec Generator",
    "kvcore.errors": "InputError KvcoreError OutOfBlocks PluginError PolicyError StorageError "
    "TraceError",
    "kvcore.hookspecs": "Mode Ran Running Verb hookimpl",
    "kvcore.plugins": "Plugins",
    "kvcore.request": "SLO Request",
    "kvcore.serving": "Job LatencyModel Rules Scheduler",
    "kvcore.serving.drafter": "Drafter",
    "kvcore.serving.router": "Replica Router",
    "kvcore.trace": "Trace",
    "kvcore.workloads": "Workload",
    # Of packages, which only this table and `hooks.py` of each of them name.
    "kvcore_plugins.cache_groups": "GroupedCache LayerGroup groups_of",
    "kvcore_plugins.drafter.speculation": "Speculation SpeculativeSimulator",
    "kvcore_plugins.load": "Saturation load_of saturation_of",
    "kvcore_plugins.models.huggingface": "read_config",
    "kvcore_plugins.traces.reader": "read_events",
    "kvcore_cli.main": "main",
    "kvcore_replay.recorded.config": "recorded_config",
    "kvcore_replay.what_if": "whatif",
    "kvcore_replay.misses.explain": "explain",
    "kvcore_engine.retention.token_retention": "ScoreRetention",
    "kvcore_lab.report.notebook": "report_html report_on report_text",
    "kvcore_tiers.grouped": "GroupTiers",
    "kvcore_tiers.hierarchy": "Tiers",
    "kvcore_hosting.groups": "HostedGroups",
    "kvcore_cluster.api": "simulate_cluster",
    "kvcore_engine.api": "run",
    "kvcore_lab.api": "compare find_capacity plan plan_devices sweep",
    "kvcore_lab.contiguous.fragmentation": "MeasuredAllocator Occupancy",
    "kvcore_lab.curves.mrc": "curve",
    "kvcore_lab.measured.validation": "validate",
    "kvcore_lab.router_comparison": "compare_routers",
}
"""Names of the front door by the module that defines them, imported when it is first needed."""

_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "SLO",
    "Backend",
    "CheckpointPolicy",
    "Codec",
    "Drafter",
    "EvictionPolicy",
    "Generator",
    "GroupTiers",
    "GroupedCache",
    "HostedGroups",
    "InputError",
    "Job",
    "KVCache",
    "KvcoreError",
    "LatencyModel",
    "LayerGroup",
    "MeasuredAllocator",
    "Mode",
    "Occupancy",
    "OutOfBlocks",
    "PluginError",
    "Plugins",
    "PolicyError",
    "PrefixIndex",
    "Ran",
    "Replica",
    "Request",
    "RetentionPolicy",
    "Router",
    "Rules",
    "Running",
    "Saturation",
    "Scheduler",
    "ScoreEviction",
    "ScoreRetention",
    "Segment",
    "Span",
    "Speculation",
    "SpeculativeSimulator",
    "StorageError",
    "Tier",
    "Tiers",
    "Trace",
    "TraceError",
    "Verb",
    "Workload",
    "compare",
    "compare_routers",
    "curve",
    "explain",
    "find_capacity",
    "groups_of",
    "hookimpl",
    "load_of",
    "main",
    "plan",
    "plan_devices",
    "read_config",
    "read_events",
    "recorded_config",
    "report_html",
    "report_on",
    "report_text",
    "run",
    "saturation_of",
    "simulate",
    "simulate_cluster",
    "sweep",
    "validate",
    "whatif",
]


def __getattr__(name: str) -> "Any":
    """Return a name of the front door, or a module, imported when it is first asked for."""
    if name in _PLACES:
        value = globals()[name] = getattr(_load(f"kvcore.{name}", _PLACES[name]), name)
        return value
    msg, module = f"module 'kvcore' has no attribute {name!r}", f"kvcore.{name}"
    if name.startswith("__"):
        raise AttributeError(msg)
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    from kvcore.plugins.options import nearest  # noqa: PLC0415 - for errors alone

    longer = [known for known in __all__ if name in known.split("_")]
    raise AttributeError(msg + (nearest(name, longer, 0) or nearest(name, __all__)))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load(name: str, module: str) -> "Any":
    """Return the module that has what a name means, or say that it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            from kvcore.plugins._installation import outdated  # noqa: PLC0415 - for errors alone

            parts = (f"{name} is in {module}, which is not installed", outdated(None))
            text = "; ".join(filter(None, parts))
            raise ModuleNotFoundError(text, name=error.name) from None
        raise


class _Finder:
    """Finds modules of kvcore, those of the release before by the table of `kvcore.moved`.

    The first finder, since a folder that only holds `__pycache__` now would be a namespace.
    """

    @staticmethod
    def find_spec(name: str, path: "Any" = None, _target: "Any" = None) -> "Any":
        """Return the spec of a module of kvcore, as it is or as it was, or None."""
        if not name.startswith(("kvcore.", "kvcore_plugins.")):
            return None
        package = name.rpartition(".")[0]
        if sys.modules[package].__name__ == package:  # not below an alias
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.origin is not None:
                return spec
        return import_module("kvcore.moved").find_spec(name)


sys.meta_path.insert(0, _Finder)
