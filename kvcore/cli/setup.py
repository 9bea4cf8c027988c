"""What `simulate` runs: its options, and the parts they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from decimal import ROUND_FLOOR, Context
from pathlib import Path
from typing import Any, Literal

import attrs

from kvcore.cache import KVCache, Recorder
from kvcore.cli.model import find_or_read
from kvcore.cli.workload import find_workload
from kvcore.errors import InputError
from kvcore.models.catalogue import MODELS, find_device
from kvcore.models.cost import PrefillCost, cost_fields
from kvcore.models.memory import Deployment, KVLayout
from kvcore.models.spec import ModelSpec
from kvcore.plugins import Plugin
from kvcore.plugins.manager import Plugins
from kvcore.plugins.options import Spec
from kvcore.request import SLO
from kvcore.serving import Batching, LatencyModel, Result, Scheduler
from kvcore.serving.result import offered_load
from kvcore.serving.simulate import Allocation
from kvcore.trace.events import plain
from kvcore.units import format_bytes
from kvcore.workloads import Workload

DOUBLINGS = 5


@attrs.frozen(kw_only=True)
class Options:
    """The options of `kvcore simulate`, by the names of the command line."""

    workload: str | Spec | None
    eviction: Spec
    scheduler: Spec
    prefix: Spec
    retention: Spec | None
    latency: Spec
    model: str
    device: str
    tensor_parallel: int
    kv_dtype: str
    blocks: int | None
    memory: int | None
    block_size: int
    max_tokens: int
    max_seqs: int
    steps: Literal["mixed", "prefill-first"]
    chunked: bool
    allocation: Allocation
    watermark: float
    rate_scale: float
    slo: SLO
    seed: int
    trace: Path | None
    out: Path | None
    residency: bool
    prometheus: Path | None
    config: Path | None
    as_json: bool


class Setup:
    """The parts of a run, of which those that serve once are built for each.

    Args:
        options: what was asked for.
        from_file: the names of those that come from the configuration file.

    Attributes:
        workload, deployment, batching: parts that can be used again.
        blocks: of the pool.
        recompute: what it costs to compute a block again.
        slo: what is expected of requests that bring no SLO; None: nothing.
        ids: whether blocks have ids without a trace as well.

    Raises:
        InputError: a part that cannot be built as asked for.
        PluginError: a plugin that cannot work here.
    """

    ids = False

    def __init__(self, options: Options, from_file: frozenset[str] = frozenset()) -> None:
        """Build what can be used again, and look at the rest."""
        self.options = options
        self._from_file = from_file
        self._plugins = Plugins()
        self._model, device = self._served(), find_device(options.device)
        self.workload = self._source()
        self.recompute = PrefillCost.of(self._model, device)
        layout = KVLayout(self._model, options.kv_dtype, options.block_size)
        self.deployment = Deployment(layout, device, options.tensor_parallel)
        self.blocks = self._blocks()
        self.batching = Batching(
            max_tokens=options.max_tokens,
            max_seqs=options.max_seqs,
            chunked=options.chunked,
            steps=options.steps,
            watermark=options.watermark,
        )
        self.slo = None if options.slo == SLO() else options.slo

    def cache(self, trace: Recorder | None = None) -> KVCache:
        """Build a cache for one run."""
        retention = self.options.retention
        return KVCache(
            self.blocks,
            self.options.block_size,
            eviction=self._built("eviction", self.options.eviction),
            prefix=self._built("prefix", self.options.prefix),
            retention=None if retention is None else self._built("retention", retention),
            key_tokens=self.workload.key_tokens,
            trace=trace,
            ids=self.ids,
            recompute=self.recompute,
        )

    def scheduler(self) -> Scheduler:
        """Build a scheduler for one run."""
        scheduler: Scheduler = self._built("scheduler", self.options.scheduler)
        return scheduler

    def latency(self, devices: int | None = None) -> LatencyModel:
        """Build a latency model for one run: of this deployment, unless it says otherwise.

        `devices` is how many there are; None: as many as asked for.
        """
        latency: LatencyModel = self._built(
            "latency",
            self.options.latency,
            # A file's model has no name that plugins know.
            model=self._model.name if self._model.name in MODELS else self._model,
            device=self.deployment.device.name,
            tensor_parallel=devices or self.deployment.devices,
            kv_dtype=self.options.kv_dtype,
        )
        return latency

    def header(self) -> dict[str, Any]:
        """Return what a trace should know besides what the run tells it."""
        model, device = self.recompute.model, self.recompute.device
        return {
            "workload": self.workload,
            "seed": self.options.seed,
            "model": {"name": model, "kv_dtype": self.options.kv_dtype},
            "device": {"name": device, "count": self.deployment.devices},
            "recompute": cost_fields(self.recompute),
        }

    def config(self, *plugins: Plugin | None) -> dict[str, Any]:
        """Return what was run, with the plugins that ran it, as JSON has it; None is none."""
        source = self.workload
        return {
            "workload": {
                "name": source.name,
                "digest": source.digest,
                "key_tokens": source.key_tokens,
                "options": plain(source.options()),
            },
            "model": self.recompute.model,
            "device": self.recompute.device,
            "tensor_parallel": self.deployment.devices,
            "kv_dtype": self.options.kv_dtype,
            "bytes_per_block": self.deployment.bytes_per_block,
            "plugins": {
                plugin.kind: {"name": plugin.name, "options": plain(plugin.options())}
                for plugin in plugins
                if plugin is not None
            },
            "batching": attrs.asdict(self.batching),
            "allocation": self.options.allocation,
            "rate_scale": self.options.rate_scale,
            "seed": self.options.seed,
        }

    def remedies(self, result: Result) -> Iterator[str]:
        """Yield options with which a workload that is too much for this run would not be.

        Each is tried on the work that the run came to: a larger pool where its size was
        given, more devices, fewer requests.
        """
        size, devices = self.options.block_size, self.deployment.devices
        sized = self.options.blocks is not None or self.options.memory is not None

        def carries(latency: LatencyModel, blocks: int) -> bool:
            load = offered_load(result.log, self.batching, latency, blocks * size)
            return load is not None and load <= 1

        if sized:
            larger = (self.blocks << doubling for doubling in range(1, DOUBLINGS))
            enough = next((b for b in larger if carries(result.latency, b)), None)
            if enough:
                yield f"--blocks {enough}"
        for more in (devices << doubling for doubling in range(1, DOUBLINGS)):
            blocks = self.blocks
            if not sized:
                blocks = attrs.evolve(self.deployment, devices=more).blocks()
            if carries(self.latency(more), blocks):
                yield f"--tensor-parallel {more}"
                break
        load = result.summary()["offered_load"]
        yield f"--rate-scale {_below(self.options.rate_scale / load)}"

    def _source(self) -> Workload:
        """Return the workload."""
        given = self.options.workload
        if isinstance(given, Spec):
            workload: Workload = self._built("workload", given)
            return workload
        with self._naming_file("workload"):
            return find_workload(given, self._plugins, self.options.seed)

    def _served(self) -> ModelSpec:
        """Return the model that is served."""
        return find_or_read(self.options.model)

    def _blocks(self) -> int:
        """Return the blocks of the pool: as given, or what fits into memory."""
        blocks, memory = self.options.blocks, self.options.memory
        if blocks is not None:
            return blocks
        if memory is None:
            return self.deployment.blocks()
        fitting = self.deployment.blocks_in(memory)
        if not fitting:
            block = format_bytes(self.deployment.bytes_per_block)
            msg = f"--memory: {format_bytes(memory)} is less than a block, which takes {block}"
            raise InputError(msg)
        return fitting

    def _built(self, kind: str, spec: Spec, **defaults: Any) -> Any:
        with self._naming_file(kind):
            return self._plugins.build(kind, spec, {"seed": self.options.seed, **defaults})

    @contextmanager
    def _naming_file(self, option: str) -> Iterator[None]:
        """Let an error name the configuration file, if `option` comes from there."""
        try:
            yield
        except InputError as error:
            if option not in self._from_file:
                raise
            msg = f"{self.options.config}: {error}"
            raise InputError(msg) from error


def _below(number: float) -> str:
    """Write a number with two digits, rounded down."""
    rounded = Context(prec=2, rounding=ROUND_FLOOR).create_decimal(number)
    return f"{rounded.normalize():f}"
