"""Names of the release before, and where they are now, for one release.

A module that has moved is still imported by its former name: it is then an empty module, which
imports what is asked of it from the module of today, with a FutureWarning. The conformance kits
keep their former name, without a warning.

Beside `kvcore/__init__.py` this is the only file of the core that names what is in packages.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module, machinery, util
from importlib.abc import Loader
from types import ModuleType
from typing import Any

from kvcore import _load

ALIASES = {"kvcore.testing": "kvcore_testing"}
"""Packages that are imported by another name too, with their modules."""

MODULES: dict[str, dict[str, str]] = {}
"""By former package, then by package of today, the modules that moved: `old=new` if renamed."""

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
"""By room, the modules that define the names which it exported before, as in `MODULES`."""


def former(module: str, name: str) -> Any:
    """Return what a name of a module was in the release before.

    Called by the `__getattr__` of the module. Whoever asked for the name gets a FutureWarning:
    one, although `from module import name` asks twice, since the module keeps the value.

    Raises:
        AttributeError: the module had no such name.
        ImportError: the package that has it now is not installed.
    """
    old = f"{module}.{name}"
    package, _, base = module.rpartition(".")
    home = _moved(MODULES, package).get(base)
    new = _moved(MOVED, module).get(name)
    if new is None:
        if find_spec(old):
            return import_module(old)
        if home is None or name.startswith("__"):
            msg = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(msg)
        new = f"{home}.{name}"
    home, _, attribute = new.rpartition(".")
    value = getattr(_load(old, home), attribute)
    warnings.warn(f"{old} is {new} now; import that", FutureWarning, stacklevel=3)
    setattr(sys.modules[module], name, value)
    return value


def _moved(table: dict[str, dict[str, str]], room: str) -> dict[str, str]:
    """Return the full names of today of what has moved out of a room, by its name there."""
    return {
        old: f"{home}.{new or old}"
        for home, names in table.get(room, {}).items()
        for old, _, new in (name.partition("=") for name in names.split())
    }


def find_spec(name: str) -> machinery.ModuleSpec | None:
    """Return the spec of a module by its former name or an alias; None if there is none."""
    package, _, base = name.rpartition(".")
    real = ALIASES.get(name, f"{sys.modules[package].__name__}.{base}")
    if real == name:
        new = _moved(MODULES, package).get(base)
        if new or name in MODULES or name in MOVED:
            return machinery.ModuleSpec(name, _Former(), origin=new, is_package=name in MODULES)
    elif spec := util.find_spec(real):
        folders = spec.submodule_search_locations
        return util.spec_from_file_location(
            name, spec.origin, loader=_Alias(real), submodule_search_locations=folders
        )
    elif name in ALIASES:  # whose import says what is not installed
        return machinery.ModuleSpec(name, _Alias(real))
    return None


class _Former(Loader):
    """Makes a module of the release before, whose names are found when they are asked for."""

    def exec_module(self, module: ModuleType) -> None:
        name, own = module.__name__, vars(module)
        own["__getattr__"] = lambda attribute: former(name, attribute)
        own["__dir__"] = lambda: {*own, *_moved(MOVED, name), *_moved(MODULES, name)}


class _Alias(Loader):
    """Gives a module of today a second name: the module itself, never a copy."""

    def __init__(self, real: str) -> None:
        self._real = real

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = _load(module.__name__, self._real)

    def get_code(self, _: str) -> Any:
        """Return the code that `python -m` runs."""
        spec: Any = util.find_spec(self._real)
        return spec.loader.get_code(self._real)
