"""What a trace was recorded with, built again, and what is to be different."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from kvcore.cache import KVCache, Recorder
from kvcore.errors import InputError, KvcoreError, PluginError
from kvcore.models.cost import PrefillCost, read_cost
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.plugins import Plugin
from kvcore.plugins.manager import Plugins, resolve
from kvcore.plugins.options import Spec
from kvcore.request import SLO
from kvcore.serving import Batching, LatencyModel, Scheduler
from kvcore.trace.events import plain, slo_field
from kvcore.trace.reader import Line

Given: TypeAlias = str | Spec | Plugin | Callable[[], Plugin] | None
"""A plugin: a name with options, an instance, a class or function that builds one; or the
recorded one."""


NOTHING = "none"
"""The retention policy that is none."""


OF_CACHES = ("eviction", "prefix", "retention")


OF_SERVERS = ("scheduler", "latency")


TIMED = (*OF_SERVERS, "batching", "slo", "rate_scale")
"""What only a run with a clock has."""


@attrs.frozen(kw_only=True)
class Asked:
    """What is to be different; None: as recorded.

    Attributes:
        eviction, prefix, retention, scheduler, latency: plugins. A `retention` called `none`
            is that nothing is forgotten.
        blocks: of the pool; None with another block size: those of the same memory.
        block_size: tokens in a block.
        batching: caps of a step, all of them or those that differ.
        slo: what is expected for requests that bring no SLO; `SLO()`: nothing.
        rate_scale: how many times as fast as in the workload open-loop requests arrive.
    """

    eviction: Given = None
    prefix: Given = None
    retention: Given = None
    scheduler: Given = None
    latency: Given = None
    blocks: int | None = None
    block_size: int | None = None
    batching: Batching | Mapping[str, Any] | None = None
    slo: SLO | None = None
    rate_scale: float | None = None


class Setting:
    """The parts of a run that is to be made again, of which plugins are built once.

    Args:
        file: the trace, named in errors.
        header: its first line.
        asked: what is to be different.
        plugins: where names are looked up.

    Attributes:
        timed: whether it has a clock.
        blocks, block_size: of the pool.
        batching, slo, rate_scale: of a run with a clock; their defaults without one.

    Raises:
        InputError: what cannot be different, or the header does not say enough.
    """

    def __init__(self, file: Path, header: Line, asked: Asked, plugins: Plugins) -> None:
        self._file, self._header, self._asked, self._plugins = file, header, asked, plugins
        self.timed = header["mode"] != "untimed"
        self._check()
        self.block_size = header["block_size"] if asked.block_size is None else asked.block_size
        self.blocks = self._blocks()
        self.batching = self._batching()
        self.slo = asked.slo
        if asked.slo is None and "slo" in header:
            self.slo = SLO(**header["slo"])
        elif asked.slo == SLO():
            self.slo = None
        self.rate_scale = header.get("rate_scale", 1)
        if asked.rate_scale is not None:
            self.rate_scale = asked.rate_scale

    def cache(self, trace: Recorder | None) -> KVCache:
        """Build the cache.

        Raises:
            InputError, PluginError: a plugin that cannot be built as it was.
        """
        header = self._header
        kinds = [kind for kind in OF_CACHES if kind in header["plugins"] or self._given(kind)]
        return KVCache(
            self.blocks,
            self.block_size,
            accounting=header["count"],
            key_tokens=header["key_tokens"],
            trace=trace,
            recompute=self._cost(),
            **{kind: self._plugin(kind) for kind in kinds},
        )

    def scheduler(self) -> Scheduler:
        """Build the scheduler. Raises as `cache` does."""
        scheduler: Scheduler = resolve("scheduler", self._plugin("scheduler"), "fcfs")
        return scheduler

    def latency(self) -> LatencyModel:
        """Build the latency model.

        Raises:
            InputError, PluginError: as `cache`, or it computes with other numbers than it did.
        """
        latency: LatencyModel = resolve("latency", self._plugin("latency"), "roofline")
        recorded = self._header.get("latency")
        if self._asked.latency is None and plain(latency.coefficients()) != recorded:
            msg = (
                f"{self._file}: latency model {latency.name!r} had other coefficients when "
                "this was recorded: a file that it reads has changed, or its version. Give "
                f"one: --latency {latency.name}"
            )
            raise InputError(msg)
        return latency

    def recorded_config(self) -> dict[str, Any]:
        """Return what the trace was recorded with, as JSON has it."""
        header = self._header
        names = ("batching", "slo", "rate_scale") if self.timed else ()
        kinds = (*OF_CACHES, *OF_SERVERS)
        return {
            "blocks": header["blocks"],
            "block_size": header["block_size"],
            **{kind: header["plugins"][kind] for kind in kinds if kind in header["plugins"]},
            **{name: header.get(name) for name in names},
        }

    def config(self, plugins: Iterable[Plugin]) -> dict[str, Any]:
        """Return likewise what the new run is made of, these plugins among it."""
        served = {
            "batching": attrs.asdict(self.batching),
            "slo": None if self.slo is None else slo_field(self.slo),
            "rate_scale": self.rate_scale,
        }
        return {
            "blocks": self.blocks,
            "block_size": self.block_size,
            **{
                plugin.kind: {"name": plugin.name, "options": plain(plugin.options())}
                for plugin in plugins
            },
            **(served if self.timed else {}),
        }

    def extras(self) -> dict[str, Any]:
        """Return the header's optional fields, in their order."""
        required = ("n", "t", "event", "schema", "kvcore", "mode", "count", "block_size")
        known = (*required, "key_tokens", "blocks", "plugins", "workload", "seed")
        fields = {name: value for name, value in self._header.items() if name not in known}
        if self.slo is None:
            fields.pop("slo", None)
        return fields

    def _check(self) -> None:
        """Refuse what cannot be different, and a header that does not say enough."""
        file, header = self._file, self._header
        if not self.timed:
            given = [name for name in TIMED if getattr(self._asked, name) is not None]
            if given:
                msg = (
                    f"{file} was recorded without a clock: it has no {given[0]}. "
                    "`kvcore simulate trace:FILE` serves its requests under one"
                )
                raise InputError(msg)
        elif header["mode"] == "wall":
            msg = (
                f"{file} was recorded by the wall clock, which nothing can run again, so there "
                "is nothing to put beside it. Its requests can be run under the model's: "
                "`kvcore simulate trace:FILE`, with and without what is to be different"
            )
            raise InputError(msg)
        else:
            needed = [name for name in ("batching", "latency") if name not in header]
            needed += [kind for kind in OF_SERVERS if kind not in header["plugins"]]
            if needed:
                msg = (
                    f"{file}: the header says nothing of the {needed[0]}, so the run cannot be "
                    "made again; traces of `kvcore simulate` and `run` do"
                )
                raise InputError(msg)

    def _blocks(self) -> int:
        if self._asked.blocks is not None:
            return self._asked.blocks
        recorded, size = self._header["blocks"], self._header["block_size"]
        if self.block_size < 1:
            return int(recorded)
        blocks = int(recorded * size // self.block_size)
        if not blocks:
            msg = (
                f"{self._file}: a pool of {recorded} blocks of {size} tokens is less than a "
                f"block of {self.block_size}; give the blocks too: --blocks N"
            )
            raise InputError(msg)
        return blocks

    def _batching(self) -> Batching:
        asked = self._asked.batching
        if isinstance(asked, Batching):
            return asked
        caps = {**self._header.get("batching", {}), **(asked or {})}
        try:
            return Batching(**caps)
        except TypeError as error:
            known = ", ".join(attrs.fields_dict(Batching))
            msg = f"{self._file}: batching {caps} cannot be: {error}. There are: {known}"
            raise InputError(msg) from error

    def _cost(self) -> PrefillCost | None:
        if "recompute" not in self._header:
            return None
        try:
            return read_cost(self._header["recompute"])
        except InputError as error:
            msg = f"{self._file}: {error}"
            raise InputError(msg) from error

    def _plugin(self, kind: str) -> Any:
        given = self._given(kind)
        if given is None:
            return self._recorded(kind)
        if kind == "retention" and str(given) == NOTHING:
            return None
        if isinstance(given, (str, Spec)):
            return self._plugins.build(kind, given, self._defaults())
        return given() if callable(given) else given

    def _given(self, kind: str) -> Given:
        given: Given = getattr(self._asked, kind)
        return given

    def _recorded(self, kind: str) -> Any:
        """Build the plugin of `kind` that the header names, with the options it had."""
        name, options = (self._header["plugins"][kind][part] for part in ("name", "options"))
        if name not in self._plugins.names(kind):
            known = ", ".join(self._plugins.names(kind))
            msg = (
                f"{self._file} was recorded with {kind} plugin {name!r}, which is not "
                "installed here: install the distribution that has it, or take another: "
                f"--{kind} NAME. There are: {known}"
            )
            raise PluginError(msg)
        # Text is read as the command line is, which knows paths and infinities.
        texts = {key: value for key, value in options.items() if isinstance(value, str)}
        others = {key: _value(options[key]) for key in options.keys() - texts}
        try:
            plugin = self._plugins.build(kind, Spec(name, texts), others)
        except PluginError:
            raise
        except KvcoreError as error:
            msg = f"{self._file}: {kind} plugin {name!r} cannot be built as recorded: {error}"
            raise InputError(msg) from error
        if plain(plugin.options()) != options:
            msg = (
                f"{self._file}: {kind} plugin {name!r} was recorded with options {options}, of "
                f"which this version makes {plain(plugin.options())}. Give it anew: --{kind} "
                f"{name}:option=value"
            )
            raise InputError(msg)
        return plugin

    def _defaults(self) -> dict[str, Any]:
        """Return options of what the run was recorded with, for plugins that leave them out."""
        header = self._header
        model, device = (_fields(header.get(name)) for name in ("model", "device"))
        recorded = header["plugins"].get("latency", {}).get("options", {})
        found = {
            "seed": header["seed"],
            "model": _value(recorded.get("model", model.get("name"))),
            "kv_dtype": model.get("kv_dtype"),
            "device": device.get("name"),
            "tensor_parallel": device.get("count"),
        }
        return {name: value for name, value in found.items() if value is not None}


def _fields(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _value(written: Any) -> Any:
    """Return an option from JSON: lists are tuples, and a model or a device what it was."""
    if isinstance(written, list):
        return tuple(map(_value, written))
    if isinstance(written, dict):
        for cls in (ModelSpec, DeviceSpec):
            if written.keys() == attrs.fields_dict(cls).keys():
                return cls(**{key: _value(value) for key, value in written.items()})
    return written
