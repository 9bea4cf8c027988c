"""Comparison of routers: hits and latency of replicas, beside one cache of all their memory."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import attrs

from kvcore.cache import KVCache
from kvcore.cache.layout import BlockLayout
from kvcore.config.values import slo_text
from kvcore.errors import InputError, PluginError
from kvcore.notebook import Shown, data_frame
from kvcore.plugins import Plugins
from kvcore.plugins.options import Spec, parse
from kvcore.progress import Progress, silent
from kvcore.request import SLO, Request
from kvcore.serving.router import Router
from kvcore.workloads import Workload, check_keys, given_workload
from kvcore_cluster.config import ClusterParts
from kvcore_cluster.options import ReplicaChoices
from kvcore_lab.comparison import SHARING, Source, types_of
from kvcore_lab.sweep import Executor, Grid, Plan
from kvcore_lab.sweep.cells import CellRun, Task, WorkloadCache, named_replicas
from kvcore_lab.sweep.executors import ThisProcess, known_to
from kvcore_replay.belady import Future, belady
from kvcore_replay.gpu_cost import Cost, gpus_of, read_gpu_prices
from kvcore_replay.untimed import replay, replay_groups, replay_pools

if TYPE_CHECKING:
    from os import PathLike


HITS, CAME, GPUS = "reuse_ratio_token", "came", "gpus"
"""The columns of hits, of the times at which requests came, and of the GPUs that were paid for,
in the result of a task."""

Came: TypeAlias = Mapping[int | str, int] | None

COLUMNS = {
    "hit_ratio": HITS,
    "imbalance_requests": "imbalance_requests",
    "imbalance_busy": "imbalance_busy",
    "ttft_mean_s": "ttft_s_mean",
    "ttft_p99_s": "ttft_s_p99",
    "tpot_p99_s": "tpot_s_p99",
    "goodput": "goodput",
    "slo_met": "slo_met",
    "rejected": "rejected",
    "saturated": "saturated",
}
"""Attributes of a row, and the columns of a sweep from which they come."""


@attrs.frozen(kw_only=True)
class RouterRow:
    """A workload on replicas under one router.

    Attributes:
        replicas: their number; the text of `named_replicas` if they differ.
        router: name and options.
        hit_ratio: share of the prompt tokens that hit, in a pool or a tier below it.
        share_of_optimum: `hit_ratio` divided by that of the optimum in one cache; None if the
            optimum hits nothing.
        imbalance_requests, imbalance_busy: requests, and busy time, of the replica with the
            most, divided by the mean.
        ttft_mean_s, ttft_p99_s, tpot_p99_s: seconds; None without a value.
        goodput: requests per second that meet their SLO.
        slo_met: share of the requests that meet their SLO.
        rejected: number of rejected requests.
        saturated: whether the queue grew as long as requests arrived; None: unknown.
        usd_per_day: dollars that the GPUs cost a day; None without prices.
        usd_per_million_output_tokens: the same for a million generated tokens.
    """

    replicas: int | str
    router: str
    hit_ratio: float | None
    share_of_optimum: float | None
    imbalance_requests: float | None
    imbalance_busy: float | None
    ttft_mean_s: float | None
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    goodput: float | None
    slo_met: float | None
    rejected: int
    saturated: bool | None
    usd_per_day: float | None = None
    usd_per_million_output_tokens: float | None = None


@attrs.frozen(kw_only=True)
class SharedCache:
    """Hits of one cache that has the memory of all replicas.

    Serial and untimed: requests come one after another, and each finds the blocks of those
    before it. Their order is that of the workload; where requests of sessions follow the end
    of others, it is that in which they came to the router with the most hits. That bounds
    routers if requests are served in this order too; under a clock they overlap, and running
    ones take room.

    Attributes:
        replicas: the same as in `RouterRow`.
        blocks: blocks of the cache, including those of tiers.
        hit_ratio: share of the prompt tokens that hit, with the eviction policy of the
        replicas.
        optimum: the same share with Belady's rule; None if that is no bound, as with a
            retention policy, cache groups or pools of layers.
    """

    replicas: int | str
    blocks: int
    hit_ratio: float | None
    optimum: float | None


@attrs.frozen(kw_only=True, repr=False)
class RouterComparison(Shown):
    """The result of `compare_routers`.

    Attributes:
        workload: the workload that was served.
        config: the configuration of the first cluster, in the form of `kvcore simulate --json`.
        view: the knowledge that routers have of the replicas' caches.
        slo: the SLO of all requests that bring none, such as `ttft=30,tpot=0.1`.
        rows: for each number of replicas, one per router in the order of the arguments.
        shared: one cache for each number of replicas.
        gpu_prices: the prices of the GPUs in words; None without prices.
        notes: what the workload says of its requests, and of prompts for which the model has no
            positions.
    """

    workload: Source
    config: dict[str, Any]
    view: str
    slo: str
    rows: list[RouterRow]
    shared: list[SharedCache]
    gpu_prices: str | None = None
    notes: Sequence[str] = ()

    def to_frame(self) -> Any:
        """Return a polars DataFrame of the rows.

        Raises:
            PluginError: polars is not installed.
        """
        rows = [attrs.asdict(row) | {"replicas": str(row.replicas)} for row in self.rows]
        types = types_of(RouterRow) | {"replicas": "str"}
        return data_frame(rows, "`comparison.rows`", types)


def compare_routers(
    workload: str | PathLike[str] | Spec | Workload | Iterable[Request] = "mooncake",
    routers: str | type[Router] | Iterable[Any] | None = None,
    replicas: Iterable[ReplicaChoices] | ReplicaChoices = 8,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
    gpu_price: Mapping[str, float] | None = None,
    **options: Any,
) -> RouterComparison:
    """Serve a workload with replicas under each router, and once with one cache for all.

    `compare_routers("mooncake", "round-robin,least-requests", replicas=[2, 4, 8])`.

    Args:
        workload: a plugin's name with options, the path of a file, a workload, or an iterable
            of `Request`.
        routers: one or several: names with options (one text may hold several) or classes;
            None: all installed routers.
        replicas: their number; several numbers make a cluster each, and so does a list of
            tables of options, with a `count` each.
        executor: runs the simulations; None: one after another in this process. Any other
            executor needs routers that are installed.
        progress: shows the number of simulations that are done; None: no progress.
        gpu_price: dollars an hour by device, in place of those of `gpu_cost.PRICES`.
        options: options of `RunConfig`, such as `tensor_parallel`, `view`, `fail`.

    Raises:
        InputError: no router, or an option or workload that is not valid.
        PluginError: a plugin cannot be used here, or a simulation failed.
    """
    own = read_gpu_prices(gpu_price)
    given = given_workload(workload)  # to a grid, a list is one of alternatives
    workload = workload if given is None else given
    if "router" in options:
        msg = "router: a comparison is of several: give routers"
        raise InputError(msg)
    if routers is None:
        routers = map(Spec, Plugins().names("router"))
    elif isinstance(routers, str):
        routers = parse(routers)
    elif not isinstance(routers, Iterable):
        routers = [routers]
    alone = isinstance(replicas, int | Integral | str | Mapping)
    clusters: list[Any] = [replicas] if alone else list(cast("Iterable[Any]", replicas))
    if all(isinstance(cluster, Mapping) for cluster in clusters):
        clusters = [clusters]
    one = {name: [value] for name, value in options.items()}
    grid = Grid("simulate", workload=workload, replicas=clusters, router=[*routers], **one)
    plan = Plan.from_grid(grid)
    executor = executor or ThisProcess()
    shares = _Shares(plan, known_to(executor))
    results, notes = dict[str, dict[str, Any]](), dict[str, Sequence[str]]()
    tasks = {task.digest: _RouterTask(task.digest, task.cell) for task in plan.tasks}
    pairs = [*zip(plan.tasks, plan.rows, strict=True)]
    names = {task.digest: axes["router"] for task, axes in pairs}
    steps = len(tasks) + len(shares.parts)
    name = shares.source.name
    with (
        (progress or silent)(f"comparing routers on {name}: simulations", steps) as tick,
        closing(executor.run(tasks.values())) as outcomes,
    ):
        for outcome in outcomes:
            if outcome.result is None:
                router = names[outcome.digest]
                msg = f"the simulation with router {router} failed: {outcome.error}"
                raise PluginError(msg)
            results[outcome.digest] = outcome.result
            notes[outcome.digest] = outcome.notes
            tick(1)
        shared = {}
        for text, digests in shares.tasks.items():
            best = max((results[digest] for digest in digests), key=lambda row: row[HITS] or 0)
            shared[text] = shares.of_one_cache(text, best[CAME])
            tick(1)
    rows, prices = [], dict[str, None]()
    for task, axes in pairs:
        result, text = results[task.digest], axes["replicas"]
        tokens_s = result["throughput_tokens_s"]
        cost = Cost.for_gpus(result[GPUS], own, tokens_s)
        prices |= {} if cost is None else dict.fromkeys(cost.prices.split("; "))
        rows.append(_row(axes, result, shared[text], cost))
    return RouterComparison(
        workload=attrs.evolve(
            shares.source, requests=results[plan.tasks[0].digest]["requests"]
        ),
        config=shares.config,
        view=plan.tasks[0].cell.view,
        slo=slo_text(cast("SLO", plan.tasks[0].cell.slo)),
        rows=rows,
        shared=list(shared.values()),
        gpu_prices="; ".join(prices) or None,
        notes=[*dict.fromkeys(chain.from_iterable(notes[digest] for digest in tasks))],
    )


class _RouterTask(Task):
    """A cell whose result also has the times at which requests of sessions came, and GPUs."""

    def columns(self, cell: CellRun) -> dict[str, Any]:
        """Return the columns, `GPUS`, and `CAME`: times (ns) by request; None: recorded."""
        result = cell.simulated()
        log, came = result.log, None
        if log.last_start is not None:
            came = dict(zip(log.ids, log.arrival, strict=True))
        return cell.columns(result) | {CAME: came, GPUS: gpus_of(cell.parts, result)}


def _row(
    axes: Mapping[str, Any], result: Mapping[str, Any], shared: SharedCache, cost: Cost | None
) -> RouterRow:
    values = {name: result[column] for name, column in COLUMNS.items()}
    hits, optimum = values["hit_ratio"], shared.optimum
    return RouterRow(
        replicas=axes["replicas"],
        router=axes["router"],
        share_of_optimum=hits / optimum if hits is not None and optimum else None,
        **values,
        **({} if cost is None else cost.columns()),
    )


class _Shares:
    """Hits of one cache with the memory of all replicas, for each cluster of a plan.

    Attributes:
        parts: the parts of each cluster, by its replicas.
        tasks: the digests of the tasks of each cluster, one a router.
        source: the workload.
        config: the configuration of the first cluster.
    """

    def __init__(self, plan: Plan, known: WorkloadCache) -> None:
        self.parts: dict[int | str, ClusterParts] = {}
        self.tasks = defaultdict[int | str, list[str]](list)
        for task in plan.tasks:
            text = named_replicas(cast("Any", task.cell.replicas))
            self.tasks[text].append(task.digest)
            if text not in self.parts:
                parts = known.parts(task.cell)
                self.parts[text] = ClusterParts(parts.config, workload=parts.workload)
        first = next(iter(self.parts.values()))
        self.source = Source.from_workload(first.workload)
        cache = first.served_cache()
        plugins = first.scheduler(), cache.eviction, cache.prefix, cache.retention
        self.config = first.describe(*plugins, first.latency(), *first.tiers())
        self._futures: dict[int, tuple[Future, array[int], array[int], int]] = {}

    def of_one_cache(self, text: int | str, came: Came) -> SharedCache:
        """Return the hits of one cache for a cluster, named by its replicas.

        `came` has the times (ns) of the requests, by which the cache gets them; None: those of
        the workload.
        """
        parts, optimum = self.parts[text], None
        blocks = sum(member.blocks + member.tier_blocks for member in parts.members)
        requests = _ordered(parts.workload, came)
        if parts.layers:
            cache: Any = parts.served_cache(blocks=blocks)
            again = replay_groups if cache.grouped else replay_pools
            again(requests, cache, parts.batching.max_tokens)
        else:
            cache = KVCache(
                blocks,
                parts.geometry.block_size,
                eviction=parts.built("eviction"),
                prefix=parts.built("prefix"),
                accounting="tokens",
                key_tokens=parts.workload.key_tokens,
                recompute=parts.recompute,
            )
            replay(requests, cache)
            if cache.prefix.name == SHARING:
                optimum = self._optimum(parts, blocks, came)
        hits = cache.stats.ratios()["token"]
        return SharedCache(replicas=text, blocks=blocks, hit_ratio=hits, optimum=optimum)

    def _optimum(self, parts: ClusterParts, blocks: int, came: Came) -> float | None:
        """Return the share of the prompt tokens that Belady's rule hits."""
        if parts.config.retention is not None:
            return None
        size = parts.geometry.block_size
        if came is not None or size not in self._futures:
            self._futures[size] = self._read(parts.workload, size, came)
        future, shareable, limits, tokens = self._futures[size]
        hits = array("i", bytes(4 * len(shareable)))
        runs = future.starts, future.wanted, future.ends
        # With tiers the blocks of a prompt need not stay in the pool.
        bypass = bool(parts.config.tier)
        belady(shareable, future.lengths, *runs, blocks, bypass, hits)
        return sum(map(min, hits, limits)) * size / tokens if tokens else None

    @staticmethod
    def _read(
        workload: Workload, size: int, came: Came
    ) -> tuple[Future, array[int], array[int], int]:
        """Return the future of a workload, and by request the blocks that can be shared or hit.

        The last item is the number of prompt tokens.
        """
        layout = BlockLayout("tokens", size, workload.key_tokens)
        shareable, limits, tokens = array("i"), array("i"), 0

        def requests() -> Iterator[Request]:
            nonlocal tokens
            for request in _ordered(workload, came):
                prompt = layout.prompt(request)
                shareable.append(prompt.cacheable)
                limits.append(prompt.limit)
                tokens += prompt.tokens
                yield request

        return Future.read(requests(), layout), shareable, limits, tokens


def _ordered(workload: Workload, came: Came) -> Iterable[Request]:
    """Return the requests of a workload as they came; None: as recorded.

    Those of one time come in the order of the workload.
    """
    if came is None:
        return check_keys(workload)
    known = {request.id: request for request in check_keys(workload)}
    order = sorted(known, key=came.__getitem__)
    return (attrs.evolve(known[name], arrival=came[name]) for name in order)
