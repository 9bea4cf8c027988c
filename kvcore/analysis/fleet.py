"""Simulation of a fleet: replicas of a model that divide the sessions of a workload."""

from __future__ import annotations

import hashlib
from collections import Counter
from fractions import Fraction
from math import isqrt
from typing import Any, Literal, Self

import attrs

from kvcore.analysis.belady import Foresight
from kvcore.analysis.early_end import DecidedError, EarlyEndLoop, loop_of
from kvcore.analysis.serial_replay import replay
from kvcore.analysis.sweep.runner import DIGEST_BYTES, CellRun, Task, WorkloadCache
from kvcore.cache.pool import MOST_BLOCKS
from kvcore.config import RunConfig, RunParts
from kvcore.plugins.options import Spec
from kvcore.request import Request
from kvcore.serving.latency import SimulatedExecutor
from kvcore.serving.result import Outcome
from kvcore.serving.speculation import SpeculativeLoop, SpeculativeSimulator
from kvcore.serving.stats import MET, MISSED, UNJUDGED, RunLog
from kvcore.workloads import Workload, check_keys

Grant = Literal["", "foresight", "endless", "seen"]
"""What a simulated fleet is given that no server has: the eviction of `Foresight`, a pool that
never fills, or such a pool in which every prompt was before the first request came."""

GRANTS: tuple[Grant, ...] = ("foresight", "endless", "seen")

LOOK = 50
"""Requests that end before it is counted again how many have missed their SLO."""


@attrs.frozen(kw_only=True)
class Fleet:
    """Identical replicas of a model.

    Attributes:
        replicas: how many.
        devices: GPUs of each, which share its model.
        blocks: blocks of the pool of each.
        host_bytes: bytes of the host's memory that each has as a tier; 0: it has none.
        policy: a plugin in place of the one asked for, as (kind, name); None: none.
        grant: what it is given that no server has.
        whole: whether it is simulated to the end although it misses the SLO.
    """

    replicas: int
    devices: int
    blocks: int
    host_bytes: int = 0
    policy: tuple[str, str] | None = None
    grant: Grant = ""
    whole: bool = False

    @property
    def gpus(self) -> int:
        """Number of GPUs in all."""
        return self.replicas * self.devices


@attrs.frozen(kw_only=True)
class Served:
    """Outcome of a workload on a fleet.

    Attributes:
        requests: how many came.
        whole: whether all requests were served. A simulation ends when more have missed their
            SLO than may; all that did not end before then count as judged, and not met.
        judged, met: requests that an SLO judges, and those that met it. One that is rejected
            has missed it.
        rejected: requests for which no pool was large enough.
        ttft_s, tpot_s: mean and percentiles of all requests, as `Percentiles` has them.
        prompt_tokens, hit_tokens, loaded_tokens: tokens of prompts, those of them that were
            in the pool, and those that were loaded from tiers.
        busiest: share of the prompt tokens that the busiest replica got.
    """

    requests: int
    whole: bool
    judged: int
    met: int
    rejected: int
    ttft_s: dict[str, float] | None
    tpot_s: dict[str, float] | None
    prompt_tokens: int
    hit_tokens: int
    loaded_tokens: int
    busiest: float

    @property
    def attainment(self) -> float:
        """Share of the judged requests that met their SLO."""
        return self.met / self.judged

    @property
    def hit_ratio(self) -> float | None:
        """Share of the prompt tokens that hit, in the pool or below it."""
        hits = self.hit_tokens + self.loaded_tokens
        return hits / self.prompt_tokens if self.prompt_tokens else None


