"""Build the parts of a run from a configuration: workload, pool, cache, scheduler, latency.

`RunParts` makes these once, in this order; each may need those above it:

    model, device              what is served, and on which GPU
    workload                   the requests that `limit` and `window` leave
    geometry                   its keys in blocks of `block_size`
    codec                      the bytes that a token takes
    rules                      decisions of the engine; among them `layers`, how a pool is
                               divided among layers that keep different things
    deployment                 bytes of a block, and of the weights, on so many GPUs
    blocks                     the pool: as given, or what fits beside the weights
    batching                   the limits of a step, with the rules

and these for each run (`arguments`): a cache with its policies and tiers, a scheduler, a
latency model, a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import kvcore
from kvcore.cache import KVCache, LayerPlan, Recorder, ServedCache
from kvcore.cache.layout import BlockLayout
from kvcore.cache.pool import CountingPool
from kvcore.config.options import find_mode, read_option
from kvcore.config.run_config import RunConfig, built_rules
from kvcore.errors import InputError, PluginError
from kvcore.models.catalogue import DEVICES, MODELS, find_device, load_model
from kvcore.models.codec import Codec
from kvcore.models.cost import PrefillCost, cost_fields
from kvcore.models.memory import Deployment, KVLayout, check_pool, is_pooled
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.plugins import Plugin, Plugins, describe, resolve
from kvcore.plugins.manager import installed
from kvcore.plugins.options import Spec
from kvcore.request import SLO, Request
from kvcore.serving import Batching, LatencyModel, Rules, Scheduler
from kvcore.serving.scheduler import LIMITS
from kvcore.serving.simulate import by_chunk
from kvcore.serving.simulate import simulate as run_simulation
from kvcore.trace.fields import plain, version
from kvcore.units import format_bytes
from kvcore.workloads import Workload, part_of
from kvcore.workloads.arrivals import Arrivals
from kvcore.workloads.selection import find_workload

BLOCK_SIZE = 16
"""Tokens of a block under a clock, where no block size is given: that of most servers."""


class RunParts:
    """The parts of a run. Methods build a new part for each run.

    Args:
        config: the configuration.
        plugins: the plugins by name; None: those that are installed.
        workload: the workload, if it is open already.
        naming: returns the beginning of errors about an option; None: its name and a colon.

    Attributes:
        config, plugins: the configuration and the plugins.
        workload: the part of the workload that is served.
        geometry: the layout of its keys in blocks.
        blocks: number of blocks of the pool.
        recompute: the seconds that it costs to compute a block again.
        batching: the caps of a step.
        slo: SLO of requests that have none of their own; None: no expectation.
        ids: whether blocks have ids even without a trace.
        many: whether these may be the parts of several servers.
        splits_layers: whether layers that keep different things may be told apart.
        runs: the modes that options choose, of which these are the parts.
        simulate: the function that serves the workload with `arguments`.

    Raises:
        InputError: a part that cannot be, or does not fit another one.
        PluginError: a plugin that cannot work here.
    """

    ids = False
    many = False
    splits_layers = True
    runs: tuple[str, ...] = ()
    simulate: Any = staticmethod(run_simulation)

    def __init__(
        self,
        config: RunConfig,
        plugins: Plugins | None = None,
        *,
        workload: Workload | None = None,
        naming: Callable[[str], str] | None = None,
    ) -> None:
        self.config = config
        self.plugins = plugins or installed()
        self._naming = naming or "{}: ".format
        self._check_modes()
        self.recompute = self._recompute()
        with self._about("workload"):
            self.workload = self._source() if workload is None else workload
            keys = self.workload.key_tokens
        with self._about("block_size", more=f"workload {config.workload}: "):
            self.geometry = self._geometry(keys)
        self._check_deployment()
        self.blocks = self._blocks()
        with self._about(*LIMITS):
            limits = {name: config.options[name] for name in LIMITS}
            self.batching = Batching(**limits, rules=self.rules)
        if self.layers:
            self.batching = by_chunk(self.batching)
        with self._about("rate_scale"):
            Arrivals((), config.rate_scale)
        self.slo = None if config.slo == SLO() else cast("SLO", config.slo)
        self._check()

    def _check_modes(self) -> None:
        """Refuse options that choose, or need, a mode of which these are not the parts."""
        if self.config.timed and self.config.accounting == "keys":
            msg = f"{self._naming('accounting')}under a clock tokens count: leave it out"
            raise InputError(msg)
        for name, option in self.config.chosen.items():
            with self._about(option):
                if name not in self.runs:
                    raise InputError(find_mode(name).refusal)

    def _check(self) -> None:
        """Called when all parts of one server are known: refuse those that do not fit."""

    @cached_property
    def model(self) -> ModelSpec:
        """The model that is served."""
        return self._served()

    @cached_property
    def device(self) -> DeviceSpec:
        """The GPU that the model is served on."""
        with self._about("device"):
            device = self.config.device
            return device if isinstance(device, DeviceSpec) else find_device(device)

    @cached_property
    def codec(self) -> Codec:
        """The codec of K/V, which sizes the pool and times its reads."""
        with self._about("codec"):
            if self.config.codec is None:
                msg = "no codec is given, and a simulation computes in none: name one, as fp16"
                raise InputError(msg)
        return cast("Codec", self.built("codec"))

    @cached_property
    def deployment(self) -> Deployment:
        """The model on its devices, with its K/V in blocks."""
        model, codec, plan = self.model, self.codec, self.layers
        if plan is None:
            with self._about("model"):
                check_pool(model)
        with self._about("codec"):
            layout = KVLayout(model, codec, self.geometry.block_size)
        with self._about("tensor_parallel"):
            block_bytes = None if plan is None else plan.bytes_per_block
            parts = layout, self.device, self._tensor_parallel, block_bytes
            Deployment(*parts)  # refuses a number of GPUs before a drafter is asked
        with self._about("drafter"):
            return Deployment(*parts, self.config.drafter and self.built("drafter"))

    @property
    def _tensor_parallel(self) -> int:
        return self.config.tensor_parallel if self.config.timed else 1

    @cached_property
    def layers(self) -> LayerPlan | None:
        """How the pool is divided among layers that keep different things; None: it is not.

        That is so without a clock, and of layers that all keep all tokens.

        Raises:
            InputError: there is no rule for what a layer keeps, or blocks do not fit the keys.
        """
        config, model = self.config, self.model
        split = self.splits_layers and config.timed
        if not split or config.disable_hybrid_kv_cache_manager:
            return None
        with self._about("codec"):
            layout = KVLayout(model, self.codec, self.geometry.block_size)
        with self._about("model"):
            plan = self.rules.layer_plan(layout, self._tensor_parallel)
        if plan is not None:
            keys = self.workload.key_tokens
            try:
                with self._about("block_size"):
                    plan.check_keys(model.name, keys)
            except InputError:
                if config.block_size is not None or self.geometry.block_size == keys:
                    raise
                self.geometry = BlockLayout("tokens", keys, keys)
                return self.layers  # of blocks in which a state fits, in whole keys
        return plan

    def served_cache(
        self, trace: Recorder | None = None, blocks: int | None = None
    ) -> ServedCache:
        """Build the cache of one run under a clock, as the plan of the layers has it.

        `blocks` is the size of its pool if there is one; None: that of the configuration.
        """
        plan, config = self.layers, self.config
        if plan is None:
            return self.cache(trace)
        takes_tiers = plan.takes_tiers and not self.ids  # they move no bytes of groups
        for name in ("retention", "drafter", *([] if takes_tiers else ["tier"])):
            if getattr(config, name):
                with self._about(name):
                    raise InputError(self._layers_refusal(plan, name))
        eviction = self.built("eviction")
        with self._about("checkpoint" if eviction.name == "lru" else "eviction"):
            cache = plan.cache(
                self.blocks if blocks is None else blocks,
                eviction=eviction,
                prefix=self.built("prefix"),
                recompute=self.recompute,
                checkpoint=self.built("checkpoint"),
                key_tokens=self.workload.key_tokens,
                trace=trace,
            )
        if config.tier:
            self.add_tiers(cache)
        return cache

    def _layers_refusal(self, plan: LayerPlan, what: str) -> str:
        one = ", or serve the model as one group (disable_hybrid_kv_cache_manager)"
        return (
            f"the K/V of {self.model.name} is in {plan.where}, which {what} does not know: "
            f"leave it out{one if is_pooled(self.model) else ''}"
        )

    def cache(self, trace: Recorder | None = None) -> KVCache:
        """Build a cache for one run, with the tiers below it.

        Raises:
            InputError: layers keep different things, and who serves them does not know that.
        """
        if self.layers:
            with self._about("model"):
                raise InputError(self._layers_refusal(self.layers, "this run"))
        cache = KVCache(
            self.blocks,
            self.geometry.block_size,
            eviction=self.built("eviction"),
            prefix=self.built("prefix"),
            retention=None if self.config.retention is None else self.built("retention"),
            accounting=self.geometry.accounting,
            key_tokens=self.workload.key_tokens,
            trace=trace,
            ids=self.ids,
            recompute=self.recompute,
        )
        if self.config.tier:
            self.add_tiers(cache)
        return cache

    def add_tiers(self, cache: Any) -> None:
        """Build the tiers below `cache` for one run."""
        tiers, size, devices = self.tiers(), self._block_bytes(), self._devices()
        with self._about("tier"):
            # The front door says where the mechanism of tiers is: most runs have none.
            build = kvcore.GroupTiers if cache.grouped else kvcore.Tiers
            build(cache, tiers, size, devices=devices, ids=self.ids)

    def tiers(self) -> list[Any]:
        """Build the tiers for one run, nearest first, each with its eviction policy."""
        with self._about("tier"):
            built = [self._build("tier", tier) for tier in cast("Any", self.config.tier)]
            for tier in built:
                if isinstance(tier.eviction, str):
                    defaults = self._defaults()
                    tier.eviction = self.plugins.build("eviction", tier.eviction, defaults)
        return built

    @property
    def tier_blocks(self) -> int:
        """Number of blocks that fit into all tiers."""
        return sum(tier.memory // self._block_bytes() for tier in self.tiers())

    def scheduler(self) -> Scheduler:
        """Build a scheduler for one run."""
        return cast("Scheduler", self.built("scheduler"))

    @cached_property
    def rules(self) -> Rules:
        """The rules of the engine."""
        with self._about("like"):
            return built_rules(self.config.like, self.plugins)

    def latency(self, devices: int | None = None) -> LatencyModel:
        """Build a latency model for one run, by default that of the deployment.

        `devices` is the number of GPUs that share the model; None: that of the configuration.
        """
        return cast("LatencyModel", self.built("latency", **self._timing(devices)))

    def arguments(self, trace: Recorder | None = None) -> dict[str, Any]:
        """Build the keyword arguments of one run, all but its requests."""
        return {
            "cache": self.served_cache(trace),
            "scheduler": self.scheduler(),
            "latency": self.latency(),
            "batching": self.batching,
            "slo": self.slo,
            "rate_scale": self.config.rate_scale,
            **({} if self.config.drafter is None else {"drafter": self.built("drafter")}),
        }

    def run(
        self,
        trace: Recorder | None = None,
        requests: Iterable[Request] | None = None,
        **more: Any,
    ) -> Any:
        """Serve the workload once; return the result.

        Args:
            trace: what records the run; None: nothing does.
            requests: the requests of the workload, if something counts them; None: those.
            more: further arguments of what serves them, here `kvcore.serving.simulate`.
        """
        served = self.workload if requests is None else requests
        return self.simulate(served, **self.arguments(trace), **more)

    def built(self, kind: str, **defaults: Any) -> Any:
        """Build the plugin of a kind; an instance in the configuration is returned as it is.

        `defaults` are values of options that its text leaves out, besides the seed.
        """
        with self._about(kind):
            return self._build(kind, getattr(self.config, kind), defaults)

    def _build(self, kind: str, value: Any, defaults: Mapping[str, Any] | None = None) -> Any:
        if isinstance(value, Spec):
            return self.plugins.build(kind, value, {**self._defaults(), **(defaults or {})})
        return resolve(kind, value)

    def header(self) -> dict[str, Any]:
        """Return the fields of a trace header that only the configuration knows."""
        return {
            "workload": self.workload,
            "seed": self.config.seed,
            "model": {
                "name": self.model.name,
                "codec": self._codec_text(),
                **self._weights(),
            },
            "device": {"name": self.device.name, "count": self.deployment.devices},
            "recompute": cost_fields(PrefillCost.for_model(self.model, self.device)),
        }

    def describe(self, *plugins: Plugin | None) -> dict[str, Any]:
        """Return the configuration and the plugins of a run, without None, for JSON."""
        plan = self.layers
        note = "" if plan else self.deployment.layout.pool_note
        source, used = self.workload, [plugin for plugin in plugins if plugin is not None]
        used += [self.rules] if self.rules.decides() else []
        return {
            "kvcore": version(),
            "workload": {
                "name": source.name,
                "digest": source.digest,
                "key_tokens": source.key_tokens,
                "options": plain(source.options()),
            },
            "model": self.model.name,
            "device": self.device.name,
            "tensor_parallel": self.deployment.devices,
            "codec": self._codec_text(),
            **self._weights(),
            "bytes_per_block": self._block_bytes(),
            "plugins": {p.kind: plain(describe(p)) for p in used if p.kind != "tier"},
            "tiers": [plain(describe(p)) for p in used if p.kind == "tier"],
            "batching": self.batching.as_dict(),
            "allocation": "paged",
            "rate_scale": self.config.rate_scale,
            "seed": self.config.seed,
            **({"notes": [note]} if note else {}),
            **({} if plan is None else plan.as_dict(self.blocks, self.built("checkpoint"))),
        }

    def document(self, result: Any) -> dict[str, Any]:
        """Return the JSON document of a run."""
        used = plugins_of(result.cache, result.latency, result.drafter)
        return {**result.summary(), "config": self.describe(self.scheduler(), *used)}

    @property
    def traced(self) -> bool:
        """Whether a run writes a trace of its blocks."""
        return True

    @property
    def sized(self) -> bool:
        """Whether the configuration gives the size of the pool."""
        return self.config.blocks is not None or self.config.memory is not None

    # Steps that the parts of other runs replace: of runs on tensors, and of traces.

    def _recompute(self) -> PrefillCost | None:
        """Return the seconds that it costs to compute a block again; None: unknown."""
        return PrefillCost.for_model(self.model, self.device)

    def _served(self) -> ModelSpec:
        """Return the model that is served, with the weights that are asked for."""
        model = self.config.model
        with self._about("model"):
            if model is None:
                msg = "no model is given: name one, such as llama-3.1-8b"
                raise InputError(msg)
            dtype = self.config.weights_dtype
            if isinstance(model, ModelSpec):
                return model.with_weights(dtype) if dtype else model
            return load_model(model, dtype)

    def _source(self) -> Workload:
        """Return the part of the workload that is served."""
        source = self._whole_source()
        with self._about("limit"):
            return part_of(source, self.config.limit, self.config.window)

    def _whole_source(self) -> Workload:
        """Return the workload that the configuration names, with all of its requests."""
        source = self.config.workload
        if isinstance(source, Workload):
            return source
        if isinstance(source, Spec):
            return cast("Workload", self.plugins.build("workload", source, self._defaults()))
        # A path is a file, whatever plugin has its name.
        text = str(source.absolute()) if isinstance(source, Path) else source
        return find_workload(text, self.plugins, self.config.seed)

    def _geometry(self, keys: int) -> BlockLayout:
        """Return the layout of blocks, for keys of `keys` tokens."""
        size, accounting = self.config.block_size, self.config.accounting
        usual, counted = (BLOCK_SIZE, "tokens") if self.config.timed else (keys, "keys")
        return BlockLayout(accounting or counted, usual if size is None else size, keys)

    def _check_deployment(self) -> None:
        """Refuse a deployment that cannot be, even if the pool has a size of its own."""
        _ = self.deployment

    def _blocks(self) -> int:
        """Return the number of blocks of the pool: the given one, or all that fit."""
        blocks, memory = self.config.blocks, cast("int | None", self.config.memory)
        if blocks is not None and memory is not None:
            msg = "blocks and memory both say how large the pool is: give one of them"
            raise InputError(msg)
        if blocks is None and memory is None:
            deployment = self.deployment
            with self._about("tensor_parallel"):
                return deployment.blocks(self._sequences) - self.null_blocks
        with self._about("blocks" if memory is None else "memory"):
            if memory is not None:
                blocks = self.blocks_in(memory)
            used = cast("int", blocks) - self.null_blocks
            if self.null_blocks and used < 1:
                msg = "the one block is that which is never used: give 2 or more"
                raise InputError(msg)
            CountingPool(used)
        return used

    @property
    def null_blocks(self) -> int:
        """Number of blocks of the pool that are never used."""
        return int(self.config.timed and self.rules.null_block)

    def blocks_in(self, memory: int | str) -> int:
        """Return the number of blocks in some bytes of K/V, which may be text with a unit.

        Raises:
            InputError: no block fits.
        """
        memory, size = int(read_option("memory", memory)), self._block_bytes()
        staged = self._staged_bytes()
        if memory < size + staged:
            block = f"a block of {self._codec_text()}, which takes {format_bytes(size)}"
            if staged:
                block += (
                    f", beside the unfinished blocks of {self._sequences} sequences, which "
                    f"take {format_bytes(staged)}: give more, or a smaller max_seqs"
                )
            msg = f"{format_bytes(memory)} is less than {block}"
            raise InputError(msg)
        return (memory - staged) // size

    @property
    def _sequences(self) -> int:
        """The number of sequences that may run at a time, for sizing memory."""
        return self.config.max_seqs if self.config.timed else 0

    def _codec_text(self) -> str:
        """Return the codec of K/V, for headers and reports."""
        return str(self.codec)

    def _weights(self) -> dict[str, str]:
        """Return the number format of the weights, if given, for headers and reports."""
        dtype = self.config.weights_dtype
        return {} if dtype is None else {"weights_dtype": dtype}

    def _block_bytes(self) -> int:
        """Return the bytes of a block."""
        return self.deployment.bytes_per_block

    def _devices(self) -> int:
        """Return the number of GPUs that share the model."""
        return self.deployment.devices

    def _staged_bytes(self) -> int:
        """Return the bytes of unfinished blocks, which are outside the pool."""
        return self.deployment.staged_bytes(self._sequences)

    def _defaults(self) -> dict[str, Any]:
        """Return values of options of plugins that their texts leave out."""
        return {} if self.config.seed is None else {"seed": self.config.seed}

    def _timing(self, devices: int | None) -> dict[str, Any]:
        """Return the options of the deployment that a latency model may have."""
        model, device = self.model, self.device
        retention = None if self.config.retention is None else self.built("retention")
        return {
            **({} if retention is None else retention.timing(model)),
            # A model from a file has no name that plugins know.
            "model": model.name if model == MODELS.get(model.name) else model,
            "device": device.name if device == DEVICES.get(device.name) else device,
            "tensor_parallel": devices or self.deployment.devices,
            "codec": self.codec,
            "block_size": self.geometry.block_size,
        }

    @contextmanager
    def _about(self, *options: str, more: str = "") -> Iterator[None]:
        """Prefix errors of the body with the name of the option that they are about.

        Of several options it is the one whose value the error shows, if there is just one.
        """
        try:
            yield
        except (InputError, PluginError) as error:
            named = [option for option in options if f"{option}=" in str(error)] or options
            about = self._naming(named[0])
            # Of nested parts the inner one has named it already.
            if not about or len(named) > 1 or str(error).startswith(about):
                raise
            msg = f"{about}{more}{error}"
            raise type(error)(msg) from error


def plugins_of(cache: ServedCache, *others: Plugin | None) -> list[Plugin]:
    """Return the plugins of a run: those of its cache, `others`, and its tiers."""
    tiers = [] if cache.tiers is None else [level.tier for level in cache.tiers.levels]
    kept: list[Plugin | None] = [cache.eviction, cache.prefix, cache.retention]
    if cache.checkpoint is not None and not cache.checkpoint.is_interval:
        kept.append(cache.checkpoint)
    return [plugin for plugin in (*kept, *others, *tiers) if plugin is not None]
