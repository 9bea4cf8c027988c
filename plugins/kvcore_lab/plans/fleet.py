"""Simulation of a fleet: replicas of a model, among which a router divides the requests."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast

import attrs

from kvcore.cache import BlockLayout
from kvcore.cache.pool import MOST_BLOCKS
from kvcore.config import RunConfig
from kvcore.config.options import option_default
from kvcore.plugins.options import Spec
from kvcore.request import Request
from kvcore.serving.router import Replica, Router
from kvcore.serving.stats import MET, MISSED, UNJUDGED
from kvcore.workloads import Workload, check_keys
from kvcore.workloads.arrivals import Arrivals
from kvcore_cluster.cluster import Cluster
from kvcore_cluster.config import ClusterParts
from kvcore_cluster.replica import ReplicaLoop, Server
from kvcore_cluster.result import ClusterResult
from kvcore_cluster.simulate import ReplicaParts, replica_loop, result_of
from kvcore_lab.plans.early_end import DecidedError
from kvcore_lab.sweep.cells import DIGEST_BYTES, CellRun, Task, WorkloadCache
from kvcore_replay.belady import Foresight
from kvcore_replay.untimed import replay, replay_groups

Grant = Literal["", "foresight", "endless", "seen"]
"""An advantage that no real server has: eviction by `Foresight`, a pool that never fills, or a
pool that never fills and holds every prompt before the first request arrives. Empty: none."""

GRANTS: tuple[Grant, ...] = ("foresight", "endless", "seen")

Heard: TypeAlias = Callable[[Request, int], None]
"""Called with a request of which a replica has news, and the time (ns)."""

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
        offered_load, saturation: the load, and the queue, of all replicas together, from
            `Saturation.as_dict()`; None: unknown.
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


def read_traffic(workload: Workload) -> list[Request]:
    """Return the requests of a workload, in which equal keys are one object.

    Requests of a session have most of their keys in common.
    """
    known: dict[Any, Any] = {}
    return [
        attrs.evolve(request, keys=[known.setdefault(key, key) for key in request.keys])
        for request in check_keys(workload)
    ]


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
            replicas=fleet.replicas,
            # One replica gets all, so that its result depends on no router.
            router=cell.router if fleet.replicas > 1 else option_default("router"),
            blocks=fleet.blocks,
            memory=None,
            tensor_parallel=fleet.devices,
            tier=_resized(cell.tier, fleet.host_bytes),
        )
        task = cls("", cell, fleet, percentile)
        return attrs.evolve(task, digest=task.named(CellRun(cell, known)))

    def named(self, cell: CellRun) -> str:
        """Return the digest of the cell and of what a fleet adds to it."""
        text = f"fleet 2 {cell.digest} {self.fleet.grant} {self.percentile!r}"
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()

    def run(self, known: WorkloadCache) -> dict[str, Any]:
        """Return the fields of `Served`."""
        cell = CellRun(self.cell, known)
        self.check(self.named(cell))
        requests = known.kept(cell.parts, read_traffic)
        most = int(len(requests) * (1 - Fraction(str(self.percentile)) / 100))
        parts = cast("ClusterParts", cell.parts)
        result = _served(parts, requests, self.fleet.grant, most)
        log, verdicts = result.log, result.log.verdict
        complete = len(verdicts) == len(requests)
        received: Counter[int] = Counter()
        for replica, tokens in zip(result.replica, log.prompt, strict=True):
            received[replica] += tokens
        saturation = result.saturation if complete else None
        served = Served(
            requests=len(requests),
            complete=complete,
            judged=len(requests) - verdicts.count(UNJUDGED) * complete,
            met=verdicts.count(MET),
            rejected=len(log.reasons),
            ttft_s=None if result.ttft is None else result.ttft.as_dict(),
            tpot_s=None if result.tpot is None else result.tpot.as_dict(),
            prompt_tokens=received.total(),
            hit_tokens=sum(log.hit),
            loaded_tokens=sum(log.loaded),
            busiest=max(received.values(), default=0) / (received.total() or 1),
            throughput_tokens_s=result.throughput_tokens_s,
            offered_load=result.offered_load if complete else None,
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
    parts: ClusterParts, requests: list[Request], grant: Grant, most_missed: int
) -> ClusterResult:
    """Simulate a fleet until more requests than `most_missed` have missed their SLO."""
    config = parts.config
    if grant == "foresight":
        # What each replica will be asked for, the router decides: so it does so before.
        before = _served(parts, requests, "", len(requests))
        routes = dict(zip(before.log.ids, before.replica, strict=True))
        # All keys: blocks of cache groups may be smaller than those of the configuration.
        keys = BlockLayout("tokens", parts.workload.key_tokens)
        config = config.changed(router=partial(_Again, routes))
    elif grant:
        config = config.changed(blocks=MOST_BLOCKS)
    parts = ClusterParts(config, parts.plugins, workload=parts.workload)
    arguments = parts.cluster()
    replicas = arguments["replicas"]
    if grant == "foresight":
        for number in range(len(replicas)):
            own = [request for request in requests if routes[request.id] == number]
            alone = config.changed(eviction=Foresight(own, keys))
            replicas[number] = ClusterParts(
                alone, parts.plugins, workload=parts.workload
            ).arguments
    router, slo = arguments["router"], arguments["slo"]
    seen = requests if grant == "seen" else []
    if seen:
        begin = int(seen[0].arrival / Fraction(str(config.rate_scale)))
        seen = [attrs.evolve(request, arrival=begin) for request in seen]

    def start(replica: ReplicaParts, on_first_token: Heard, on_ended: Heard) -> ReplicaLoop:
        """Return the loop of a replica, whose cache has served the requests of `seen`."""
        built = replica(None)
        if built["cache"].grouped:
            replay_groups(seen, built["cache"])
        else:
            replay(seen, built["cache"])
        return replica_loop(built, slo, on_first_token, on_ended)

    cluster = _Judged(
        most_missed,
        Arrivals(requests, config.rate_scale),
        [partial(start, replica) for replica in replicas],
        router,
        arguments["view"],
        slo=slo,
    )
    cluster.run()
    return result_of(cluster, router, slo)


class _Again(Router):
    """Sends each request to the replica that got it before; refuses it if none did."""

    name: ClassVar[str] = "again"
    uses_hits: ClassVar[bool] = False

    def __init__(self, routes: Mapping[int | str, int]) -> None:
        self._routes = routes

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica | None:
        """Return the replica of before."""
        number = self._routes[request.id]
        return None if number < 0 else replicas[number]


class _Judged(Cluster):
    """A cluster whose run ends when more than `most_missed` requests have missed their SLO."""

    def __init__(self, most_missed: int, *parts: Any, **named: Any) -> None:
        self._most_missed, self._since = most_missed, 0
        super().__init__(*parts, **named)

    def run(self) -> None:
        """Serve the requests until it is decided whether too many miss."""
        with suppress(DecidedError):
            super().run()

    def _ended(self, server: Server, request: Request, now: int) -> None:
        """Sometimes count the missed SLOs."""
        super()._ended(server, request, now)
        self._since += 1
        if self._since == LOOK:
            self._since = 0
            logs = (each.loop.log for each in self.servers)
            if sum(log.verdict.count(MISSED) for log in logs) > self._most_missed:
                raise DecidedError
