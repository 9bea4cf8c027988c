"""Plans: the least fleet whose simulation meets an SLO, and what limits a smaller one.

A fleet is a number of replicas of the model, each on so many GPUs. There is no router here:
sessions are divided among the replicas by a hash, and each replica is simulated for itself.

    replicas   1 ──► 2 ──► 4 misses ──► 8 meets     doubled, then bisected down to the least
    pool       full ◄──bisected──► a block          in steps of an eighth of a doubling
    host RAM   all  ◄──bisected──► none             in steps of a quarter of a doubling

More of a thing mostly helps, but not always: a split of the sessions may be uneven, and a pool
in which less fits may order requests better. So below the least that bisection finds, the next
few are tried as well.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import count, takewhile
from math import isqrt, log2
from typing import Any, Literal, Self, TypeAlias, TypeVar

import attrs

from kvcore.analysis.belady import Foresight
from kvcore.analysis.serial_replay import replay
from kvcore.analysis.sweep.executors import ThisProcess
from kvcore.analysis.sweep.grid import Grid
from kvcore.analysis.sweep.journal import Journal
from kvcore.analysis.sweep.plan import Executor
from kvcore.analysis.sweep.runner import DIGEST_BYTES, CellRun, Task, WorkloadCache
from kvcore.cache.pool import MOST_BLOCKS
from kvcore.config import RunConfig, RunParts
from kvcore.errors import InputError, PluginError
from kvcore.progress import Progress, Tick, silent
from kvcore.request import SLO, Request
from kvcore.serving import Result, simulate
from kvcore.serving.loop import MET, UNJUDGED, RunLog
from kvcore.serving.result import Outcome
from kvcore.workloads import Workload, check_keys

T = TypeVar("T")

Verdict = Literal["capacity", "policy", "content", "compute", "none"]
"""What keeps a smaller fleet from meeting the SLO; `none`: nothing was found that is too small."""

Grant = Literal["", "foresight", "endless", "seen"]
"""What a simulated fleet is given that no server has: the eviction of `Foresight`, a pool that
never fills, or such a pool in which every prompt was before the first request came."""

GRANTS: tuple[Grant, ...] = ("foresight", "endless", "seen")

DEGREES = (1, 2, 4, 8)
"""GPUs of a replica that are tried where none are given."""

MOST_DEVICES = 64
"""GPUs of a fleet, at most, where no other number is given."""

POOL_STEPS, RAM_STEPS = 8, 4
"""Sizes that are tried between a pool, or host RAM, and half of it."""

NEIGHBOURS = 2
"""How many further sizes are tried below the least one that bisection finds."""


@attrs.frozen(kw_only=True)
class Fleet:
    """Replicas of a model, all alike.

    Attributes:
        replicas: how many.
        devices: GPUs of each, which share its model.
        blocks: blocks of the pool of each.
        policy: a plugin in place of the one asked for, as (kind, name); None: none.
        grant: what it is given that no server has.
    """

    replicas: int
    devices: int
    blocks: int
    policy: tuple[str, str] | None = None
    grant: Grant = ""

    @property
    def gpus(self) -> int:
        """Number of GPUs in all."""
        return self.replicas * self.devices


@attrs.frozen(kw_only=True)
class Served:
    """What became of a workload on a fleet.

    Attributes:
        judged, met: requests that an SLO judges, and those that met it. One that is rejected
            has missed it.
        rejected: requests for which no pool was large enough.
        ttft_s, tpot_s: mean and percentiles of all requests, as `Percentiles` has them.
        prompt_tokens, hit_tokens: tokens of prompts, and those of them that hit.
        busiest: share of the prompt tokens that the busiest replica got.
    """

    judged: int
    met: int
    rejected: int
    ttft_s: dict[str, float] | None
    tpot_s: dict[str, float] | None
    prompt_tokens: int
    hit_tokens: int
    busiest: float

    @property
    def attainment(self) -> float:
        """Share of the judged requests that met their SLO."""
        return self.met / self.judged

    @property
    def hit_ratio(self) -> float | None:
        """Share of the prompt tokens that hit."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else None


