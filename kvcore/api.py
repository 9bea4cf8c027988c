"""The calls that most programs need: simulate, run, compare, plan and more, from names.

Each also takes objects where it takes names. The rooms below are imported by the first call
that needs them, so that `import kvcore` stays light.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack

import attrs

from kvcore.cache import KVCache
from kvcore.errors import InputError
from kvcore.files import refuse_overwrite
from kvcore.models.spec import DeviceSpec, ModelSpec, WeightDtype
from kvcore.plugins import Plugins, resolve
from kvcore.plugins.options import Spec
from kvcore.request import SLO, Request
from kvcore.serving import Batching, Result
from kvcore.serving.contiguous import simulate as run_simulation
from kvcore.trace import Trace
from kvcore.workloads import Workload

if TYPE_CHECKING:
    from kvcore.analysis import Comparison
    from kvcore.analysis.candidates import Policy
    from kvcore.analysis.planning import FleetPlan
    from kvcore.analysis.validation import Validation
    from kvcore.cache import PrefixIndex
    from kvcore.cluster.result import ClusterResult
    from kvcore.config import EngineParts, RunParts
    from kvcore.config.options import PluginChoice, TierChoices
    from kvcore.engine.engine import RunResult
    from kvcore.models.cost import PrefillCost
    from kvcore.models.pricing import PriceModel
    from kvcore.progress import Progress

Source: TypeAlias = str | PathLike[str] | Spec | Workload | Iterable[Request]
"""Where requests come from: a plugin's name with options, a file, a workload, or requests."""

PLUGINS = ("scheduler", "latency", "drafter", "generator", "backend", "codec")

SERVING = ("scheduler", "latency", "drafter", "batching", "slo", "rate_scale")
"""Options that go with a cache of the caller's."""

COMPUTING = (
    *("generator", "backend", "dtype", "codec", "clock", "stop_at_eos", "seed", "threads"),
)
"""Further options that go with a cache of the caller's in a run on tensors."""


class PoolOptions(TypedDict, total=False):
    """Options of the cache, and of the model and the devices; see `RunConfig`."""

    model: str | ModelSpec | None
    device: str | DeviceSpec
    tensor_parallel: int
    codec: PluginChoice | None
    weights_dtype: WeightDtype | None
    block_size: int | None
    blocks: int | None
    memory: int | str | None
    eviction: PluginChoice
    prefix: PluginChoice
    retention: PluginChoice | None
    tier: TierChoices


class ServingOptions(PoolOptions, total=False):
    """Options of a run under a clock; see `RunConfig`."""

    scheduler: PluginChoice | None
    latency: PluginChoice | None
    drafter: PluginChoice | None
    batching: Batching | Mapping[str, Any] | None
    max_tokens: int
    max_seqs: int
    steps: Literal["mixed", "prefill-first"]
    chunked: bool
    watermark: float
    like: str | None
    unchunked: Literal["alone", "wait"]
    max_chunk: int | None
    reserve: Literal["prompt", "chunk", "first-chunk"]
    commit: Literal["computed", "scheduled"]
    generated: Literal["keyed", "cached"]
    admit_after_preemption: bool
    ties: Literal["last", "first"]
    lag: int
    null_block: bool
    max_model_len: int | None
    new_token_ratio: float | None
    preempts: Literal["last", "shortest"]
    rate_scale: float
    slo: SLO | str | Mapping[str, float] | None
    seed: int | None
    limit: int | None
    window: tuple[int, int | None] | str | None
    allocation: Literal["paged", "contiguous"]


class ClusterOptions(ServingOptions, total=False):
    """Options of several servers that share requests; see `RunConfig`."""

    replicas: int | Sequence[Mapping[str, Any]]
    router: PluginChoice
    view: str
    fail: str | Sequence[str]
    autoscale: str | None
    disaggregate: str | None


class EngineOptions(ServingOptions, total=False):
    """Options of a run on tensors; see `RunConfig`."""

    generator: PluginChoice
    backend: PluginChoice
    dtype: str
    clock: Literal["model", "wall"]
    shrink: int | None
    stop_at_eos: bool
    threads: int | None


