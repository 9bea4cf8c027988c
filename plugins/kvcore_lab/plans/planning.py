"""Plans: the smallest fleet that meets an SLO in simulation, and what limits a smaller one.

A fleet is a number of replicas of the model, all on equal numbers of GPUs, and a router that
divides the requests among them.

    GPUs       1, 2, 4 miss ──► 8 meets ──► 16      however they are divided into replicas
    replicas   bisected between the last number that misses and the first that meets
    pool       bisected down from all that fits     in steps of an eighth of a doubling, to
                                                    what the longest sequence needs
    host RAM   bisected down from all there is      in steps of a quarter of a doubling

More of a resource mostly helps, but not always: a router may divide requests unevenly, and a
smaller pool may admit requests in a better order. So a few sizes below the least one that
bisection finds are tried as well.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from fractions import Fraction
from functools import partial
from itertools import count, takewhile
from math import inf
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal, TypeAlias, TypeVar

import attrs

from kvcore.api import Source, flat_options
from kvcore.config import RunConfig
from kvcore.config.options import option_default, read_option
from kvcore.config.values import TierChoices
from kvcore.errors import InputError, PluginError
from kvcore.notebook import Shown, data_frame
from kvcore.progress import Progress, Tick, silent, unseen
from kvcore.request import SLO
from kvcore.workloads import check_keys, given_workload, notes_of
from kvcore_cli.report.tables import beyond_positions, counted, larger_blocks
from kvcore_cluster.config import ClusterParts
from kvcore_lab.plans.fleet import GRANTS, Fleet, FleetTask, Served
from kvcore_lab.plans.longest import Longest
from kvcore_lab.plans.start import not_in_start, start_command
from kvcore_lab.statistics import share_interval
from kvcore_lab.sweep.cells import CellRun, Outcome, WorkloadCache
from kvcore_lab.sweep.executors import Executor, executor_for, known_to
from kvcore_lab.sweep.grid import Grid
from kvcore_lab.sweep.journal import Journal
from kvcore_replay.gpu_cost import COLUMNS as COSTS
from kvcore_replay.gpu_cost import Cost, read_gpu_prices

T = TypeVar("T")

Verdict = Literal["capacity", "policy", "content", "compute", "none"]
"""The reason why a smaller fleet misses the SLO; `none`: there is no miss to explain, since no
fleet that was tried misses it, or none of the size of the best."""

HOST = "host:memory=1TiB"
"""The most host memory of a replica if no tier is given, where K/V can have tiers."""

DEGREES = (1, 2, 4, 8)
"""Numbers of GPUs of a replica that are tried if none are given."""

BUDGET = 30
"""About the most simulations for each number of GPUs of a replica: what progress expects."""

ROUTER = "llm-d"
"""The router if none is given: it looks at the load of replicas, and at what they cache."""

MOST_GPUS = 64
"""The most GPUs of a fleet if no number is given."""

POOL_STEPS, RAM_STEPS = 8, 4
"""Number of sizes of a pool, and of host RAM, from one size to half of it."""

POLICY_KINDS = ("eviction", "scheduler")
"""The kinds of policies that a verdict tries."""

NEIGHBOURS = 2
"""Number of further sizes that are tried below the least one that bisection finds."""


@attrs.frozen(kw_only=True)
class Option:
    """A fleet that meets the SLO, with the least memory that was found for it.

    Attributes:
        fleet: the fleet.
        pool_bytes: K/V memory of a replica, on all its GPUs together.
        served: the outcome of the workload.
        whole: the fleet with all the K/V memory of its GPUs, or what `memory` allows; `fleet`
            itself if that misses the SLO.
        whole_served: its outcome.
    """

    fleet: Fleet
    pool_bytes: int
    served: Served
    whole: Fleet
    whole_served: Served


@attrs.frozen(kw_only=True)
class Limit:
    """The resource that limits a fleet, found by simulating the fleet with one thing changed.

    Attributes:
        verdict: the first of these that holds. `policy`: the fleet meets the SLO with another
            eviction policy or scheduler. `capacity`: it does with foresight, or with a pool
            that never fills. `content`: no fleet of the search does, but this one would if
            all its prompts had been seen before. `compute`: none of these.
        fleet: the fleet that misses the SLO; None if no fleet does.
        attainment: share of its requests that meet the SLO.
        grants: the same share with each of `GRANTS` that could be simulated.
        policies: the same share by (kind, name) of each policy with which the fleet meets the
            SLO, best first.
    """

    verdict: Verdict
    fleet: Fleet | None = None
    attainment: float | None = None
    grants: dict[str, float] = attrs.field(factory=dict)
    policies: dict[tuple[str, str], float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True, repr=False)
class FleetPlan(Shown):
    """The result of `plan`.

    Attributes:
        setup: the options that all simulations share, in the form of a row of a sweep.
        requests: number of requests of the workload.
        percentile: percentage of the requests that must meet the SLO.
        max_gpus: the most GPUs of a fleet.
        block_bytes: bytes of a block, by GPUs of a replica.
        max_model_len: tokens of the longest sequence that a replica serves, by its GPUs.
        options: fleets that meet the SLO, best first: the fewest GPUs, then the least host
            RAM of all replicas together, then the smallest pools.
        limit: why a smaller fleet misses the SLO; or, if no fleet meets it, why the best one
            misses it.
        simulations: number of fleets that were simulated or found in the journal.
        notes: GPUs and policies that were left out, and requests that are rejected, with the
            reason.
        workload_notes: what the workload says of its requests, if it was read for this plan,
            and whether the model has positions for their prompts.
        gpu_price: dollars an hour by device, in place of those of `gpu_cost.PRICES`.
    """

    setup: dict[str, Any]
    requests: int
    percentile: float
    max_gpus: int
    block_bytes: dict[int, int]
    max_model_len: dict[int, int]
    options: list[Option]
    limit: Limit
    simulations: int
    notes: list[str]
    workload_notes: Sequence[str] = ()
    gpu_price: Mapping[str, float] = attrs.field(factory=dict)

    @property
    def best(self) -> Option | None:
        """The best fleet; None if no fleet meets the SLO."""
        return self.options[0] if self.options else None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        limit = self.limit
        price = Cost.for_gpus({self.setup["device"]: 1}, self.gpu_price, None)
        return {
            "setup": self.setup,
            "requests": self.requests,
            "percentile": self.percentile,
            "max_gpus": self.max_gpus,
            "plans": [
                self._sizes(option.fleet)
                | {
                    "slo_met": option.served.attainment,
                    "slo_met_interval": share_interval(option.served.met, option.served.judged),
                    "hit_ratio": option.served.hit_ratio,
                }
                | attrs.asdict(
                    option.served, filter=attrs.filters.exclude("complete", "requests")
                )
                | self._costs(option)
                | {"full_pool": self._whole(option)}
                | {"start": start_command(self.setup, self._sizes(option.whole))}
                for option in self.options
            ],
            "not_in_start": not_in_start(self.setup),
            "gpu_prices": None if price is None else price.prices,
            "limit": {
                "verdict": limit.verdict,
                "fleet": None if limit.fleet is None else self._sizes(limit.fleet),
                "slo_met": limit.attainment,
                "granted": limit.grants,
                "policies": [
                    {"kind": kind, "name": name, "slo_met": met}
                    for (kind, name), met in limit.policies.items()
                ],
            },
            "simulations": self.simulations,
            "notes": self.notes,
        }

    def _costs(self, option: Option) -> dict[str, Any]:
        """Return the cost of a fleet as columns; None without a price."""
        gpus = {self.setup["device"]: option.fleet.gpus}
        cost = Cost.for_gpus(gpus, self.gpu_price, option.served.throughput_tokens_s)
        return dict.fromkeys(COSTS) if cost is None else cost.columns()

    def _whole(self, option: Option) -> dict[str, Any]:
        """Return a fleet with all the K/V memory of its GPUs as a JSON object."""
        sizes, served = self._sizes(option.whole), option.whole_served
        return {
            "blocks": sizes["blocks"],
            "pool_bytes": sizes["pool_bytes"],
            "slo_met": served.attainment,
            "hit_ratio": served.hit_ratio,
            "ttft_s": served.ttft_s,
            "tpot_s": served.tpot_s,
        }

    def _sizes(self, fleet: Fleet) -> dict[str, int]:
        return {
            "replicas": fleet.replicas,
            "tensor_parallel": fleet.devices,
            "gpus": fleet.gpus,
            "blocks": fleet.blocks,
            "pool_bytes": fleet.blocks * self.block_bytes[fleet.devices],
            "host_bytes": fleet.host_bytes,
            "max_model_len": self.max_model_len[fleet.devices],
        }

    def to_frame(self) -> Any:
        """Return a polars DataFrame of the fleets that meet the SLO, best first.

        Raises:
            PluginError: polars is not installed.
        """
        sizes = attrs.filters.include("replicas", "devices", "blocks", "host_bytes")
        rows = [
            {
                **attrs.asdict(option.fleet, filter=sizes),
                "gpus": option.fleet.gpus,
                "pool_bytes": option.pool_bytes,
                "slo_met": option.served.attainment,
                "hit_ratio": option.served.hit_ratio,
                "ttft_s_p99": (option.served.ttft_s or {}).get("p99"),
                "tpot_s_p99": (option.served.tpot_s or {}).get("p99"),
                "busiest": option.served.busiest,
                "saturated": option.served.saturated,
                **self._costs(option),
            }
            for option in self.options
        ]
        return data_frame(rows, "`plan.options`")


def plan(
    workload: Source = "mooncake",
    *,
    percentile: float = 99,
    tensor_parallel: int | Iterable[int] = DEGREES,
    replicas: int | Iterable[int] | None = None,
    max_gpus: int = MOST_GPUS,
    tier: TierChoices = None,
    policies: Iterable[tuple[str, str]] | None = None,
    journal: str | PathLike[str] | Callable[[], AbstractContextManager[Journal]] | None = None,
    jobs: int = 1,
    executor: str | Executor | None = "local",
    progress: Progress | None = None,
    gpu_price: Mapping[str, float] | None = None,
    **options: Any,
) -> FleetPlan:
    """Return the least GPUs, K/V memory and host RAM with which a workload meets its SLO.

    `kvcore.plan("mooncake", device="h100", slo="ttft=2,tpot=0.05", percentile=95)` searches as
    `kvcore plan` does: by simulating fleets of replicas, among which a router divides the
    requests. `plan(...).limit` is the reason that a smaller fleet does not meet it.

    For each number of GPUs of a replica: the fewest replicas that meet it, with the smallest
    pool; and, if fewer replicas meet it with host RAM, these with the least host RAM. Fleets
    of more than twice the GPUs of the first one that meets it are not searched. Takes 30 to
    120 simulations of the workload, which is held in memory; a simulation ends when too many
    requests have missed the SLO.

    Args:
        workload: the requests: a plugin with options, a file, a workload, or an iterable of
            `Request`.
        percentile: percentage of the requests that must meet their SLO.
        tensor_parallel: GPUs that share a model: each number is tried.
        replicas: numbers of replicas; None: the fewest that do.
        max_gpus: GPUs in all, at most.
        tier: tiers below the pool; the memory of the one named `host` is the most host RAM of
            a replica. `"none"`: no tier; None: `host:memory=1TiB`, but no tier below pools that
            have none, as those of `like="sglang"` for a hybrid model.
        policies: (kind, name) of eviction policies and schedulers that the verdict tries; None:
            all that are installed.
        journal: file with the finished simulations, from which an interrupted search goes on;
            or a function that opens one, called when the arguments are checked.
        jobs: simulations at a time; 1: in this process. More need a script with
            `if __name__ == "__main__":`, as processes are started afresh.
        executor: machines to simulate on: `local` or None, `ray` or `ray:HOST:PORT`; or what
            runs the simulations.
        progress: shows the number of simulations that are done; None: shows nothing.
        gpu_price: dollars an hour by device, in place of those of a table.
        options: options of `RunConfig` for a simulation, such as `model`, `device`, `slo`,
            `eviction` and `router` (`llm-d`); each simulation has copies of plugins that are
            instances. `blocks` or `memory` is the largest pool of a replica.

    Raises:
        InputError: as `simulate`, or nothing to plan for.
        PluginError: a plugin that cannot work here, or a simulation that failed.
        StorageError: the journal cannot be written.
    """
    if executor is None or isinstance(executor, str):
        executor = executor_for(executor or "local", jobs)
    options = flat_options(options)
    if not isinstance(percentile, Real) or not 0 < percentile <= 100:  # noqa: PLR2004
        msg = f"percentile {percentile!r}: give a percentage above 0 and up to 100"
        raise InputError(msg)
    prices = read_gpu_prices(gpu_price)
    (max_gpus,) = _numbers("max_gpus", [max_gpus])
    degrees = _numbers("tensor_parallel", tensor_parallel)
    counts = None if replicas is None else _numbers("replicas", replicas)
    if (workload_given := given_workload(workload)) is not None:
        workload = workload_given  # to a grid, a list is one of alternatives
    options.setdefault("router", ROUTER)
    grid = Grid("simulate", workload=workload, tensor_parallel=degrees, **options)
    _check_options(grid)
    tiers = read_option("tier", tier)
    cells = [cell.changed(tier=tiers) for cell in grid]
    if cells[0].slo == SLO():
        msg = "slo: nothing is expected, so there is nothing to plan for: give ttft or tpot"
        raise InputError(msg)
    planner = _Planner(percentile, max_gpus, None, executor, known_to(executor))
    planner.add(cells, counts, adds_host=tier is None)
    if not callable(journal):
        journal = nullcontext if journal is None else partial(Journal, journal)
    with journal() as planner.journal:
        plans = planner.plan(counts, policies, progress or silent)
    return attrs.evolve(plans, gpu_price=prices)


def _check_options(grid: Grid) -> None:
    """Raise InputError for several values of an option, and for options of clusters."""
    for name, values in grid.axes.items():
        if name in ("fail", "autoscale"):
            msg = f"{name}: the replicas of a plan are always up: leave it out"
            raise InputError(msg)
        if len(values) > 1 and name != "tensor_parallel":
            msg = f"{name}: {len(values)} values were given, and a plan is for one: give one"
            raise InputError(msg)


def _numbers(what: str, given: Iterable[int] | int) -> list[int]:
    """Return numbers of 1 or more, ascending and without repetitions."""
    several = isinstance(given, Iterable) and not isinstance(given, str)
    numbers: list[Any] = [*given] if several else [given]  # type: ignore[misc]
    whole = sorted({int(number) for number in numbers if isinstance(number, Integral)})
    if not whole or whole[0] < 1 or not all(isinstance(n, Integral) for n in numbers):
        msg = f"{what}: {numbers} was given; give numbers of 1 or more, without fractions"
        raise InputError(msg)
    return whole


Search: TypeAlias = Generator[list[Fleet], None, T]
"""Yields fleets to simulate; is resumed when all of them are simulated."""

Phases: TypeAlias = Generator[None, None, T]
"""Yields when it has queued what it can; is resumed after each simulation that ends."""


@attrs.define
class _Planner:
    """Runs several searches over fleets at a time, by the results of finished simulations.

    Attributes:
        percentile, max_gpus: as in `FleetPlan`.
        journal: the file with the results of earlier searches; None: there is none.
        executor: runs the tasks of `queue`, and takes those that are added meanwhile.
        known: plugins and workloads that simulations in this process share.
        tick: advances progress.
        cells: the configuration of a replica, by its GPUs, ascending; all have one workload.
        full: blocks of the largest pool, by the GPUs of a replica.
        block_bytes: bytes of a block, by the GPUs of a replica.
        longest: the longest sequence that a replica serves, by its GPUs.
        host: the most bytes of host memory of a replica.
        queue: the tasks to run next; workers take them from it.
        running: the fleets that are queued or being simulated, by the digest of their task:
            several if policies that are given are the same, such as `slo` and `slo:seed=0`.
        served: the outcome of each fleet that was simulated.
        failed: why a fleet with another policy, or with foresight, could not be simulated.
        notes, told: `notes` and `workload_notes` of `FleetPlan`.
        left: simulations that progress still expects.
    """

    percentile: float
    max_gpus: int
    journal: Journal | None
    executor: Executor
    known: WorkloadCache
    cells: dict[int, RunConfig] = attrs.field(factory=dict)
    full: dict[int, int] = attrs.field(factory=dict)
    block_bytes: dict[int, int] = attrs.field(factory=dict)
    longest: dict[int, Longest] = attrs.field(factory=dict)
    host: int = 0
    queue: deque[FleetTask] = attrs.field(factory=deque)
    running: dict[str, list[Fleet]] = attrs.field(factory=dict)
    served: dict[Fleet, Served] = attrs.field(factory=dict)
    failed: dict[Fleet, str] = attrs.field(factory=dict)
    notes: list[str] = attrs.field(factory=list)
    told: dict[str, None] = attrs.field(factory=dict)
    tick: Tick = unseen
    left: int = 0

    def add(
        self, cells: Iterable[RunConfig], counts: list[int] | None, *, adds_host: bool
    ) -> None:
        """Add the configurations that can be simulated; leave a note for each other one.

        With `adds_host` each gets the tier `HOST`, if its pools can have tiers.

        Raises:
            InputError: no configuration can be simulated; says why the last one cannot.
        """
        fault: InputError | None = None
        lengths: Counter[tuple[int, int]] = Counter()
        for cell in cells:
            devices, least = cell.tensor_parallel, 1 if counts is None else counts[0]
            if devices * least > self.max_gpus:
                msg = f"{least} x {devices} GPUs are more than {self.max_gpus}"
                fault = InputError(f"max_gpus: {msg}")
                self.notes.append(f"{msg}: not tried")
                continue
            try:
                parts = self.known.parts(cell)
                if adds_host and (parts.layers is None or parts.layers.takes_tiers):
                    cell = cell.changed(tier=read_option("tier", HOST))  # noqa: PLW2901
                    parts = self.known.parts(cell)
                ClusterParts(cell, parts.plugins, workload=parts.workload).cluster()
            except InputError as error:
                fault = error
                self.notes.append(f"{counted(devices, 'GPU')} a replica: {error}")
                continue
            if not lengths:
                self.known.hold(cell)
                lengths.update(
                    (request.prompt_tokens, request.output_tokens)
                    for request in check_keys(parts.workload)
                )
                prompts = (prompt for prompt, _ in lengths.elements())
                notes = beyond_positions(parts, prompts), larger_blocks(parts)
                # Read here, rather than where fleets are simulated, which end in any order.
                self.told |= dict.fromkeys([*filter(None, notes), *notes_of(parts.workload)])
            longest = Longest.from_lengths(parts, lengths)
            full = parts.blocks + parts.null_blocks
            if cell.max_model_len is not None and longest.blocks > full:
                fault = InputError(
                    f"max_model_len: a sequence of {longest.tokens:,} tokens takes "
                    f"{longest.blocks:,} blocks; the pool has {full:,}: give less"
                )
                self.notes.append(f"{counted(devices, 'GPU')} a replica: {fault}")
                continue
            if longest.rejected:
                self.notes.append(
                    f"{counted(devices, 'GPU')} a replica: {longest.rejected:,} of "
                    f"{counted(lengths.total(), 'request')} are rejected even by the largest "
                    f"pool; the first: {longest.reason}"
                )
            self.cells[devices] = cell
            self.full[devices] = full
            self.longest[devices] = longest
            self.block_bytes[devices] = parts.deployment.bytes_per_block
            self.host = sum(tier.memory for tier in parts.tiers() if tier.name == "host")
        if not self.cells and fault is not None:
            raise fault

    def plan(
        self,
        counts: list[int] | None,
        policies: Iterable[tuple[str, str]] | None,
        progress: Progress,
    ) -> FleetPlan:
        """Search for the least fleets, then for what limits smaller ones."""
        tried = self._policies(policies)
        searches = len(self.cells) * (1 if counts is None else len(counts))
        budget = BUDGET * searches + len(tried) + len(GRANTS)
        with progress("planning: simulations", budget) as self.tick:
            self.left = budget
            options, limit = self._run(self._phases(counts, tried))
            self.tick(self.left)
        return FleetPlan(
            setup=self._setup(),
            requests=next(iter(self.served.values())).requests,
            percentile=self.percentile,
            max_gpus=self.max_gpus,
            block_bytes=self.block_bytes,
            max_model_len={gpus: longest.tokens for gpus, longest in self.longest.items()},
            options=options,
            limit=limit,
            simulations=len(self.served),
            notes=self.notes,
            workload_notes=[*self.told],
        )

    def _phases(
        self, counts: list[int] | None, tried: list[tuple[str, str]]
    ) -> Phases[tuple[list[Option], Limit]]:
        """Return the least fleets, best first, and what limits smaller ones."""
        start = self._ladder() if counts is None else self._each(counts)
        (starts,) = yield from self._together([start])
        fewer = [self._least(self._replicas(*start)) for start in starts]
        fleets = _worthwhile((yield from self._together(fewer)))
        # The pools of fleets with host RAM are made smaller by `_small`.
        less = [
            self._least(self._hosts(fleet) if fleet.host_bytes else self._pools(fleet))
            for fleet in fleets
        ]
        candidates = yield from self._together(less)
        fewest = min((fleet.gpus for fleet in candidates), default=0)
        smaller = [self._small(fleet) for fleet in candidates if fleet.gpus == fewest]
        small = yield from self._together(smaller)
        candidates += [fleet for fleet in small if fleet is not None]
        found = [self._option(fleet) for fleet in dict.fromkeys(candidates)]
        options = sorted((yield from self._together(found)), key=_rank)
        (limit,) = yield from self._together([self._limit(options, tried)])
        return options, limit

    def _setup(self) -> dict[str, Any]:
        """Return the options that all fleets have in common, in the form of a row."""
        cell = next(iter(self.cells.values()))
        searched = ("tensor_parallel", "blocks", "pool_bytes", "replicas", "fail", "autoscale")
        row = CellRun(cell, self.known).row
        if row["checkpoint"] == str(option_default("checkpoint")):
            del row["checkpoint"]  # few models keep states
        row["device"] = getattr(cell.device, "name", cell.device)
        return {name: value for name, value in row.items() if name not in searched}

    def _meets(self, fleet: Fleet) -> bool:
        """Return True if enough requests met their SLO on a fleet that was simulated."""
        served = self.served.get(fleet)
        if served is None or not served.judged:
            return False
        return Fraction(served.met, served.judged) >= Fraction(str(self.percentile)) / 100

    def _option(self, fleet: Fleet) -> Search[Option]:
        """Return a fleet, and the same with the largest pool, with which the search began.

        Where it began with more host RAM too, that is one more simulation.
        """
        whole = attrs.evolve(fleet, blocks=self.full[fleet.devices])
        yield [whole]
        if not self._meets(whole):  # more memory is rarely worse
            whole = fleet
        return Option(
            fleet=fleet,
            pool_bytes=fleet.blocks * self.block_bytes[fleet.devices],
            served=self.served[fleet],
            whole=whole,
            whole_served=self.served[whole],
        )

    def _full(self, devices: int, replicas: int) -> list[Fleet]:
        """Return fleets with the largest pool: one without host RAM, and one with all of it."""
        bare = Fleet(replicas=replicas, devices=devices, blocks=self.full[devices])
        return [bare, attrs.evolve(bare, host_bytes=self.host)] if self.host else [bare]

    def _ladder(self) -> Search[list[tuple[Fleet, int]]]:
        """Return fleets that meet the SLO, each with the most replicas that miss it, or 0.

        The number of GPUs is doubled until a fleet meets the SLO, and then once more.
        """
        fleets: dict[tuple[int, int], tuple[Fleet, int]] = {}
        missed: dict[tuple[int, int], int] = {}
        gpus, last = min(self.cells), self.max_gpus
        while True:
            rung = [
                fleet
                for devices in self.cells
                if devices <= gpus
                for fleet in self._full(devices, gpus // devices)
                if (devices, fleet.host_bytes) not in fleets
            ]
            yield rung
            for fleet in rung:
                kind = fleet.devices, fleet.host_bytes
                if self._meets(fleet):
                    fleets[kind] = fleet, missed.get(kind, 0)
                else:
                    missed[kind] = fleet.replicas
            if gpus == last:
                return list(fleets.values())
            if fleets and last == self.max_gpus:
                last = min(2 * gpus, last)
            gpus = min(2 * gpus, last)

    def _each(self, counts: list[int]) -> Search[list[tuple[Fleet, int]]]:
        """Return fleets as `_ladder` does, with one of `counts` as number of replicas.

        No fewer replicas shall be tried: what is said to miss is one replica less.
        """
        fleets = [
            fleet
            for devices in self.cells
            for replicas in counts
            if replicas * devices <= self.max_gpus
            for fleet in self._full(devices, replicas)
        ]
        yield fleets
        return [(fleet, fleet.replicas - 1) for fleet in fleets if self._meets(fleet)]

    def _replicas(self, fleet: Fleet, missed: int) -> list[Fleet]:
        """Return the fleet, then those with fewer replicas down to `missed + 1`."""
        numbers = range(fleet.replicas, missed, -1)
        return [attrs.evolve(fleet, replicas=number) for number in numbers]

    def _small(self, fleet: Fleet) -> Search[Fleet | None]:
        """Return a fleet with host RAM and the smallest pool, then with the least host RAM.

        None if the pool is not smaller by a quarter at least.
        """
        helped = attrs.evolve(fleet, host_bytes=self.host)
        yield [helped]
        if not self.host or not self._meets(helped):
            return None
        small = yield from self._least(self._pools(helped))
        if 4 * small.blocks > 3 * fleet.blocks:
            return None
        return (yield from self._least(self._hosts(small)))

    def _pools(self, fleet: Fleet) -> list[Fleet]:
        """Return the fleet, then those with a smaller pool, largest first."""
        # vLLM starts if a sequence of the longest length fits, and keeps a block for itself.
        least = self.longest[fleet.devices].blocks + 1
        sizes = _smaller(fleet.blocks, POOL_STEPS, least)
        return [attrs.evolve(fleet, blocks=size) for size in sizes]

    def _hosts(self, fleet: Fleet) -> list[Fleet]:
        """Return the fleet, then those with less host RAM, most first."""
        least = 64 * self.block_bytes[fleet.devices]  # fewer blocks are no tier
        sizes = _smaller(fleet.host_bytes, RAM_STEPS, least)
        return [attrs.evolve(fleet, host_bytes=size) for size in sizes]

    def _least(self, fleets: Sequence[Fleet]) -> Search[Fleet]:
        """Return the last of `fleets`, in descending order, that meets the SLO.

        The first fleet meets it. After a bisection, between one that meets it and one that does
        not, the next few smaller ones are tried: a smaller pool sometimes does better.
        """
        low, high = 0, len(fleets)
        while high - low > 1:
            middle = (low + high) // 2
            yield [fleets[middle]]
            low, high = (middle, high) if self._meets(fleets[middle]) else (low, middle)
        while True:
            below = range(low + 2, min(low + 2 + NEIGHBOURS, len(fleets)))
            yield [fleets[index] for index in below]
            lower = [index for index in below if self._meets(fleets[index])]
            if not lower:
                return fleets[low]
            low = lower[-1]

    def _policies(self, pairs: Iterable[tuple[str, str]] | None) -> list[tuple[str, str]]:
        """Return the policies that the verdict tries: all but those of the configuration."""
        config = next(iter(self.cells.values()))
        plugins = self.known.plugins
        if pairs is None:
            pairs = [(kind, name) for kind in POLICY_KINDS for name in plugins.names(kind)]
        own = {(kind, str(getattr(config, kind))) for kind in POLICY_KINDS}
        tried: list[tuple[str, str]] = []
        for pair in pairs:
            match pair:
                case (str(kind), str(name)) if kind in POLICY_KINDS:
                    tried.append((kind, name))
                case _:
                    kinds = " or ".join(map(repr, POLICY_KINDS))
                    msg = f"policies: {pair!r} was given; give pairs of {kinds} and a policy"
                    raise InputError(msg)
        return [pair for pair in tried if pair not in own]

    def _limit(self, options: list[Option], tried: list[tuple[str, str]]) -> Search[Limit]:
        """Return the resource that limits the fleet that misses the SLO by the least."""
        fleet = self._nearest_miss(options)
        if fleet is None:
            return Limit(verdict="none")
        fleets = [attrs.evolve(fleet, grant=grant, to_the_end=True) for grant in ("", *GRANTS)]
        yield fleets
        reference, *granted = fleets
        foresight, endless, seen = map(self._meets, granted)
        # If even a pool that never evicts misses the SLO, and foresight too, it is unlikely
        # that another eviction policy meets it.
        kinds = POLICY_KINDS if endless or foresight else ("scheduler",)
        variants = [attrs.evolve(fleet, policy=pair) for pair in tried if pair[0] in kinds]
        yield variants
        verdict: Verdict = "compute"
        if any(map(self._meets, variants)):
            verdict = "policy"
        elif foresight or endless:
            verdict = "capacity"
        elif seen and not options:
            verdict = "content"
        shares = {
            fleet.policy: self.served[fleet].attainment
            for fleet in variants
            if fleet.policy is not None and self._meets(fleet)
        }
        self.notes += [
            f"{fleet.policy[1] if fleet.policy else fleet.grant} could not be judged: {why}"
            for fleet in (*granted, *variants)
            if (why := self.failed.get(fleet)) is not None
        ]
        return Limit(
            verdict=verdict,
            fleet=fleet,
            attainment=self.served[reference].attainment,
            grants={
                fleet.grant: self.served[fleet].attainment
                for fleet in granted
                if fleet in self.served
            },
            policies=dict(sorted(shares.items(), key=lambda item: -item[1])),
        )

    def _nearest_miss(self, options: list[Option]) -> Fleet | None:
        """Return the fleet whose limit is explained; None if no fleet misses the SLO.

        It is the one with the highest share of requests in time (of simulations that ended
        early, the share that was sure by then) among fleets with all memory: those with
        fewer GPUs than the best plan, or all if there is no plan. If there is none, it is the
        best plan with the most memory that was too little.
        """
        misses = [fleet for fleet in self.served if not self._meets(fleet)]
        full = [
            miss
            for miss in misses
            if (miss.blocks, miss.host_bytes) == (self.full[miss.devices], self.host)
        ]
        best = options[0].fleet if options else None
        fewer = [fleet for fleet in full if best is None or fleet.gpus < best.gpus]
        if best is None or fewer:
            # Fleets have ended in any order: with all memory, two numbers tell them apart.
            return max(
                fewer,
                key=lambda fleet: (
                    self.served[fleet].attainment,
                    -fleet.gpus,
                    -fleet.devices,
                ),
            )
        less = [
            miss
            for miss in misses
            if attrs.evolve(miss, blocks=best.blocks, host_bytes=best.host_bytes) == best
            and miss.blocks <= best.blocks
            and miss.host_bytes <= best.host_bytes
        ]
        return max(less, key=lambda fleet: (fleet.host_bytes, fleet.blocks), default=None)

    def _run(self, phases: Phases[T]) -> T:
        """Simulate the fleets that phases queue until they end; return their result.

        The workers are started once, so that each reads the workload once.
        """
        try:
            next(phases)
            with closing(self.executor.run(self.queue)) as outcomes:
                for outcome in outcomes:
                    self._ended(outcome)
                    next(phases)
        except StopIteration as end:
            result: T = end.value
            return result
        msg = f"{type(self.executor).__name__}: it ended without an outcome for each task"
        raise PluginError(msg)

    def _ended(self, outcome: Outcome) -> None:
        """Record the outcome of a fleet that was queued, also in the journal."""
        fleets = self.running.pop(outcome.digest)
        if outcome.result is not None and self.journal is not None:
            row = attrs.asdict(fleets[0])
            self.journal.add(outcome.digest, row, outcome.result, outcome.wall_s)
        for fleet in fleets:
            if outcome.result is None:
                self._fail(fleet, str(outcome.error))
            else:
                self._record(fleet, outcome.result)

    def _together(self, searches: list[Search[T]]) -> Phases[list[T]]:
        """Run searches to their ends, all at the same time; return their results in order."""
        results: dict[int, T] = {}
        wanted: dict[int, list[Fleet]] = {index: [] for index in range(len(searches))}
        while True:
            for index, search in enumerate(searches):
                while index not in results and all(map(self._done, wanted[index])):
                    try:
                        wanted[index] = next(search)
                    except StopIteration as end:
                        results[index] = end.value
                    else:
                        for fleet in wanted[index]:
                            self._ask(fleet)
            if len(results) == len(searches):
                return [results[index] for index in range(len(searches))]
            yield

    def _done(self, fleet: Fleet) -> bool:
        return fleet in self.served or fleet in self.failed

    def _ask(self, fleet: Fleet) -> None:
        """Queue the simulation of a fleet, unless its result is known."""
        if self._done(fleet):
            return
        try:
            percentile = 0 if fleet.to_the_end else self.percentile
            task = FleetTask.from_cell(self.cells[fleet.devices], fleet, percentile, self.known)
        except (InputError, PluginError) as error:
            if not fleet.varies_policy:
                raise
            self._fail(fleet, str(error))
            return
        results = {} if self.journal is None else self.journal.results
        known = results.get(task.digest)
        if known is not None and known.keys() == attrs.fields_dict(Served).keys():
            self._record(fleet, known)
            return
        same = self.running.setdefault(task.digest, [])
        if not same:
            self.queue.append(task)
        if fleet not in same:
            same.append(fleet)

    def _record(self, fleet: Fleet, result: dict[str, Any]) -> None:
        served = Served(**result)
        if not served.judged:
            msg = "slo: it judges no request of this workload, so there is nothing to plan for"
            raise InputError(msg)
        self.served[fleet] = served
        self._ticked()

    def _fail(self, fleet: Fleet, why: str) -> None:
        """Record that a policy cannot serve; raise PluginError for any other fleet."""
        if not fleet.varies_policy:
            msg = f"{fleet.replicas} x {fleet.devices} GPUs could not be simulated: {why}"
            raise PluginError(msg)
        self.failed[fleet] = why
        self._ticked()

    def _ticked(self) -> None:
        """Report a finished simulation, if progress still expects one."""
        self.tick(min(1, self.left))
        self.left = max(0, self.left - 1)


def _smaller(largest: int, steps: int, least: int) -> list[int]:
    """Return sizes from `largest` down to `least`, `steps` sizes for each halving."""
    sizes = (int(largest * 2 ** (-step / steps)) for step in count())
    return list(dict.fromkeys([largest, *takewhile(lambda size: size >= least, sizes)]))


def _worthwhile(fleets: list[Fleet]) -> list[Fleet]:
    """Return the fleets, without those whose host RAM saves no replica."""
    bare: dict[int, int] = {}
    for fleet in fleets:
        if not fleet.host_bytes:
            bare[fleet.devices] = min(fleet.replicas, bare.get(fleet.devices, fleet.replicas))
    return [
        fleet
        for fleet in fleets
        if not fleet.host_bytes or fleet.replicas < bare.get(fleet.devices, inf)
    ]


def _rank(option: Option) -> tuple[int, ...]:
    fleet = option.fleet
    replicas = fleet.replicas
    return fleet.gpus, replicas * fleet.host_bytes, replicas * option.pool_bytes, replicas
