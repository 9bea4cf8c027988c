"""Simulation of a fleet: replicas of a model that divide the sessions of a workload."""

from __future__ import annotations

import hashlib
from collections import Counter
from fractions import Fraction
from math import isqrt
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import attrs

from kvcore.cache import BlockLayout, KVCache
from kvcore.cache.pool import MOST_BLOCKS
from kvcore.config import RunConfig, RunParts
from kvcore.plugins.options import Spec
from kvcore.request import Request
from kvcore.serving.latency import SimulatedExecutor
from kvcore.serving.loop import ServingLoop
from kvcore.serving.result import Outcome, Result
from kvcore.serving.stats import MET, MISSED, UNJUDGED, RunLog
from kvcore.workloads import Workload, check_keys
from kvcore_lab.plans.early_end import DecidedError, EarlyEnd, loop_of, run_until_decided
from kvcore_lab.sweep.cells import DIGEST_BYTES, CellRun, Task, WorkloadCache
from kvcore_plugins.drafter.speculation import SpeculativeSimulator
from kvcore_replay.belady import Foresight
from kvcore_replay.untimed import replay, replay_groups

if TYPE_CHECKING:
    from kvcore_plugins.cache_groups import GroupedCache

Grant = Literal["", "foresight", "endless", "seen"]
"""An advantage that no real server has: eviction by `Foresight`, a pool that never fills, or a
pool that never fills and holds every prompt before the first request arrives. Empty: none."""

GRANTS: tuple[Grant, ...] = ("foresight", "endless", "seen")

LOOK = 50
"""Number of requests that end between two counts of the missed SLOs."""


@attrs.frozen(kw_only=True)
class Fleet:
    """Identical replicas of a model.

    Attributes:
        replicas: number of replicas.
        devices: GPUs of a replica, which share its model.
        blocks: blocks in the pool of a replica.
        host_bytes: bytes of host memory that a replica has as a tier; 0: no such tier.
        policy: a plugin, as (kind, name), that replaces that of the configuration; None: none.
        grant: the advantage that the fleet is given.
        to_the_end: whether it is simulated to the end even if it misses the SLO.
    """

    replicas: int
    devices: int
    blocks: int
    host_bytes: int = 0
    policy: tuple[str, str] | None = None
    grant: Grant = ""
    to_the_end: bool = False

    @property
    def gpus(self) -> int:
        """Number of GPUs of all replicas."""
        return self.replicas * self.devices

    @property
    def varies_policy(self) -> bool:
        """Whether another policy than the configured one decides, which may not fit."""
        return self.policy is not None or self.grant == "foresight"


@attrs.frozen(kw_only=True)
class Served:
    """Outcome of a workload on a fleet.

    Attributes:
        requests: number of requests of the workload.
        complete: whether all requests were served. A simulation ends when more requests have
            missed their SLO than may miss it; then all others count as judged and not met.
        judged, met: requests with an SLO, and those that met it. A rejected one missed it.
        rejected: requests for which no pool was large enough.
        ttft_s, tpot_s: mean and percentiles over all requests, from `Percentiles.as_dict()`.
        prompt_tokens, hit_tokens, loaded_tokens: tokens of prompts, those that hit in the
            pool, and those loaded from tiers.
        busiest: share of the prompt tokens that the busiest replica received.
        throughput_tokens_s: tokens that all replicas generate a second; None: none.
        offered_load, saturation: the load, and the queue, of the replica with the highest load
            of those whose queue grows, or of all, from `Saturation.as_dict()`; None: unknown.
    """

    requests: int
    complete: bool
    judged: int
    met: int
    rejected: int
    ttft_s: dict[str, float] | None
    tpot_s: dict[str, float] | None
    prompt_tokens: int
    hit_tokens: int
    loaded_tokens: int
    busiest: float
    throughput_tokens_s: float | None
    offered_load: float | None = None
    saturation: dict[str, Any] | None = None

    @property
    def attainment(self) -> float:
        """Share of the judged requests that met their SLO."""
        return self.met / self.judged

    @property
    def saturated(self) -> bool:
        """Whether the queue of a replica grew until the last arrival."""
        return self.saturation is not None and self.saturation["saturated"]

    @property
    def hit_ratio(self) -> float | None:
        """Share of the prompt tokens that hit, in the pool or in a tier."""
        hits = self.hit_tokens + self.loaded_tokens
        return hits / self.prompt_tokens if self.prompt_tokens else None


