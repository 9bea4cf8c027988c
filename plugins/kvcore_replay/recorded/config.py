"""The options of a recorded run, from the header of its trace."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import attrs

from kvcore.config.options import find_option
from kvcore.config.run_config import RunConfig
from kvcore.config.values import as_checkpoint, read_plugin
from kvcore.errors import InputError, KvcoreError, PluginError
from kvcore.models.layers import LayerCache
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.plugins import Plugin, Plugins, options_of
from kvcore.plugins.options import Spec, as_text, takes_path
from kvcore.request import SLO
from kvcore.serving import Batching, Rules
from kvcore.serving.rules import CHOICES
from kvcore.serving.scheduler import LIMITS
from kvcore.trace.fields import plain, slo_of
from kvcore.workloads import Workload
from kvcore_plugins.workload.recorded import TraceWorkload

OF_CACHES = ("eviction", "prefix", "retention")

OF_SERVERS = ("scheduler", "latency")

OPTIONAL = ("checkpoint", "drafter")

DEPLOYED = ("model", "device", "tensor_parallel", "codec", "block_size")
"""Options of a latency model that the deployment gives, where its text leaves them out."""

CLUSTER_FIELDS = ("replicas", "routing")
"""Fields of the header that no server by itself has."""

_INTERVAL = "prefix_cache_retention_interval"

ROUTED = ("replicas", "router", "view", "fail", "autoscale", "disaggregate")
"""Options that only a cluster has."""


def recorded_config(path: str | PathLike[str], plugins: Plugins | None = None) -> RunConfig:
    """Return the configuration of the run that wrote a trace.

    Its plugins are functions that build the recorded ones, which are looked up in `plugins`
    (None: those that are installed) when they are called.

    Raises:
        InputError: the header lacks a field, or has a value that no run can have.
        TraceError: the file is no trace.
    """
    trace = TraceWorkload(path)
    header, plugins = trace.header.as_dict(), plugins or Plugins()
    return config_of_header(trace.file, header, trace, plugins)


def config_of_header(
    file: Path, header: Mapping[str, Any], workload: Workload, plugins: Plugins
) -> RunConfig:
    """Return the configuration of the run that wrote the header of a trace.

    Args:
        file: the trace, named in errors.
        header: its first line. No file that it names is opened.
        workload: the requests of the trace.
        plugins: where the recorded plugins are looked up, when they are built.

    Raises:
        InputError: the header lacks a field, or has a value that no run can have.
    """
    timed = header["mode"] != "untimed"
    _check_header(file, header, timed=timed)
    options = {
        "workload": workload,
        "accounting": header["count"],
        "block_size": header["block_size"],
        "slo": slo_of(header["slo"]) if header.get("slo") else SLO(),
        "rate_scale": header.get("rate_scale", 1),
        "seed": header["seed"],
        **_of_server(file, header, plugins),
        **(_of_cluster(file, header, plugins) if "replicas" in header else {}),
    }
    return RunConfig("simulate" if timed else "compare", options=options)


def _of_server(file: Path, header: Mapping[str, Any], plugins: Plugins) -> dict[str, Any]:
    """Return the options of one server, which the replicas of a cluster may have too."""
    recorded: dict[str, Any] = {
        kind: partial(rebuilt, file, kind, recorded, plugins)
        for kind, recorded in header["plugins"].items()
        if kind in (*OF_CACHES, *OF_SERVERS, *OPTIONAL)
    }
    deployment = deployment_options(header)
    for name, value in deployment.items():
        if isinstance(value, dict):
            msg = (
                f"{file}: its {name} has other fields than those of this version: an older one "
                "wrote it. Run it with that one, or simulate its requests: kvcore simulate FILE"
            )
            raise InputError(msg)
    if "codec" in deployment:
        _check_codec(file, deployment["codec"], plugins)
    caps = dict(header.get("batching", {}))
    choices = {name: caps.pop(name) for name in CHOICES if name in caps}
    rules = Rules(**choices)
    try:
        limits = Batching(**caps).limits
    except TypeError as error:
        raise unknown_caps(file, header["batching"], error) from error
    tiers, named = header.get("tiers", ()), header["plugins"].get("rules")
    groups = header.get("cache_groups", {})
    return {
        "blocks": header["blocks"] + rules.null_block,
        # Where an interval says all, it is not among the plugins.
        **({"checkpoint": as_checkpoint(groups[_INTERVAL])} if groups else {}),
        "tier": tuple(partial(_rebuilt_tier, file, tier, plugins) for tier in tiers),
        **deployment,
        **limits,
        # Rules that override a decision have their name and options in the header.
        "like": rules if named is None else partial(rebuilt, file, "rules", named, plugins),
        **recorded,
    }


def _of_cluster(file: Path, header: Mapping[str, Any], plugins: Plugins) -> dict[str, Any]:
    """Return the options of a cluster: its replicas, and its router."""
    if find_option("replicas") is None:
        msg = f"{file} was recorded by a cluster, and there is no option 'replicas'"
        raise plugins.not_found("kvcore_modes", msg)  # noqa: EM101 - a hook
    routing, router = header.get("routing", {}), header["plugins"].get("router")
    if router is None or not {"view", "fail"} <= routing.keys():
        msg = f"{file}: the header says nothing of the routing, so it cannot be made again"
        raise InputError(msg)
    groups = replica_groups(header)
    (_, first), *_ = groups
    tables = [
        {"count": count, **(_of_server(file, own, plugins) if own != first else {})}
        for count, own in groups
    ]
    planner, split = routing.get("autoscale"), routing.get("disaggregate")
    _refuse_code(file, "disaggregate", split)  # it names a router, too
    return {
        "replicas": tables[0]["count"] if len(tables) == 1 else tables,
        "router": partial(rebuilt, file, "router", router, plugins),
        "view": routing["view"],
        "fail": routing["fail"],
        "autoscale": planner and str(Spec(planner["name"], _texts(planner["options"]))),
        "disaggregate": split,
    }


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: as_text(value) for name, value in options.items() if value is not None}


def replica_groups(header: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return the groups of identical replicas in a header: their numbers and their record."""
    alone = {name: value for name, value in header.items() if name not in CLUSTER_FIELDS}
    plugins = {kind: plugin for kind, plugin in header["plugins"].items() if kind != "router"}
    alone["plugins"] = plugins
    return [
        (record["count"], {**alone, **{k: v for k, v in record.items() if k != "count"}})
        for record in header.get("replicas", ({"count": 1},))
    ]


