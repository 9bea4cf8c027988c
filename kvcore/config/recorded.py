"""Build the parts of a recorded run again, from the header of its trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from kvcore.cache import KVCache, Recorder
from kvcore.config.parts import RunParts
from kvcore.config.run_config import RunConfig, read_plugin
from kvcore.errors import InputError, KvcoreError, PluginError
from kvcore.models.catalogue import find_model
from kvcore.models.cost import PrefillCost, read_cost
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.plugins import Plugin, Plugins, describe
from kvcore.plugins.options import Spec, as_text, takes_path
from kvcore.request import SLO
from kvcore.serving import Batching, LatencyModel
from kvcore.trace.fields import plain, slo_field, slo_of
from kvcore.workloads import Workload

OF_CACHES = ("eviction", "prefix", "retention")

OF_SERVERS = ("scheduler", "latency")

OPTIONAL = ("drafter",)

OF_CLUSTERS = ("replicas", "routing")
"""Fields of the header that no server by itself has."""

TIMED = (*OF_SERVERS, *OPTIONAL, "batching", *attrs.fields_dict(Batching), "slo", "rate_scale")
"""Options that only a run with a clock has."""


def recorded_config(
    file: Path, header: Mapping[str, Any], workload: Workload, plugins: Plugins
) -> RunConfig:
    """Return the configuration of the run that wrote the header of a trace.

    Args:
        file: the trace, named in errors.
        header: its first line. No file is opened because it stands there.
        workload: the requests of the trace.
        plugins: where the recorded plugins are looked up, when they are built.

    Raises:
        InputError: the header does not say enough, or what no run can have.
    """
    timed = header["mode"] != "untimed"
    _check_header(file, header, timed=timed)
    return RunConfig(
        mode="simulate" if timed else "compare",
        workload=workload,
        accounting=header["count"],
        block_size=header["block_size"],
        slo=slo_of(header["slo"]) if header.get("slo") else SLO(),
        rate_scale=header.get("rate_scale", 1),
        seed=header["seed"],
        **_of_server(file, header, plugins),
        **(_of_cluster(file, header, plugins) if "replicas" in header else {}),
    )


def _of_server(file: Path, header: Mapping[str, Any], plugins: Plugins) -> dict[str, Any]:
    """Return the options of one server, which the replicas of a cluster may have too."""
    recorded: dict[str, Any] = {
        kind: partial(_rebuilt, file, kind, recorded, plugins)
        for kind, recorded in header["plugins"].items()
        if kind in (*OF_CACHES, *OF_SERVERS, *OPTIONAL)
    }
    deployment = _deployment(header)
    if "codec" in deployment:
        _check_codec(file, deployment["codec"], plugins)
    try:
        caps = attrs.asdict(Batching(**header.get("batching", {})))
    except TypeError as error:
        raise _no_batching(file, header["batching"], error) from error
    tiers = header.get("tiers", ())
    return {
        "blocks": header["blocks"] + caps["null_block"],
        "tier": tuple(partial(_rebuilt_tier, file, tier, plugins) for tier in tiers),
        **deployment,
        **caps,
        **recorded,
    }


def _of_cluster(file: Path, header: Mapping[str, Any], plugins: Plugins) -> dict[str, Any]:
    """Return the options of a cluster: its replicas, and what divides requests among them."""
    routing, router = header.get("routing", {}), header["plugins"].get("router")
    if router is None or not {"view", "fail"} <= routing.keys():
        msg = f"{file}: the header says nothing of the routing, so it cannot be made again"
        raise InputError(msg)
    tables = [
        {"count": count, **(_of_server(file, own, plugins) if own != alone else {})}
        for alone in [next(own for _, own in replica_groups(header))]
        for count, own in replica_groups(header)
    ]
    planner = routing.get("autoscale")
    return {
        "replicas": tables[0]["count"] if len(tables) == 1 else tables,
        "router": partial(_rebuilt, file, "router", router, plugins),
        "view": routing["view"],
        "fail": routing["fail"],
        "autoscale": planner and str(Spec(planner["name"], _texts(planner["options"]))),
        "disaggregate": routing.get("disaggregate"),
    }


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: as_text(value) for name, value in options.items() if value is not None}


def replica_groups(header: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return the groups of identical replicas in a header: their numbers and their record."""
    alone = {name: value for name, value in header.items() if name not in OF_CLUSTERS}
    plugins = {kind: each for kind, each in header["plugins"].items() if kind != "router"}
    alone["plugins"] = plugins
    return [
        (record["count"], {**alone, **{k: v for k, v in record.items() if k != "count"}})
        for record in header.get("replicas", ({"count": 1},))
    ]