@attrs.frozen
class Traffic:
    """The requests of a workload, and the key by which each is kept on one replica.

    Attributes:
        requests: all requests. Equal keys are one object: requests of a session have most of
            their keys in common.
        groups: for each request, the hash of its session, or of what stands for a session.
    """

    requests: list[Request]
    groups: list[int]

    @classmethod
    def from_workload(cls, workload: Workload) -> Self:
        """Read a workload.

        Requests of a session form a group. Requests without a session form a group if their
        first *rare* key is the same: a key that at most √n of n requests have. The keys before
        it, those of a system prompt, would bring all requests to one replica. A request
        without a rare key is a group of its own.
        """
        known: dict[Any, Any] = {}
        requests = [
            attrs.evolve(request, keys=[known.setdefault(key, key) for key in request.keys])
            for request in check_keys(workload)
        ]
        alone = {key for request in requests if request.session is None for key in request.keys}
        uses = Counter(key for request in requests for key in request.keys if key in alone)
        limit = isqrt(len(requests))

        def group(request: Request) -> Any:
            if request.session is not None:
                return request.session
            return next((key for key in request.keys if uses[key] <= limit), request.id)

        return cls(requests, [_hashed(group(request)) for request in requests])

    def split(self, replicas: int) -> list[list[Request]]:
        """Return the requests of each replica, in order, without replicas that get none."""
        parts: list[list[Request]] = [[] for _ in range(replicas)]
        for request, group in zip(self.requests, self.groups, strict=True):
            parts[replica_of(group, replicas)].append(request)
        return [part for part in parts if part]


