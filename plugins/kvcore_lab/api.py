"""Calls of experiments: compare, plan, sweep, find_capacity, from names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import cached_property
from os import PathLike, fspath
from typing import Any, Literal, TypedDict, Unpack, cast

from kvcore.api import Source, flat_options
from kvcore.config import RunConfig, RunParts, SimulateOptions
from kvcore.config.options import check_names
from kvcore.config.values import PluginChoice, TierChoices
from kvcore.errors import InputError
from kvcore.files import as_path
from kvcore.models.cost import PrefillCost
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.plugins import Plugins
from kvcore.plugins.options import Spec
from kvcore.progress import Progress, silent
from kvcore_lab.candidates import Checkpoint, Policy, for_several_runs
from kvcore_lab.comparison import SHARING, Comparison, compare_policies
from kvcore_lab.plans.capacity import find_capacity as search_capacity
from kvcore_lab.plans.devices import plan_devices
from kvcore_lab.plans.planning import plan
from kvcore_lab.sweep import Grid, Journal, Plan, Sweep
from kvcore_lab.sweep import sweep as run_sweep
from kvcore_lab.sweep.executors import executor_for
from kvcore_lab.sweep.grid import MODES, Mode, read_sweep
from kvcore_plugins.cache_groups import GroupPlan, groups_of
from kvcore_replay.pricing import PriceModel

__all__ = ["compare", "find_capacity", "plan", "plan_devices", "sweep"]


def find_capacity(
    workload: Source = "mooncake",
    *,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
    **options: Unpack[SimulateOptions],
) -> dict[str, float | int]:
    """Return options with which a workload's queue does not grow until its last request.

    Empty if the queue does not grow anyway (`simulate(...).saturation`), or if no option helps.
    Otherwise `rate_scale`, the fastest within 5 %; `blocks`, if their number was given; and
    `tensor_parallel`: each is enough by itself, and found by some four simulations.

    Args:
        workload: the requests: a plugin with options, a file, a workload, or an iterable of
            `Request`.
        plugins: the plugins by name; None: those that are installed.
        progress: shows the number of simulations that have run; None: shows nothing.
        options: as for `simulate`; each simulation has copies of plugins that are instances.

    Raises:
        InputError, PluginError, PolicyError: as for `simulate`.
    """
    config = RunConfig("simulate", plugins, workload=workload, **flat_options(options))
    config = for_several_runs(config)
    if config.drafter is not None:
        msg = "drafter: what would hold is searched without drafts: leave it out"
        raise InputError(msg)
    parts = config.build(plugins, many=False)
    result = parts.run(residency=False)
    with (progress or silent)("searching for what would hold: simulations", None) as tick:
        return search_capacity(parts, result, tick)


class GroupedParts(RunParts):
    """The parts of a comparison in cache groups: their sizes are those of a `GroupPlan`."""

    @cached_property
    def plan(self) -> GroupPlan | None:
        """The cache groups of the model; None: all layers keep all tokens.

        Raises:
            InputError: there is no rule for what a layer keeps, or blocks do not fit the keys.
        """
        if self.model.uniform:
            return None
        plan = groups_of(self.model, self.geometry.block_size, self.codec)
        plan.check_keys(self.model.name, self.workload.key_tokens)
        return plan

    def _check_deployment(self) -> None:
        """Do nothing: layers that keep other things than tokens have groups."""

    def _block_bytes(self) -> int:
        """Return the bytes of a block of any group."""
        return super()._block_bytes() if self.plan is None else self.plan.bytes_per_block

    def _staged_bytes(self) -> int:
        """Return 0: no sequence runs, and so none has an unfinished block outside the pool."""
        return 0

    def _devices(self) -> int:
        """Return 1: no clock runs."""
        return 1


class CompareOptions(TypedDict, total=False):
    """The deployment, the cache and the requests of `compare`: options of `RunConfig`."""

    model: str | ModelSpec
    """The model whose K/V is cached."""
    device: str | DeviceSpec
    """The GPU that would compute a block again."""
    codec: PluginChoice
    """How K/V is kept, which sizes a block."""
    kv_dtype: str
    """An earlier name of `codec`."""
    block_size: int | None
    """Tokens of a block; None: as many as a key of the workload."""
    accounting: Literal["keys", "tokens"]
    """How blocks are counted."""
    prefix: PluginChoice
    """The prefix cache."""
    tier: TierChoices
    """Tiers below each pool; the optimum then bounds what pool and tiers hold together."""
    disable_hybrid_kv_cache_manager: bool
    """Whether all layers keep all tokens, as one group."""
    seed: int | None
    """Of the named policies that have an option `seed` and do not set it."""
    limit: int | None
    """How many of the first requests are replayed; None: all."""
    window: tuple[int, int | None] | str | None
    """The times between which these arrive, in seconds as text: `"60:120"`; a tuple has ns."""


def compare(
    workload: Source = "mooncake",
    policies: Policy | Iterable[Policy] = "lru,fifo,lfu,slru,cost,random,optimum",
    blocks: int | Iterable[int] | None = None,
    *,
    memory: int | str | Iterable[int | str] | None = None,
    checkpoint: Checkpoint | Iterable[Checkpoint] | None = None,
    recompute: PrefillCost | None = None,
    trace: str | PathLike[str] | None = None,
    residency: bool = False,
    price: PriceModel | str | None = None,
    jobs: int = 1,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
    **options: Unpack[CompareOptions],
) -> Comparison:
    """Replay a workload, serial and untimed, under each policy in a pool of each size.

    `kvcore.compare("mooncake", ["lru", MyPolicy, "optimum"], blocks=[5_859])` shows how far
    each policy is from the optimum, the hits of Belady's algorithm.

    Args:
        workload: the requests: a plugin with options, a file, a workload, or an iterable of
            `Request`.
        policies: one or several: names with options (one text may hold several), policies,
            which are copied for each row, their classes, functions that build one, and
            `optimum`, which has the alias `belady`.
        blocks: pool sizes in blocks, or one; None: a few parts of the workload's footprint.
        memory: pool sizes in bytes of K/V, such as `"40GiB"`, in place of `blocks`. With
            `accounting="tokens"` they are those of the cache groups of the model.
        checkpoint: checkpoint policies of these groups, in the same forms; None: the default
            alone. With them the last rows are a bound.
        recompute: the seconds that it costs to compute a block again; None: those of model and
            device.
        trace: the file to write every decision to; with one policy and one size.
        residency: whether to measure how long blocks rest, which takes two to three times as
            long.
        price: the prices of an API that caches prompts, or their text; None: no bills.
        jobs: processes that replay, where there are several rows, each with the memory of a
            row. More than one need a script with `if __name__ == "__main__":`.
        plugins: the plugins by name; None: those that are installed.
        progress: shows the number of requests that have been replayed; None: shows nothing.
        options: those of `CompareOptions`; Llama 3.1 8B on an H100 without any.

    Raises:
        InputError: no workload, no policy, a size that no pool can have, an unknown name or
            option, a block size that does not fit the keys, fewer than 1 job, a policy or a
            workload that several jobs cannot share, a trace of several rows, of the optimum or
            over the workload's own file, the optimum in `tokens` accounting or with another
            prefix cache than `radix`, or a request that cannot be read.
        PluginError: a plugin that cannot work here.
        PolicyError: a policy failed.
    """
    plugins = plugins or Plugins()
    check_names(options, list(CompareOptions.__annotations__))
    kept: dict[str, Any] = dict(options)
    uniform = kept.pop("disable_hybrid_kv_cache_manager", False)
    prefix: Any = kept.pop("prefix", SHARING)
    # Of no pool here: the sizes are those of the rows.
    config = for_several_runs(RunConfig("compare", workload=workload, blocks=1, **kept))
    accounting = options.get("accounting", "keys")
    grouped = accounting == "tokens" and memory is not None and not uniform
    parts = (GroupedParts if grouped else RunParts)(config, plugins)
    plan = parts.plan if isinstance(parts, GroupedParts) else None
    if memory is not None:
        if blocks is not None:
            msg = "blocks and memory both say how large the pool is: give one of them"
            raise InputError(msg)
        # A number of another type is one size too, and refused as such.
        several = isinstance(memory, Iterable) and not isinstance(memory, str)
        sizes = cast("Iterable[int | str]", memory if several else [memory])
        blocks = [parts.blocks_in(size) for size in sizes]
    return compare_policies(
        parts.workload,
        policies,
        blocks,
        block_size=parts.geometry.block_size,
        accounting=accounting,
        prefix=str(prefix) if isinstance(prefix, Spec) else prefix,
        groups=() if plan is None else plan.groups,
        checkpoint=checkpoint,
        recompute=recompute or parts.recompute,
        seed=options.get("seed"),
        trace=trace,
        residency=residency,
        tiers=parts.add_tiers if config.tier else None,
        price=price,
        jobs=jobs,
        plugins=plugins,
        progress=progress,
    )


def sweep(
    file: str | PathLike[str] | None = None,
    *,
    mode: Mode = "simulate",
    journal: str | PathLike[str] | None = None,
    jobs: int = 1,
    executor: str = "local",
    progress: Progress | None = None,
    gpu_price: Mapping[str, float] | None = None,
    **axes: Any,
) -> Sweep:
    """Run every combination of options, and return a row of each.

    `kvcore.sweep(workload=["mooncake", "zipf"], eviction=["lru", "arc"], limit=1000)` runs four
    simulations, as `kvcore sweep FILE` does with these lines in TOML; so does
    `kvcore.sweep("grid.toml")`.

    Args:
        file: a sweep in TOML, whose `out`, `jobs` and `executor` are those of the command
            line; None: `mode` and `axes` say what to run.
        mode: `simulate`, under a clock, or `compare`, without one.
        journal: file with the finished runs, from which an interrupted sweep goes on.
        jobs: runs at a time; 1: in this process. More need a script with
            `if __name__ == "__main__":`, as processes are started afresh.
        executor: machines to run on: `local`, `ray` or `ray:HOST:PORT`.
        progress: shows the number of runs that have ended; None: shows nothing.
        gpu_price: dollars an hour by device, in place of those of a table.
        axes: options of `RunConfig`, each with a value or a list of values; each run has
            copies of plugins that are instances.

    Raises:
        InputError: an option that does not exist, or a value that is not valid.
        PluginError: the executor cannot be used here.
        StorageError: the journal cannot be written.
    """
    if file is not None and axes:
        name = fspath(file)
        instead = f"give mode={name!r}" if name in MODES else f"leave {', '.join(axes)} out"
        msg = f"{name}, read as a sweep in TOML, has the options of the sweep: {instead}"
        raise InputError(msg)
    grid = Grid(mode, **axes) if file is None else read_sweep(as_path(file))[0]
    with nullcontext() if journal is None else Journal(journal) as opened:
        return run_sweep(
            Plan.from_grid(grid),
            opened,
            executor=executor_for(executor, jobs),
            progress=progress,
            gpu_price=gpu_price,
        )