def deployment_options(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the deployment in a header."""
    model, device = (object_of(header.get(name)) for name in ("model", "device"))
    recorded = header["plugins"].get("latency", {}).get("options", {})
    options = {
        "model": _value(recorded.get("model", model.get("name"))),
        "codec": model.get("codec", model.get("kv_dtype")),
        "weights_dtype": model.get("weights_dtype"),
        "device": device.get("name"),
        "tensor_parallel": device.get("count"),
    }
    return {name: value for name, value in options.items() if value is not None}


def _check_header(file: Path, header: Mapping[str, Any], *, timed: bool) -> None:
    """Refuse a header that lacks a field without which the run cannot be made again."""
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


def unknown_caps(file: Path, caps: Mapping[str, Any], error: Exception) -> InputError:
    """Return the error which reports that a run cannot have these caps of a step."""
    known = ", ".join(("like", *LIMITS))
    return InputError(f"{file}: batching {caps} cannot be: {error}. There are: {known}")


def redeployed_latency(file: Path, header: Mapping[str, Any], plugins: Plugins) -> Spec:
    """Return the recorded latency model without the deployment that it was built for.

    Raises:
        InputError: its times do not follow from a model and a device, or an option is a path.
        PluginError: it is not installed here.
    """
    recorded = header["plugins"]["latency"]
    name, options = recorded["name"], recorded["options"]
    cls = type(rebuilt(file, "latency", recorded, plugins))
    known = {option.name for option in options_of(cls)}
    if not {"model", "device"} <= known:
        msg = (
            f"{file} was recorded with latency model {name!r}, whose times are the same on "
            "every device: give another latency too, such as roofline"
        )
        raise InputError(msg)
    return Spec(name, _texts({key: options[key] for key in options.keys() - set(DEPLOYED)}))


def rebuilt(file: Path, kind: str, recorded: Mapping[str, Any], plugins: Plugins) -> Plugin:
    """Build the plugin of `kind` that a header names, with the options it had."""
    name, options = recorded["name"], dict(recorded["options"])
    flag = "--like" if kind == "rules" else f"--{kind}"
    if name not in plugins.names(kind):
        known = ", ".join(plugins.names(kind))
        msg = (
            f"{file} was recorded with {kind} plugin {name!r}, which is not "
            "installed here: install the distribution that has it, or take another: "
            f"{flag} NAME. There are{f': {known}' if known else ' none'}"
        )
        raise PluginError(str(plugins.not_found(kind, msg)))
    cls = plugins.get(kind, name)
    _refuse_paths(file, cls, options)
    for old in options.keys() & cls.renamed_options.keys():
        options[cls.renamed_options[old]] = options.pop(old)
    try:
        if kind == "latency" and "codec" in options:
            _check_codec(file, options["codec"], plugins)
            options["codec"] = str(plugins.build("codec", str(options["codec"])))
        # Read as the command line is, which checks types; other values are none by default.
        defaults = {option.name: option.default for option in options_of(cls)}
        texts = {
            key: as_text(value)
            for key, value in options.items()
            if isinstance(value, str)
            or not (isinstance(value, (list, dict)) or value is defaults.get(key, value))
        }
        values = {key: _value(options[key]) for key in options.keys() - texts}
        plugin: Plugin = plugins.build(kind, Spec(name, texts), values)
    except PluginError:
        raise
    except KvcoreError as error:
        msg = f"{file}: {kind} plugin {name!r} cannot be built as recorded: {error}"
        raise InputError(msg) from error
    now = plain(plugin.options())
    if now != now | options:
        msg = (
            f"{file}: {kind} plugin {name!r} was recorded with options {options}, of "
            f"which this version makes {now}. Give it anew: {flag} "
            f"{name}:option=value"
        )
        raise InputError(msg)
    return plugin


def _rebuilt_tier(file: Path, recorded: Mapping[str, Any], plugins: Plugins) -> Plugin:
    """Build a tier that a header names, without its paths: it is simulated."""
    name, options = recorded["name"], dict(recorded["options"])
    if name in plugins.names("tier"):
        cls = plugins.get("tier", name)
        options = {k: v for k, v in options.items() if v is None or not takes_path(cls, k)}
    eviction = read_plugin(str(options.get("eviction", "lru")))
    if eviction.name in plugins.names("eviction"):
        _refuse_paths(file, plugins.get("eviction", eviction.name), eviction.options)
    return rebuilt(file, "tier", {"name": name, "options": options}, plugins)


def _check_codec(file: Path, codec: Any, plugins: Plugins) -> None:
    """Refuse a recorded codec that text cannot name, or that would open a file."""
    _refuse_code(file, "codec", codec)
    spec = read_plugin(str(codec))
    if spec.name in plugins.names("codec"):
        _refuse_paths(file, plugins.get("codec", spec.name), spec.options)


def _refuse_paths(file: Path, cls: type[Plugin], options: Mapping[str, Any]) -> None:
    """Refuse options that are paths: no file is opened because a trace names it."""
    for key, value in options.items():
        _refuse_code(file, f"{cls.kind} {cls.name}:{key}", value)
        if isinstance(value, str) and takes_path(cls, key):
            kind, name = cls.kind, cls.name
            msg = (
                f"{file} was recorded with {kind} plugin {name!r} and its {key}={value!r}: no "
                f"file is opened because a trace names it. Name it yourself: {kind} "
                f"{name}:{key}=FILE"
            )
            raise InputError(msg)


def _refuse_code(file: Path, option: str, value: Any) -> None:
    """Refuse a value that names a plugin in a file, which would be run when it is built."""
    if ".py" in str(value):
        msg = (
            f"{file} was recorded with {option}={value!r}: no code is run because a trace "
            "names it. Give the option yourself, or install that plugin and record it anew"
        )
        raise InputError(msg)


def object_of(value: Any) -> Mapping[str, Any]:
    """Return a part of a header that is an object; any other JSON says nothing to a what-if."""
    return value if isinstance(value, Mapping) else {}


def _value(written: Any) -> Any:
    """Convert the value of an option from JSON: lists to tuples, dicts to models or devices."""
    if isinstance(written, list):
        return tuple(map(_value, written))
    if isinstance(written, dict):
        # The header of a model whose heads and windows say what is kept has no caches.
        names = written.keys() | ({"caches"} if "windows" in written else set())
        for cls in (ModelSpec, LayerCache, DeviceSpec):
            if names == attrs.fields_dict(cls).keys():
                return cls(**{key: _value(value) for key, value in written.items()})
    return written