@attrs.frozen
class Traffic:
    """The requests of a workload, and the key by which each is kept on one replica.

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
        percentile: the simulation ends when fewer requests can meet their SLO than this
            percentage; 0: never before its end.
    """

    fleet: Fleet
    percentile: float

    @classmethod
    def of(cls, cell: RunConfig, fleet: Fleet, percentile: float, known: WorkloadCache) -> Self:
        """Name the simulation of a fleet.

        Raises:
            InputError, PluginError: a part that cannot be as asked for; names the option.
        """
        if fleet.policy is not None:
            change: dict[str, Any] = dict([fleet.policy])
            cell = attrs.evolve(cell, **change)
        cell = attrs.evolve(
            cell,
            blocks=fleet.blocks,
            memory=None,
            tensor_parallel=fleet.devices,
            tier=_resized(cell.tier, fleet.host_bytes),
        )
        task = cls("", cell, fleet, percentile)
        return attrs.evolve(task, digest=task.named(CellRun(cell, known)))

    def named(self, cell: CellRun) -> str:
        """Return the digest: of the cell, its division, what it is granted, when it ends."""
        fleet = self.fleet
        text = f"fleet 1 {cell.digest} {fleet.replicas} {fleet.grant} {self.percentile!r}"
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()

    def run(self, known: WorkloadCache) -> dict[str, Any]:
        """Return the fields of `Served`."""
        cell = CellRun(self.cell, known)
        self.check(self.named(cell))
        traffic = known.kept(cell.parts, Traffic.of)
        left = len(traffic.requests) * (1 - Fraction(str(self.percentile)) / 100)
        logs, whole = [], True
        for part in traffic.split(self.fleet.replicas):
            log, whole = _served(cell.parts, part, self.fleet.grant, left)
            logs.append(log)
            left -= log.verdict.count(MISSED)
            if not whole:
                break
        merged = RunLog(0)
        for log in logs:
            for name, column in merged.columns().items():
                column.extend(log.columns()[name])
        outcome, verdicts = Outcome(merged), merged.verdict
        prompts = [sum(log.prompt) for log in logs]
        judged = len(verdicts) - verdicts.count(UNJUDGED)
        served = Served(
            requests=len(traffic.requests),
            whole=whole,
            judged=judged if whole else len(traffic.requests),
            met=verdicts.count(MET),
            rejected=sum(len(log.reasons) for log in logs),
            ttft_s=None if outcome.ttft is None else outcome.ttft.as_dict(),
            tpot_s=None if outcome.tpot is None else outcome.tpot.as_dict(),
            prompt_tokens=sum(prompts),
            hit_tokens=sum(sum(log.hit) for log in logs),
            loaded_tokens=sum(sum(log.loaded) for log in logs),
            busiest=max(prompts, default=0) / (sum(prompts) or 1),
        )
        return attrs.asdict(served)


def _is_host(tier: Any) -> bool:
    return isinstance(tier, Spec) and tier.name == "host"


def _resized(tiers: Any, host_bytes: int) -> tuple[Any, ...]:
    """Return tiers with a host tier of that many bytes; with 0, without the host tier."""
    memory = {"memory": f"{host_bytes}B"}
    return tuple(
        Spec(tier.name, {**tier.options, **memory}) if _is_host(tier) else tier
        for tier in tiers
        if host_bytes or not _is_host(tier)
    )


def _served(
    parts: RunParts, requests: list[Request], grant: Grant, most_missed: Fraction
) -> tuple[RunLog, bool]:
    """Simulate one replica; return its log, and whether it came to its end."""
    config = parts.config
    if grant == "foresight":
        config = attrs.evolve(config, eviction=Foresight(requests, parts.geometry))
    elif grant:
        config = attrs.evolve(config, blocks=MOST_BLOCKS)
    parts = RunParts(config, parts.plugins, workload=parts.workload)
    cache, latency = parts.cache(), parts.latency()
    if grant == "seen":
        begin = requests[0].arrival
        replay((attrs.evolve(each, arrival=begin) for each in requests), cache)
    latency.bind()
    kind, executor = _JudgedLoop, SimulatedExecutor(latency)
    if config.drafter is not None:
        kind, executor = _JudgedDrafts, SpeculativeSimulator(latency, parts.built("drafter"))
    loop = loop_of(kind, parts, requests, cache, executor)
    loop.most_missed = most_missed
    whole = loop.run_until_decided()
    return loop.log, whole


class _JudgedLoop(EarlyEndLoop):
    """A serving loop that ends when more requests have missed their SLO than may.

    Attributes:
        most_missed: how many may.
    """

    most_missed: Fraction
    _looked = 0

    def _pass(self, *step: Any) -> int:
        """Advance the clock over executed steps; now and then, count missed SLOs."""
        verdicts = self.log.verdict
        if len(verdicts) > self._looked + LOOK:
            self._looked = len(verdicts)
            if verdicts.count(MISSED) > self.most_missed:
                raise DecidedError
        return super()._pass(*step)


class _JudgedDrafts(_JudgedLoop, SpeculativeLoop):
    """The same loop where steps verify drafts."""