@attrs.frozen(kw_only=True)
class Option:
    """A fleet that meets the SLO, with the least memory that was found for it.

    Attributes:
        fleet: the fleet.
        pool_bytes: K/V memory of a replica, on all its GPUs together.
        served: what became of the workload.
    """

    fleet: Fleet
    pool_bytes: int
    served: Served


@attrs.frozen(kw_only=True)
class Limit:
    """What keeps a fleet from meeting the SLO, told by simulating it with one thing changed.

    Attributes:
        verdict: the first of these that holds: `policy`, another eviction policy or scheduler
            meets it; `capacity`, eviction with foresight or a pool that never fills does;
            `content`, no fleet of the search does, but one whose prompts were all seen before
            would; `compute`, none of that.
        fleet: the fleet that misses it; None where none does.
        attainment: share of the requests that meet the SLO there.
        grants: that share with each of `GRANTS`.
        policies: that share by (kind, name) of each other policy, best first.
    """

    verdict: Verdict
    fleet: Fleet | None = None
    attainment: float | None = None
    grants: dict[str, float] = attrs.field(factory=dict)
    policies: dict[tuple[str, str], float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class FleetPlan:
    """The result of `plan`.

    Attributes:
        config: the run that was planned for, but for the size of its fleet.
        percentile: percentage of the requests that had to meet the SLO.
        max_devices: GPUs of the largest fleet that was tried.
        options: fleets that meet it, best first: the fewest GPUs, then the least memory.
        limit: what keeps a smaller fleet, or where none does the best one, from meeting it.
        simulations: fleets that were simulated, or found in the journal.
        notes: what was left out, and why.
    """

    config: RunConfig
    percentile: float
    max_devices: int
    options: list[Option]
    limit: Limit
    simulations: int
    notes: list[str]

    @property
    def best(self) -> Option | None:
        """The fleet to take; None if none meets the SLO."""
        return self.options[0] if self.options else None


def plan(
    workload: Any = "mooncake",
    *,
    percentile: float = 99,
    devices: Iterable[int] | int = DEGREES,
    replicas: Iterable[int] | int | None = None,
    max_devices: int = MOST_DEVICES,
    policies: Iterable[tuple[str, str]] | None = None,
    journal: Journal | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> FleetPlan:
    """Return the least fleets on which `workload` meets its SLO, and what limits smaller ones.

    Some 20 to 100 simulations of the whole workload, which is held in memory.

    Args:
        workload: where the requests come from, as for `kvcore.simulate`.
        percentile: percentage of the requests that are judged which must meet their SLO.
        devices: GPUs that share a model, each number a search of its own.
        replicas: numbers of replicas; None: the least that does, for each of `devices`.
        max_devices: GPUs of a fleet, at most.
        policies: (kind, name) of eviction policies and schedulers that the verdict tries;
            None: all that are installed, with their default options.
        journal: where finished simulations are kept and looked up; open. None: nowhere.
        executor: what simulates; None: this process.
        progress: is told how many simulations are done; None: nobody is.
        options: options of `RunConfig` for a simulation; plugins by name. `blocks` or
            `memory` is the largest pool of a replica (what fits beside the weights).

    Raises:
        InputError: a percentile outside 0 to 100, no fleet to try, an SLO that judges no
            request, or as `kvcore.simulate`.
        PluginError: a plugin that cannot work here, or a simulation that failed.
    """
    if not 0 < percentile <= 100:  # noqa: PLR2004
        msg = f"percentile {percentile:g}: give a percentage above 0 and up to 100"
        raise InputError(msg)
    degrees = _numbers("tensor_parallel", devices)
    counts = None if replicas is None else _numbers("replicas", replicas)
    cells = Grid("simulate", workload=workload, tensor_parallel=degrees, **options)
    with suppress(AttributeError):
        if next(iter(cells)).slo == SLO():
            msg = "slo: nothing is expected, so there is nothing to plan for: give ttft or tpot"
            raise InputError(msg)
    planner = _Planner(percentile, max_devices, journal, executor or ThisProcess())
    planner.add(cells, counts)
    return planner.plan(counts, policies, progress or silent)


def _numbers(what: str, given: Iterable[int] | int) -> list[int]:
    """Return numbers of 1 or more in order, each once."""
    numbers = sorted({given} if isinstance(given, int) else set(given))
    if not numbers or numbers[0] < 1:
        msg = f"{what}: {numbers} was given; give numbers of 1 or more"
        raise InputError(msg)
    return numbers


# How requests are divided, and how a part of them is served.


@attrs.frozen
class Traffic:
    """The requests of a workload, and by what they are kept together.

    Attributes:
        requests: all of them. Equal keys are one object, as requests of a session have
            mostly the same.
        groups: of each request, the hash of what it is kept together by.
    """

    requests: list[Request]
    groups: list[int]

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """Read a workload.

        Requests of a session are kept together. One without a session goes with those that
        have the same *rare* key first: one that at most √n of n requests have, since the keys
        before it, a system prompt, would bring all requests to one replica. Without such a
        key it is on its own.
        """
        known: dict[Any, Any] = {}
        requests = [
            attrs.evolve(each, keys=[known.setdefault(key, key) for key in each.keys])
            for each in check_keys(workload)
        ]
        alone = [each for each in requests if each.session is None]
        uses = Counter(key for each in alone for key in each.keys)
        most = isqrt(len(requests))

        def group(request: Request) -> Any:
            if request.session is not None:
                return request.session
            return next((key for key in request.keys if uses[key] <= most), request.id)

        return cls(requests, [_hashed(group(each)) for each in requests])

    def split(self, replicas: int) -> list[list[Request]]:
        """Return the requests of each replica, in order; replicas without any are left out."""
        parts: list[list[Request]] = [[] for _ in range(replicas)]
        for request, group in zip(self.requests, self.groups, strict=True):
            parts[replica_of(group, replicas)].append(request)
        return [part for part in parts if part]


def _hashed(name: Any) -> int:
    """Return 64 bits of BLAKE2b of a session, a key or an id."""
    digest = hashlib.blake2b(repr(name).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def replica_of(group: int, replicas: int) -> int:
    """Return which of `replicas` replicas a hash of 64 bits belongs to.

    With one replica more, a group stays where it is or moves to the new one.
    Source: Lamping and Veach, "A fast, minimal memory, consistent hash algorithm", 2014.
    """
    chosen, jump = 0, 0
    while jump < replicas:
        chosen = jump
        group = (group * 2862933555777941757 + 1) % 2**64
        jump = int((chosen + 1) * (2**31 / ((group >> 33) + 1)))
    return chosen


@attrs.frozen
class FleetTask(Task):
    """The simulation of a fleet, named by its digest.

    Attributes:
        fleet: the fleet; its pool and its GPUs are in `cell` as well.
    """

    fleet: Fleet

    @classmethod
    def of(cls, cell: RunConfig, fleet: Fleet, known: WorkloadCache) -> Self:
        """Name the simulation of a fleet.

        Raises:
            InputError, PluginError: a part that cannot be as asked for; names the option.
        """
        if fleet.policy is not None:
            kind, name = fleet.policy
            cell = attrs.evolve(cell, **{kind: name})
        cell = attrs.evolve(
            cell, blocks=fleet.blocks, memory=None, tensor_parallel=fleet.devices
        )
        return cls(_digest(CellRun(cell, known), fleet), cell, fleet)

    def run(self, known: WorkloadCache) -> dict[str, Any]:
        """Return the fields of `Served`."""
        cell = CellRun(self.cell, known)
        self.check(_digest(cell, self.fleet))
        traffic = known.kept(cell.parts, Traffic.of)
        parts = traffic.split(self.fleet.replicas)
        logs = [_served(cell.parts, part, self.fleet.grant).log for part in parts]
        merged = RunLog(0)
        for log in logs:
            for name in ("arrival", "first_token", "finish", "output", "verdict"):
                getattr(merged, name).extend(getattr(log, name))
        outcome = Outcome(merged)
        prompts = [sum(log.prompt) for log in logs]
        verdicts = merged.verdict
        served = Served(
            judged=len(verdicts) - verdicts.count(UNJUDGED),
            met=verdicts.count(MET),
            rejected=sum(len(log.reasons) for log in logs),
            ttft_s=None if outcome.ttft is None else outcome.ttft.as_dict(),
            tpot_s=None if outcome.tpot is None else outcome.tpot.as_dict(),
            prompt_tokens=sum(prompts),
            hit_tokens=sum(sum(log.hit) for log in logs),
            busiest=max(prompts, default=0) / (sum(prompts) or 1),
        )
        return attrs.asdict(served)


def _digest(cell: CellRun, fleet: Fleet) -> str:
    """Return the name of a simulation: of its cell, how it is divided, what it is granted."""
    text = f"fleet 1 {cell.digest} {fleet.replicas} {fleet.grant}"
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def _served(parts: RunParts, requests: list[Request], grant: Grant) -> Result:
    """Simulate one replica."""
    config = parts.config
    if grant == "foresight":
        config = attrs.evolve(config, eviction=Foresight(requests, parts.geometry))
    elif grant:
        config = attrs.evolve(config, blocks=MOST_BLOCKS)
    made = RunParts(config, parts.plugins, workload=parts.workload).arguments()
    if grant == "seen":
        cache, begin = made["cache"], requests[0].arrival
        replay((attrs.evolve(each, arrival=begin) for each in requests), cache)
        # What was before the first request is no part of the run.
        cache.stats = type(cache.stats)()
    return simulate(requests, **made, residency=False)


# The search.

Search: TypeAlias = Generator[list[Fleet], None, T]
"""Yields fleets that it needs simulated, and goes on when they are."""


@attrs.define
class _Planner:
    """Searches over fleets, several at a time, and what is known of each.

    Attributes:
        cells: by GPUs of a replica, what is simulated.
        full: by the same, blocks of the largest pool.
        block_bytes: by the same, bytes of a block.
        served: what became of each fleet that was simulated.
        notes: what was left out, and why.
    """

    percentile: float
    max_devices: int
    journal: Journal | None
    executor: Executor
    known: WorkloadCache = attrs.field(factory=WorkloadCache)
    cells: dict[int, RunConfig] = attrs.field(factory=dict)
    full: dict[int, int] = attrs.field(factory=dict)
    block_bytes: dict[int, int] = attrs.field(factory=dict)
    served: dict[Fleet, Served] = attrs.field(factory=dict)
    tasks: dict[Fleet, FleetTask] = attrs.field(factory=dict)
    failed: dict[Fleet, str] = attrs.field(factory=dict)
    notes: list[str] = attrs.field(factory=list)
    tick: Tick | None = None

    def add(self, cells: Iterable[RunConfig], counts: list[int] | None) -> None:
        """Add what is to be simulated, by GPUs of a replica.

        Raises:
            InputError: none of it can be: what is wrong with the last one.
        """
        fault: InputError | None = None
        for cell in cells:
            devices, least = cell.tensor_parallel, 1 if counts is None else counts[0]
            if devices * least > self.max_devices:
                msg = f"{least} x {devices} GPUs are more than {self.max_devices}"
                fault = InputError(f"max_devices: {msg}")
                self.notes.append(f"{msg}: not tried")
                continue
            try:
                parts = self.known.parts(cell)
            except InputError as error:
                fault = error
                self.notes.append(f"{devices} GPUs a replica: {error}")
                continue
            self.cells[devices] = cell
            self.full[devices] = parts.blocks
            self.block_bytes[devices] = parts.deployment.bytes_per_block
        if not self.cells and fault is not None:
            raise fault

    def plan(
        self,
        counts: list[int] | None,
        policies: Iterable[tuple[str, str]] | None,
        progress: Progress,
    ) -> FleetPlan:
        """Search for the least fleets, then for what limits smaller ones."""
        searches: list[Search[list[Option]]] = []
        budget = 0
        for devices in self.cells:
            most = self.max_devices // devices
            for number in counts or [None]:
                if number is None or number <= most:
                    searches.append(self._options(devices, number, most))
                    pools = log2(len(self._pools(Fleet(replicas=1, devices=devices, blocks=self.full[devices]))))
                    budget += int(pools + 2 * log2(most) + 2 * NEIGHBOURS)
        tried = self._policies(policies)
        budget += len(tried) + len(GRANTS)
        with progress("planning: simulations", budget) as self.tick:
            found = self._run(searches)
            options = sorted((each for row in found for each in row), key=_rank)
            (limit,) = self._run([self._limit(options, tried)])
        return FleetPlan(
            config=next(iter(self.cells.values())),
            percentile=self.percentile,
            max_devices=self.max_devices,
            options=options,
            limit=limit,
            simulations=len(self.served),
            notes=self.notes,
        )

    def _meets(self, fleet: Fleet) -> bool:
        """Return True if enough requests met their SLO."""
        served = self.served.get(fleet)
        return served is not None and 100 * served.met >= self.percentile * served.judged

    def _options(
        self, devices: int, replicas: int | None, most: int
    ) -> Search[list[Option]]:
        """Search the least replicas, unless they are given, and the least pool for them."""
        fleet = Fleet(replicas=replicas or 1, devices=devices, blocks=self.full[devices])
        yield [fleet]
        if replicas is None:
            below = 0
            while not self._meets(fleet) and fleet.replicas < most:
                below = fleet.replicas
                fleet = attrs.evolve(fleet, replicas=min(2 * below, most))
                yield [fleet]
            numbers = range(fleet.replicas, below, -1)
            fleets = [attrs.evolve(fleet, replicas=number) for number in numbers]
            if self._meets(fleet):
                fleet = yield from self._least(fleets)
        if not self._meets(fleet):
            return []
        fleet = yield from self._least(self._pools(fleet))
        size = fleet.blocks * self.block_bytes[devices]
        return [Option(fleet=fleet, pool_bytes=size, served=self.served[fleet])]

    def _pools(self, fleet: Fleet) -> list[Fleet]:
        """Return the fleet with its pool and all smaller ones that are tried, largest first."""
        sizes = (int(fleet.blocks * 2 ** (-step / POOL_STEPS)) for step in count())
        return [attrs.evolve(fleet, blocks=size) for size in dict.fromkeys(takewhile(bool, sizes))]

    def _least(self, fleets: Sequence[Fleet]) -> Search[Fleet]:
        """Return the last of `fleets`, each less than the one before, that meets the SLO.

        The first one does. Bisected; then the next few below are tried.
        """
        low, high = 0, len(fleets)
        while high - low > 1:
            middle = (low + high) // 2
            yield [fleets[middle]]
            low, high = (middle, high) if self._meets(fleets[middle]) else (low, middle)
        while True:
            below = range(low + 2, min(low + 2 + NEIGHBOURS, len(fleets)))
            yield [fleets[place] for place in below]
            lower = [place for place in below if self._meets(fleets[place])]
            if not lower:
                return fleets[low]
            low = lower[-1]

    def _policies(self, given: Iterable[tuple[str, str]] | None) -> list[tuple[str, str]]:
        """Return the policies that the verdict tries: all but those that are asked for."""
        config = next(iter(self.cells.values()))
        plugins = self.known.plugins
        if given is None:
            given = [(k, name) for k in ("eviction", "scheduler") for name in plugins.names(k)]
        asked = {(kind, str(getattr(config, kind))) for kind in ("eviction", "scheduler")}
        return [each for each in given if each not in asked]

    def _limit(self, options: list[Option], tried: list[tuple[str, str]]) -> Search[Limit]:
        """Return what keeps the nearest fleet that misses the SLO from meeting it."""
        fleet = self._nearest_miss(options)
        if fleet is None:
            return Limit(verdict="none")
        granted = [attrs.evolve(fleet, grant=grant) for grant in GRANTS]
        others = [attrs.evolve(fleet, policy=policy) for policy in tried]
        yield [*granted, *others]
        foresight, endless, seen = map(self._meets, granted)
        if any(map(self._meets, others)):
            verdict: Verdict = "policy"
        elif foresight or endless:
            verdict = "capacity"
        elif seen and not options:
            verdict = "content"
        else:
            verdict = "compute"
        shares = {
            each.policy: self.served[each].attainment for each in others if each in self.served
        }
        for each in others:
            if each in self.failed:
                self.notes.append(f"{each.policy[1]} was not tried: {self.failed[each]}")
        return Limit(
            verdict=verdict,
            fleet=fleet,
            attainment=self.served[fleet].attainment,
            grants={each.grant: self.served[each].attainment for each in granted},
            policies=dict(sorted(shares.items(), key=lambda item: -item[1])),
        )

    def _nearest_miss(self, options: list[Option]) -> Fleet | None:
        """Return the fleet whose limit is asked for: one that misses the SLO by the least.

        Of those with fewer GPUs than the best plan and a full pool, or without a plan of all;
        else the best plan with the largest pool that was too small.
        """
        misses = [each for each in self.served if not self._meets(each)]
        full = [each for each in misses if each.blocks == self.full[each.devices]]
        if options:
            best = options[0].fleet
            full = [each for each in full if each.gpus < best.gpus]
            if not full:
                alike = [each for each in misses if attrs.evolve(each, blocks=best.blocks) == best]
                return max(alike, key=lambda each: each.blocks, default=None)
        return max(full, key=lambda each: (self.served[each].attainment, -each.gpus))

    def _run(self, searches: list[Search[T]]) -> list[T]:
        """Run searches to their ends, all at a time; return their results in order."""
        results: dict[int, T] = {}
        asked: dict[int, list[Fleet]] = {place: [] for place in range(len(searches))}
        queue: deque[FleetTask] = deque()
        running: dict[str, Fleet] = {}

        def advance() -> None:
            """Let every search go on that has what it asked for, and queue what they ask."""
            for place, search in enumerate(searches):
                while place not in results and all(map(self._done, asked[place])):
                    try:
                        asked[place] = next(search)
                    except StopIteration as end:
                        results[place] = end.value
                        break
                    for fleet in asked[place]:
                        self._ask(fleet, queue, running)

        advance()
        with closing(self.executor.run(queue)) as outcomes:
            for outcome in outcomes:
                fleet = running.pop(outcome.digest)
                if outcome.result is None:
                    self._fail(fleet, str(outcome.error))
                else:
                    if self.journal is not None:
                        row = attrs.asdict(fleet)
                        self.journal.add(outcome.digest, row, outcome.result, outcome.wall_s)
                    self._record(fleet, outcome.result)
                advance()
        return [results[place] for place in range(len(searches))]

    def _done(self, fleet: Fleet) -> bool:
        return fleet in self.served or fleet in self.failed

    def _ask(
        self, fleet: Fleet, queue: deque[FleetTask], running: dict[str, Fleet]
    ) -> None:
        """Queue the simulation of a fleet, unless what comes of it is known."""
        if self._done(fleet):
            return
        try:
            task = FleetTask.of(self.cells[fleet.devices], fleet, self.known)
        except (InputError, PluginError) as error:
            if fleet.policy is None:
                raise
            self._fail(fleet, str(error))
            return
        results = {} if self.journal is None else self.journal.results
        known = results.get(task.digest)
        if known is not None and known.keys() == attrs.fields_dict(Served).keys():
            self._record(fleet, known)
        elif task.digest not in running:
            running[task.digest] = fleet
            queue.append(task)

    def _record(self, fleet: Fleet, result: dict[str, Any]) -> None:
        served = Served(**result)
        if not served.judged:
            msg = "slo: it judges no request of this workload, so there is nothing to plan for"
            raise InputError(msg)
        self.served[fleet] = served
        self.tick(1)

    def _fail(self, fleet: Fleet, why: str) -> None:
        """Record a policy that cannot serve; whatever else fails ends the search."""
        if fleet.policy is None:
            msg = f"{fleet.replicas} x {fleet.devices} GPUs could not be simulated: {why}"
            raise PluginError(msg)
        self.failed[fleet] = why
        self.tick(1)


def _rank(option: Option) -> tuple[int, ...]:
    fleet = option.fleet
    return fleet.gpus, fleet.replicas * option.pool_bytes, fleet.replicas