def simulate(
    workload: Source = "mooncake",
    *,
    cache: KVCache | None = None,
    max_output: int | None = None,
    fragmentation: bool = False,
    residency: bool = True,
    jumps: bool = True,
    trace: str | PathLike[str] | None = None,
    plugins: Plugins | None = None,
    **options: Unpack[ServingOptions],
) -> Result:
    """Serve a workload in the time that a latency model gives.

    `kvcore.simulate("mooncake", model="llama-3-8b", device="h100", scheduler="srpt")` builds
    what `kvcore simulate` builds: the pool fills the memory of the GPUs beside the weights, and
    defaults are those of the command. With a `cache` of your own, only options of the server
    are accepted, and their defaults are those of `kvcore.serving.simulate`.

    Args:
        workload: the requests: a plugin with options, a file, a workload, or an iterable of
            `Request`.
        cache: a new cache that accounts for tokens; None: one is built from the options.
        max_output: for `allocation="contiguous"`, the longest possible output in tokens;
            None: the longest of the workload.
        fragmentation: whether to measure the use of memory.
        residency: whether to measure how long blocks rest.
        jumps: whether decode steps between two events are run as one.
        trace: the file to write every decision to.
        plugins: the plugins by name; None: those that are installed.
        options: options of `RunConfig`, and `batching`, which gives several of them.

    Raises:
        InputError: an option that there is not, parts that do not fit one another, or a
            workload out of order.
        PluginError: a plugin that cannot work here.
        PolicyError: a plugin failed, or the scheduler lets nothing run.
    """
    measured: dict[str, Any] = {
        "max_output": max_output,
        "fragmentation": fragmentation,
        "residency": residency,
        "jumps": jumps,
    }
    if cache is not None:
        kept = _kept(options, (*SERVING, "allocation"), trace)
        return run_simulation(
            _opened(workload, plugins), cache=cache, **_resolved(kept, plugins), **measured
        )
    from kvcore.config import RunConfig, RunParts  # noqa: PLC0415 - `import kvcore` is light

    config = RunConfig.of("simulate", workload=workload, **_flat(options))
    parts = RunParts(config, plugins)
    with _traced(parts, trace) as written:
        made = parts.arguments(written) | {"allocation": config.allocation}
        return run_simulation(parts.workload, **made, **measured)


def simulate_cluster(
    workload: Source = "mooncake",
    *,
    residency: bool = False,
    trace: str | PathLike[str] | None = None,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
    **options: Unpack[ClusterOptions],
) -> ClusterResult:
    """Serve a workload with several replicas, among which a router divides the requests.

    `kvcore.simulate_cluster("mooncake", replicas=8, router="least-requests")` runs what
    `kvcore simulate --replicas 8` runs. Unlike replicas are tables of options, each with a
    `count`: `replicas=[{"count": 2, "device": "h200"}, {"count": 6, "max_seqs": 64}]`.

    Args:
        workload: the requests: a plugin with options, a file, a workload, or an iterable of
            `Request`.
        residency: whether to measure how long blocks rest, in the caches of `result.lives`.
        trace: the file to write every decision to.
        plugins: the plugins by name; None: those that are installed.
        progress: shows the number of requests that have arrived; None: shows nothing.
        options: options of `RunConfig`, and `batching`, which gives several of them.

    Raises:
        InputError: an option that there is not, parts that do not fit one another, a replica
            that fails and is not there, or a workload out of order.
        PluginError: a plugin that cannot work here.
        PolicyError: a plugin failed, or a scheduler lets nothing run.
    """
    from kvcore.cluster.simulate import simulate_cluster as run_cluster  # noqa: PLC0415 - of several servers
    from kvcore.config import RunConfig  # noqa: PLC0415 - `import kvcore` is light
    from kvcore.config.cluster import ClusterParts  # noqa: PLC0415 - as above
    from kvcore.progress import silent, ticked  # noqa: PLC0415 - as above

    config = RunConfig.of("simulate", workload=workload, **_flat(options))
    parts = ClusterParts(config, plugins)
    source = parts.workload
    with (
        _traced(parts, trace) as written,
        (progress or silent)(f"simulating {source.name}", source.size) as tick,
    ):
        return run_cluster(ticked(source, tick), **parts.cluster(written), residency=residency)