def _deployment(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a header says of the deployment, by option."""
    model, device = (_fields(header.get(name)) for name in ("model", "device"))
    recorded = header["plugins"].get("latency", {}).get("options", {})
    found = {
        "model": _value(recorded.get("model", model.get("name"))),
        "codec": model.get("codec", model.get("kv_dtype")),
        "device": device.get("name"),
        "tensor_parallel": device.get("count"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _check_header(file: Path, header: Mapping[str, Any], *, timed: bool) -> None:
    """Refuse a header that does not say enough to make the run again."""
    if header["mode"] == "wall":
        msg = (
            f"{file} was recorded by the wall clock, which nothing can run again, so there "
            "is nothing to put beside it. Its requests can be run under the model's: "
            "`kvcore simulate trace:FILE`, with and without what is to be different"
        )
        raise InputError(msg)
    if not timed:
        return
    needed = [name for name in ("batching", "latency") if name not in header]
    needed += [kind for kind in OF_SERVERS if kind not in header["plugins"]]
    if needed:
        msg = (
            f"{file}: the header says nothing of the {needed[0]}, so the run cannot be "
            "made again; traces of `kvcore simulate` and `run` do"
        )
        raise InputError(msg)


def _no_batching(file: Path, caps: Mapping[str, Any], error: Exception) -> InputError:
    known = ", ".join(attrs.fields_dict(Batching))
    return InputError(f"{file}: batching {caps} cannot be: {error}. There are: {known}")


def _rebuilt(file: Path, kind: str, recorded: Mapping[str, Any], plugins: Plugins) -> Plugin:
    """Build the plugin of `kind` that a header names, with the options it had."""
    name, options = recorded["name"], dict(recorded["options"])
    if name not in plugins.names(kind):
        known = ", ".join(plugins.names(kind))
        msg = (
            f"{file} was recorded with {kind} plugin {name!r}, which is not "
            "installed here: install the distribution that has it, or take another: "
            f"--{kind} NAME. There are: {known}"
        )
        raise PluginError(msg)
    cls = plugins.get(kind, name)
    _refuse_paths(file, cls, options)
    for old in options.keys() & cls.renamed_options.keys():
        options[cls.renamed_options[old]] = options.pop(old)
    try:
        if kind == "latency" and "codec" in options:
            _check_codec(file, options["codec"], plugins)
            options["codec"] = str(plugins.build("codec", options["codec"]))
        # Text is read as the command line is, which knows infinities.
        texts = {key: value for key, value in options.items() if isinstance(value, str)}
        others = {key: _value(options[key]) for key in options.keys() - texts}
        plugin: Plugin = plugins.build(kind, Spec(name, texts), others)
    except PluginError:
        raise
    except KvcoreError as error:
        msg = f"{file}: {kind} plugin {name!r} cannot be built as recorded: {error}"
        raise InputError(msg) from error
    now = plain(plugin.options())
    if now != now | options:
        msg = (
            f"{file}: {kind} plugin {name!r} was recorded with options {options}, of "
            f"which this version makes {now}. Give it anew: --{kind} "
            f"{name}:option=value"
        )
        raise InputError(msg)
    return plugin


def _rebuilt_tier(file: Path, recorded: Mapping[str, Any], plugins: Plugins) -> Plugin:
    """Build a tier that a header names, to be simulated: without the paths that it had."""
    name, options = recorded["name"], dict(recorded["options"])
    if name in plugins.names("tier"):
        cls = plugins.get("tier", name)
        options = {k: v for k, v in options.items() if v is None or not takes_path(cls, k)}
    eviction = read_plugin(str(options.get("eviction", "lru")))
    if eviction.name in plugins.names("eviction"):
        _refuse_paths(file, plugins.get("eviction", eviction.name), eviction.options)
    return _rebuilt(file, "tier", {"name": name, "options": options}, plugins)


def _check_codec(file: Path, codec: Any, plugins: Plugins) -> None:
    """Refuse a recorded codec that text cannot name, or whose options are paths."""
    spec = read_plugin(str(codec))
    if spec.name in plugins.names("codec"):
        _refuse_paths(file, plugins.get("codec", spec.name), spec.options)


def _refuse_paths(file: Path, cls: type[Plugin], options: Mapping[str, Any]) -> None:
    """Refuse options that are paths: no file is opened because a trace names it."""
    for key, value in options.items():
        if isinstance(value, str) and takes_path(cls, key):
            kind, name = cls.kind, cls.name
            msg = (
                f"{file} was recorded with {kind} plugin {name!r} and its {key}={value!r}: no "
                f"file is opened because a trace names it. Name it yourself: --{kind} "
                f"{name}:{key}=FILE"
            )
            raise InputError(msg)


class RecordedParts(RunParts):
    """The parts of a recorded run that is made again, some of them different.

    Args:
        file: the trace, named in errors.
        header: its first line.
        workload: the requests of the trace.
        changes: options of `RunConfig` that are to be different. A block size without a
            number of blocks keeps the memory of the pool. `batching` is a `Batching`, or
            those of its caps that differ.
        plugins: where names are looked up; None: what is installed.

    Attributes:
        config: the configuration with the changes.
        timed: whether the run has a clock.

    Raises:
        InputError: what cannot be different, or the header does not say enough.
    """

    def __init__(
        self,
        file: Path,
        header: Mapping[str, Any],
        workload: Workload,
        changes: Mapping[str, Any],
        plugins: Plugins | None = None,
    ) -> None:
        self._file, self._header = file, header
        self.timed = header["mode"] != "untimed"
        changes = {name: value for name, value in changes.items() if value is not None}
        self._check_changes(changes)
        self._changes, self._changed = changes, changes.keys()
        plugins = plugins or Plugins()
        recorded = recorded_config(file, header, workload, plugins)
        config = self._changed_config(recorded, changes)
        super().__init__(config, plugins, workload=workload, naming=lambda _: "")
        if "slo" in header and "slo" not in changes:
            self.slo = slo_of(header["slo"])

    def cache(self, trace: Recorder | None = None) -> KVCache:
        """Build a cache for one run, and the tiers below it, as recorded in the trace too."""
        cache = super().cache(trace)
        if trace is not None and cache.tiers is not None and "tier" not in self._changed:
            # Their paths are in the header still, which was not to open them.
            pairs = zip(self._header["tiers"], cache.tiers.levels, strict=True)
            sizes = (
                tier | {"slots": level.pool.blocks, "slot_bytes": level.slot_bytes}
                for tier, level in pairs
            )
            # What an earlier run had left in them is not there now.
            trace.describe(
                tiers=[{k: v for k, v in tier.items() if k != "recovered"} for tier in sizes]
            )
        return cache

    def latency(self, devices: int | None = None) -> LatencyModel:
        """Build the latency model.

        Raises:
            InputError, PluginError: it cannot be built as it was, or has other coefficients.
        """
        latency = super().latency(devices)
        recorded = self._header.get("latency")
        if "latency" not in self._changed and plain(latency.coefficients()) != recorded:
            msg = (
                f"{self._file}: latency model {latency.name!r} had other coefficients when "
                "this was recorded, by another version of it. Give "
                f"one: --latency {latency.name}"
            )
            raise InputError(msg)
        return latency

    def recorded(self) -> dict[str, Any]:
        """Return the configuration in which the trace was recorded, as JSON has it."""
        header = self._header
        names = ("batching", "slo", "rate_scale") if self.timed else ()
        kinds = (*OF_CACHES, *OF_SERVERS, *OPTIONAL)
        return {
            "blocks": header["blocks"],
            "block_size": header["block_size"],
            **{kind: header["plugins"][kind] for kind in kinds if kind in header["plugins"]},
            **{name: header.get(name) for name in names},
            "tiers": [
                {name: tier[name] for name in ("name", "options")}
                for tier in header.get("tiers", ())
            ],
        }

    def rerun(self, plugins: Iterable[Plugin]) -> dict[str, Any]:
        """Return the configuration of the new run in the same form; these plugins ran it."""
        used = list(plugins)
        tiers = [plain(describe(plugin)) for plugin in used if plugin.kind == "tier"]
        if "tier" not in self._changed:
            tiers = self.recorded()["tiers"]
        served = {
            "batching": self.batching.as_dict(),
            "slo": None if self.slo is None else slo_field(self.slo),
            "rate_scale": self.config.rate_scale,
        }
        return {
            "blocks": self.blocks,
            "block_size": self.geometry.block_size,
            **{p.kind: plain(describe(p)) for p in used if p.kind != "tier"},
            **(served if self.timed else {}),
            "tiers": tiers,
        }

    def header(self) -> dict[str, Any]:
        """Return the optional fields of the new header, in their order."""
        required = ("n", "t", "event", "schema", "kvcore", "mode", "count", "block_size")
        known = (*required, "key_tokens", "blocks", "plugins", "workload", "seed")
        fields = {name: value for name, value in self._header.items() if name not in known}
        if self.slo is None:
            fields.pop("slo", None)
        if not self.config.tier:
            fields.pop("tiers", None)
        run = {name: self._header[name] for name in ("mode", "workload", "seed")}
        return run | fields

    def _check_changes(self, changes: Mapping[str, Any]) -> None:
        """Refuse to change what only a clock has, where there is none."""
        timed = [name for name in TIMED if name in changes]
        if timed and not self.timed:
            msg = (
                f"{self._file} was recorded without a clock: it has no {timed[0]}. "
                "`kvcore simulate trace:FILE` serves its requests under one"
            )
            raise InputError(msg)

    def _changed_config(self, recorded: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
        changes = dict(changes)
        caps = changes.pop("batching", {})
        if isinstance(caps, Batching):
            caps = attrs.asdict(caps)
        unknown = caps.keys() - attrs.fields_dict(Batching).keys()
        if unknown:
            raise _no_batching(self._file, caps, KeyError(*unknown))
        if "block_size" in changes and "blocks" not in changes:
            changes["blocks"] = self._blocks_of(changes["block_size"])
        return attrs.evolve(recorded, **caps, **changes)

    def _blocks_of(self, block_size: int) -> int:
        """Return how many blocks of another size take the memory of the recorded pool."""
        recorded, size = int(self._header["blocks"]), int(self._header["block_size"])
        recorded += bool(self._header.get("batching", {}).get("null_block"))
        if block_size < 1:
            return recorded
        blocks = recorded * size // block_size
        if not blocks:
            msg = (
                f"{self._file}: a pool of {recorded} blocks of {size} tokens is less than a "
                f"block of {block_size}; give the blocks too: --blocks N"
            )
            raise InputError(msg)
        return blocks

    def _block_bytes(self) -> int:
        """Return the bytes of a block: as recorded, if that says so."""
        tiers, size = self._header.get("tiers"), self._header["block_size"]
        if tiers and self.geometry.block_size == size:
            return int(tiers[0]["slot_bytes"])
        return super()._block_bytes()

    def _devices(self) -> int:
        """Return how many GPUs share the model, as far as the header knows."""
        counts = [tier["devices"] for tier in self._header.get("tiers", ())]
        return int(_fields(self._header.get("device")).get("count") or max(counts, default=1))

    def _recompute(self) -> PrefillCost | None:
        if "recompute" not in self._header:
            return None
        try:
            return read_cost(self._header["recompute"])
        except InputError as error:
            msg = f"{self._file}: {error}"
            raise InputError(msg) from error

    def _served(self) -> ModelSpec:
        """Return a model of the catalogue: a header has no file opened."""
        return find_model(str(self.config.model))

    def _check_deployment(self) -> None:
        """Check nothing: no pool is sized here, and the header need not name a deployment."""

    def _defaults(self) -> dict[str, Any]:
        """Return what the run was recorded with, for plugins that leave it out."""
        return {"seed": self._header["seed"]} | _deployment(self._header)

    def _timing(self, devices: int | None) -> dict[str, Any]:
        return {} if devices is None else {"tensor_parallel": devices}


def _fields(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _value(written: Any) -> Any:
    """Convert the value of an option from JSON: lists to tuples, dicts to models or devices."""
    if isinstance(written, list):
        return tuple(map(_value, written))
    if isinstance(written, dict):
        for cls in (ModelSpec, DeviceSpec):
            if written.keys() == attrs.fields_dict(cls).keys():
                return cls(**{key: _value(value) for key, value in written.items()})
    return written