def _hashed(name: Any) -> int:
    """Return 64 bits of BLAKE2b of a session, a key or an id."""
    digest = hashlib.blake2b(repr(name).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def replica_of(group: int, replicas: int) -> int:
    """Return the replica, out of `replicas`, to which a hash of 64 bits belongs.

    If a replica is added, a group stays on its replica or moves to the new one.
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
        fleet: the fleet; `cell` has its pool and its GPUs as well.
        percentile: the simulation ends early when less than this percentage of the requests
            can still meet the SLO; 0: never.
    """

    fleet: Fleet
    percentile: float

    @classmethod
    def from_cell(
        cls, cell: RunConfig, fleet: Fleet, percentile: float, known: WorkloadCache
    ) -> Self:
        """Name the simulation of a fleet.

        Raises:
            InputError, PluginError: a part cannot be built; names the option.
        """
        if fleet.policy is not None:
            change: dict[str, Any] = dict([fleet.policy])
            cell = cell.changed(**change)
        cell = cell.changed(
            blocks=fleet.blocks,
            memory=None,
            tensor_parallel=fleet.devices,
            tier=_resized(cell.tier, fleet.host_bytes),
        )
        task = cls("", cell, fleet, percentile)
        return attrs.evolve(task, digest=task.named(CellRun(cell, known)))

    def named(self, cell: CellRun) -> str:
        """Return the digest of the cell and of what a fleet adds to it."""
        fleet = self.fleet
        text = f"fleet 1 {cell.digest} {fleet.replicas} {fleet.grant} {self.percentile!r}"
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()

    def run(self, known: WorkloadCache) -> dict[str, Any]:
        """Return the fields of `Served`."""
        cell = CellRun(self.cell, known)
        self.check(self.named(cell))
        traffic = known.kept(cell.parts, Traffic.from_workload)
        left = len(traffic.requests) * (1 - Fraction(str(self.percentile)) / 100)
        runs, complete = [], True
        for part in traffic.split(self.fleet.replicas):
            run, complete = _served(cell.parts, part, self.fleet.grant, left)
            runs.append(run)
            left -= run.log.verdict.count(MISSED)
            if not complete:
                break
        logs, merged = [run.log for run in runs], RunLog(0)
        for log in logs:
            rows = len(merged.ids)
            merged.reasons |= {rows + row: why for row, why in log.reasons.items()}
            for name, column in merged.columns().items():
                column.extend(log.columns()[name])
        outcome, verdicts = Outcome(merged), merged.verdict
        prompts = [sum(log.prompt) for log in logs]
        judged = len(verdicts) - verdicts.count(UNJUDGED)
        queues = [(run.saturation, run.offered_load) for run in runs] if complete else []
        saturation, load = max(
            queues,
            key=lambda queue: (queue[0] is not None and queue[0].saturated, queue[1] or 0),
            default=(None, None),
        )
        served = Served(
            requests=len(traffic.requests),
            complete=complete,
            judged=judged if complete else len(traffic.requests),
            met=verdicts.count(MET),
            rejected=sum(len(log.reasons) for log in logs),
            ttft_s=None if outcome.ttft is None else outcome.ttft.as_dict(),
            tpot_s=None if outcome.tpot is None else outcome.tpot.as_dict(),
            prompt_tokens=sum(prompts),
            hit_tokens=sum(sum(log.hit) for log in logs),
            loaded_tokens=sum(sum(log.loaded) for log in logs),
            busiest=max(prompts, default=0) / (sum(prompts) or 1),
            throughput_tokens_s=outcome.throughput_tokens_s,
            offered_load=load,
            saturation=None if saturation is None else saturation.as_dict(),
        )
        return attrs.asdict(served)


def _is_host(tier: Any) -> bool:
    return isinstance(tier, Spec) and tier.name == "host"


def _resized(tiers: Any, host_bytes: int) -> tuple[Any, ...]:
    """Return the tiers with a host tier of `host_bytes`; for 0, without the host tier."""
    memory = {"memory": f"{host_bytes}B"}
    return tuple(
        Spec(tier.name, {**tier.options, **memory}) if _is_host(tier) else tier
        for tier in tiers
        if host_bytes or not _is_host(tier)
    )


def _served(
    parts: RunParts, requests: list[Request], grant: Grant, most_missed: Fraction
) -> tuple[Result, bool]:
    """Simulate one replica; return its result, and whether all its requests were served."""
    config = parts.config
    if grant == "foresight":
        # All keys: blocks of cache groups may be smaller than those of the configuration.
        keys = BlockLayout("tokens", parts.workload.key_tokens)
        config = config.changed(eviction=Foresight(requests, keys))
    elif grant:
        config = config.changed(blocks=MOST_BLOCKS)
    parts = RunParts(config, parts.plugins, workload=parts.workload)
    cache, latency = parts.served_cache(), parts.latency()
    if grant == "seen":
        begin = int(requests[0].arrival / Fraction(str(config.rate_scale)))
        seen = (attrs.evolve(request, arrival=begin) for request in requests)
        if cache.grouped:
            replay_groups(seen, cast("GroupedCache", cache))
        else:
            replay(seen, cast("KVCache", cache))
    latency.bind()
    executor = SimulatedExecutor(latency)
    if config.drafter is not None:
        executor = SpeculativeSimulator(latency, parts.built("drafter"))
    loop = loop_of(_Judge(most_missed), parts, requests, cache, executor)
    complete = run_until_decided(loop)
    return Result(loop.log, cache, parts.batching, latency, None), complete


class _Judge(EarlyEnd):
    """Ends a run when more than `most_missed` requests have missed their SLO."""

    def __init__(self, most_missed: Fraction) -> None:
        self.most_missed = most_missed
        self._looked = 0

    def passed(
        self, loop: ServingLoop, took_ps: int, prefill: int, decode: int, steps: int
    ) -> None:
        """Sometimes count the missed SLOs."""
        del took_ps, prefill, decode, steps
        verdicts = loop.log.verdict
        if len(verdicts) > self._looked + LOOK:
            self._looked = len(verdicts)
            if verdicts.count(MISSED) > self.most_missed:
                raise DecidedError