def find_capacity(
    workload: Source = "mooncake",
    *,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
    **options: Unpack[ServingOptions],
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
        options: as for `simulate`; plugins by name, since each simulation builds its own.

    Raises:
        InputError, PluginError, PolicyError: as for `simulate`.
    """
    from kvcore.analysis import find_capacity as search  # noqa: PLC0415 - as below
    from kvcore.config import RunConfig, RunParts  # noqa: PLC0415 - `import kvcore` is light
    from kvcore.progress import silent  # noqa: PLC0415 - as above

    config = RunConfig.of("simulate", workload=workload, **_flat(options))
    if config.drafter is not None:
        msg = "drafter: what would hold is searched without drafts: leave it out"
        raise InputError(msg)
    parts = RunParts(config, plugins)
    made = parts.arguments() | {"allocation": config.allocation}
    result = run_simulation(parts.workload, residency=False, **made)
    with (progress or silent)("searching for what would hold: simulations", None) as tick:
        return search(parts, result, tick)


def run(
    workload: Source = "mooncake",
    *,
    cache: KVCache | None = None,
    prompts: str | Sequence[str] | None = None,
    max_output: int | None = None,
    fragmentation: bool = False,
    residency: bool = True,
    trace: str | PathLike[str] | None = None,
    plugins: Plugins | None = None,
    **options: Unpack[EngineOptions],
) -> RunResult:
    """Serve a workload, or texts, by computing it on tensors.

    `kvcore.run("mooncake", limit=5)` builds what `kvcore run` builds: a tiny transformer on
    the CPU serves the first requests, with lengths divided so that a key is a block. With a
    `cache` of your own (made with `ids=True` or a trace), only options of the server and of
    the computation are accepted.

    Args:
        workload: the requests: a plugin with options, a file, a workload, or an iterable of
            `Request`.
        cache: a new cache that accounts for tokens; None: one is built from the options.
        prompts: texts to continue, or a single one, in place of a workload; None: none.
        max_output: tokens to generate for each text; None: 16.
        fragmentation: whether to measure the use of memory.
        residency: whether to measure how long blocks rest.
        trace: the file to write every decision to.
        plugins: the plugins by name; None: those that are installed.
        options: options of `RunConfig`, and `batching`, which gives several of them.

    Raises:
        InputError: as for `simulate`, or a dtype or shape that backend or generator lack.
        PluginError: a plugin that cannot work here.
        PolicyError: a plugin failed, or the scheduler lets nothing run.
        StorageError: the pool does not fit into the memory of the device.
    """
    from kvcore.engine.engine import run as run_engine  # noqa: PLC0415 - as above

    if cache is not None:
        kept: dict[str, Any] = {"generator": "transformer", "backend": "torch-cpu"}
        kept |= _kept(options, (*SERVING, *COMPUTING), trace)
        return run_engine(
            _opened(workload, plugins),
            cache=cache,
            fragmentation=fragmentation,
            residency=residency,
            **_resolved(kept, plugins),
        )
    from kvcore.config import EngineParts, RunConfig  # noqa: PLC0415 - `import kvcore` is light

    config = RunConfig.of("run", workload=workload, **_flat(options))
    texts = [prompts] if isinstance(prompts, str) else list(prompts or ())
    if prompts is not None and not texts:
        msg = "prompts: there is none: give a text, or leave prompts out to serve a workload"
        raise InputError(msg)
    parts = EngineParts(config, plugins, prompts=texts, max_output=max_output)
    with _traced(parts, trace) as written:
        return run_engine(
            parts.workload,
            **parts.arguments(written),
            fragmentation=fragmentation,
            residency=residency,
        )


def compare(
    workload: Source = "mooncake",
    policies: Policy | Iterable[Policy] = "lru,fifo,lfu,slru,cost,random,belady",
    blocks: int | Iterable[int] | None = None,
    *,
    memory: int | str | Iterable[int | str] | None = None,
    model: str | ModelSpec = "llama-3-8b",
    device: str | DeviceSpec = "h100",
    codec: PluginChoice = "fp16",
    block_size: int | None = None,
    accounting: Literal["keys", "tokens"] = "keys",
    prefix: PluginChoice = "radix",
    tier: TierChoices = (),
    recompute: PrefillCost | None = None,
    seed: int | None = None,
    limit: int | None = None,
    window: tuple[int, int | None] | str | None = None,
    trace: str | PathLike[str] | None = None,
    residency: bool = False,
    price: PriceModel | str | None = None,
    jobs: int = 1,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
    kv_dtype: str | None = None,
) -> Comparison:
    """Replay a workload, serial and untimed, under each policy in a pool of each size.

    `kvcore.compare("mooncake", ["lru", MyPolicy, "belady"], blocks=[5_859])` shows how far
    each policy is from the optimum, the hits of Belady's algorithm.

    Args:
        workload: the requests: a plugin with options, a file, a workload, or an iterable of
            `Request`.
        policies: one or several: names with options (one text may hold several), policy
            classes, functions that build a policy, and `belady` or its alias `optimum`.
        blocks: pool sizes in blocks, or one; None: a few parts of the workload's footprint.
        memory: pool sizes in bytes of K/V, such as `"40GiB"`, in place of `blocks`.
        model: the model whose K/V is cached.
        device: the GPU that would compute a block again.
        codec: how K/V is kept, which sizes a block.
        block_size: tokens a block holds; None: as many as a key of the workload.
        accounting: how blocks are counted.
        prefix: the prefix cache.
        tier: tiers below each pool, by name or as functions, since every row has its own;
            the optimum then bounds what the pool and the tiers hold together.
        recompute: the seconds that it costs to compute a block again; None: those of model and
            device.
        seed: of the named policies that have an option `seed` and do not set it.
        limit: how many of the first requests are replayed; None: all.
        window: the times between which these arrive, in seconds as text: `"60:120"`; a tuple
            has ns.
        trace: the file to write every decision to; with one policy and one size.
        residency: whether to measure how long blocks rest.
        price: the prices of an API that caches prompts, or their text; None: no bills.
        jobs: processes that replay, where there are several rows. More than one need a
            script with `if __name__ == "__main__":`.
        plugins: the plugins by name; None: those that are installed.
        progress: shows the number of requests that have been replayed; None: shows nothing.
        kv_dtype: an earlier name of `codec`.

    Raises:
        InputError: as `kvcore.analysis.compare`, or an option that cannot be.
        PluginError: a plugin that cannot work here.
        PolicyError: a policy failed.
    """
    from kvcore.analysis import compare as compare_policies  # noqa: PLC0415 - as above
    from kvcore.config import RunConfig, RunParts  # noqa: PLC0415 - as above

    plugins = plugins or Plugins()
    if kv_dtype is not None and codec != "fp16":
        msg = "kv_dtype is an earlier name of codec: give codec alone"
        raise InputError(msg)
    config = RunConfig.of(
        "compare",
        workload=workload,
        model=model,
        device=device,
        **({"codec": codec} if kv_dtype is None else {"kv_dtype": kv_dtype}),
        block_size=block_size,
        accounting=accounting,
        seed=seed,
        limit=limit,
        window=window,
        tier=tier,
        blocks=1,  # of no pool here: the sizes are those of the rows
    )
    parts = RunParts(config, plugins)
    if memory is not None:
        if blocks is not None:
            msg = "blocks and memory both say how large the pool is: give one of them"
            raise InputError(msg)
        sizes = [memory] if isinstance(memory, int | str) else memory
        blocks = [parts.blocks_in(size) for size in sizes]
    make: str | type[PrefixIndex] = str(prefix) if isinstance(prefix, Spec) else prefix  # type: ignore[assignment]
    return compare_policies(
        parts.workload,
        policies,
        blocks,
        block_size=parts.geometry.block_size,
        accounting=accounting,
        prefix=make,
        recompute=recompute or parts.recompute,
        seed=seed,
        trace=trace,
        residency=residency,
        tiers=parts.add_tiers if config.tier else None,
        price=price,
        jobs=jobs,
        plugins=plugins,
        progress=progress,
    )


def plan(
    workload: Source = "mooncake",
    *,
    percentile: float = 99,
    tensor_parallel: int | Iterable[int] = (1, 2, 4, 8),
    replicas: int | Iterable[int] | None = None,
    max_gpus: int = 64,
    tier: TierChoices = "host:memory=1TiB",
    policies: Iterable[tuple[str, str]] | None = None,
    journal: str | PathLike[str] | None = None,
    jobs: int = 1,
    executor: str = "local",
    progress: Progress | None = None,
    **options: Any,
) -> FleetPlan:
    """Return the least GPUs, K/V memory and host RAM with which a workload meets its SLO.

    `kvcore.plan("mooncake", device="h100", slo="ttft=2,tpot=0.05", percentile=95)` searches as
    `kvcore plan` does: by simulating fleets of replicas, among which sessions are divided by
    hash. `plan(...).limit` is the reason that a smaller fleet does not meet it.

    Args:
        workload: the requests: a plugin with options, a file, a workload, or an iterable of
            `Request`.
        percentile: percentage of the requests that must meet their SLO.
        tensor_parallel: GPUs that share a model: each number is tried.
        replicas: numbers of replicas; None: the fewest that do.
        max_gpus: GPUs in all, at most.
        tier: tiers below the pool; the memory of the one named `host` is the most host RAM of
            a replica. `"none"`: no tier.
        policies: (kind, name) of eviction policies and schedulers that the verdict tries; None:
            all that are installed.
        journal: file with the finished simulations, from which an interrupted search goes on.
        jobs: simulations at a time; 1: in this process. More need a script with
            `if __name__ == "__main__":`, as processes are started afresh.
        executor: machines to simulate on: `local`, `ray` or `ray:HOST:PORT`.
        progress: shows the number of simulations that are done; None: shows nothing.
        options: options of `RunConfig` for a simulation, such as `model`, `device`, `slo`,
            `eviction`; plugins by name. `blocks` or `memory` is the largest pool of a replica.

    Raises:
        InputError: as `simulate`, or nothing to plan for.
        PluginError: a plugin that cannot work here, or a simulation that failed.
        StorageError: the journal cannot be written.
    """
    from kvcore.analysis.planning import plan as search  # noqa: PLC0415 - as above
    from kvcore.analysis.sweep import Journal  # noqa: PLC0415 - as above
    from kvcore.analysis.sweep.plan import executor_for  # noqa: PLC0415 - as above

    with nullcontext() if journal is None else Journal(journal) as opened:
        return search(
            workload,
            percentile=percentile,
            tensor_parallel=tensor_parallel,
            replicas=replicas,
            max_gpus=max_gpus,
            tier=tier,
            policies=policies,
            journal=opened,
            executor=executor_for(executor, jobs),
            progress=progress,
            **_flat(options),
        )


def validate(
    source: str | PathLike[str],
    *,
    where: Mapping[str, str] | None = None,
    rounds: int = 10,
    spread: float = 0.2,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
    **options: Unpack[ServingOptions],
) -> Validation:
    """Simulate each row of a file of measurements, and compare the two.

    `kvcore.validate("rows.csv").errors("tpot")` has the errors of the time per token, as
    `kvcore validate rows.csv` prints them. A row with a `concurrency` is served as
    by a benchmark: that number of clients start together, and each sends a request as soon as
    its last one is answered. A row with a `rate` has Poisson arrivals; with an infinite rate
    all requests arrive at once. A row of a known `engine` is served by its rules.

    Args:
        source: a file in CSV or JSON Lines, or `aic`: the samples of the package
            aiconfigurator-core.
        where: values that rows have in columns, several with commas between them; other rows
            are not taken.
        rounds: requests of each client, in rows without a number of requests.
        spread: share by which lengths vary, as in the workload `bench`, in rows without one.
        plugins: the plugins by name; None: those that are installed.
        progress: shows the number of rows that have been simulated; None: shows nothing.
        options: options of `RunConfig` for rows that do not have them.

    Raises:
        InputError: the file cannot be read, or none of its rows can be simulated.
        PluginError: a plugin that cannot work here, or a package that is not installed.
    """
    from kvcore.analysis.validation import validate as compare_rows  # noqa: PLC0415 - as above

    return compare_rows(
        fspath(source),
        where=where,
        rounds=rounds,
        spread=spread,
        plugins=plugins,
        progress=progress,
        **_flat(options),
    )


def _opened(workload: Source, plugins: Plugins | None) -> Iterable[Request]:
    """Return the requests of a workload, which is opened if it is a name or a path."""
    if not isinstance(workload, str | Spec | PathLike):
        return workload
    from kvcore.workloads.selection import opened  # noqa: PLC0415 - as above

    named = str(workload) if isinstance(workload, Spec) else workload
    requests: Iterable[Request] = opened(named, plugins or Plugins())
    return requests


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the fields of `batching` among them, without those that are None."""
    flat = {
        name: value
        for name, value in options.items()
        if not (value is None and name in ("scheduler", "latency", "batching"))
    }
    caps = _caps(flat.pop("batching", {}))
    for name in flat.keys() & caps.keys():
        msg = f"{name} is given by itself and in batching: give one of them"
        raise InputError(msg)
    return flat | caps


def _caps(batching: object) -> dict[str, Any]:
    """Return the options that `batching` gives."""
    if isinstance(batching, Batching):
        return attrs.asdict(batching)
    if isinstance(batching, Mapping):
        return dict(batching)
    msg = f"batching={batching!r:.60}: give a Batching, or a table of its fields"
    raise InputError(msg)


def _kept(options: Mapping[str, Any], known: Sequence[str], trace: object) -> dict[str, Any]:
    """Return the options that go with a cache of the caller's.

    Raises:
        InputError: a trace, or an option of the cache that would be built without it.
    """
    if trace is not None:
        msg = (
            "trace= is for a cache that is built here; make yours with KVCache(..., trace=...)"
        )
        raise InputError(msg)
    for name in options:
        if name not in known:
            msg = (
                f"{name}= is for a cache that is built here; with cache= there are: "
                f"{', '.join(known)}"
            )
            raise InputError(msg)
    kept = dict(options)
    slo = kept.get("slo")
    if isinstance(slo, str | Mapping):
        from kvcore.config.options import read_option  # noqa: PLC0415 - as above

        kept["slo"] = read_option("slo", slo)
    if isinstance(kept.get("batching"), Mapping):
        from kvcore.config.options import check_names  # noqa: PLC0415 - as above

        caps = _caps(kept["batching"])
        check_names(caps, list(attrs.fields_dict(Batching)))
        kept["batching"] = Batching(**caps)
    return kept


def _resolved(options: Mapping[str, Any], plugins: Plugins | None) -> dict[str, Any]:
    """Return options with their plugins built, names by `plugins`."""
    return {
        name: resolve(name, value, plugins=plugins) if name in PLUGINS else value
        for name, value in options.items()
        if value is not None
    }


@contextmanager
def _traced(
    parts: RunParts | EngineParts, path: str | PathLike[str] | None
) -> Iterator[Trace | None]:
    """Open the trace of a run, if it is to have one."""
    if path is None:
        yield None
        return
    refuse_overwrite(path, parts.workload.options().values())
    with Trace(path, **parts.header()) as trace:
        yield trace
