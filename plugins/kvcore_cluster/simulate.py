"""Simulate a cluster: several servers that serve a workload, and a router."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from time import perf_counter
from typing import Any

import attrs

from kvcore.cache import Recorder, ServedCache
from kvcore.errors import InputError
from kvcore.plugins import describe
from kvcore.progress import Ticked
from kvcore.request import SLO, Request
from kvcore.serving.result import Result
from kvcore.serving.router import Router
from kvcore.serving.simulate import check_cache, record_run
from kvcore.trace.fields import plain
from kvcore.workloads import check_keys, notes_of
from kvcore.workloads.arrivals import Arrivals
from kvcore.workloads.selection import WorkloadSample
from kvcore_cli.report.tables import plugin_text
from kvcore_cluster.cluster import Cluster, Failure
from kvcore_cluster.dispatcher import PrefixView
from kvcore_cluster.phases import PhaseCluster, PhaseLoop
from kvcore_cluster.planner import Planner
from kvcore_cluster.replica import ReplicaLoop
from kvcore_cluster.result import ClusterResult, merge_logs
from kvcore_cluster.trace import ClusterTrace

ReplicaParts = Callable[[Recorder | None], Mapping[str, Any]]
"""Builds the cache, scheduler, latency model and batching of one life of a replica."""


def simulate_cluster(
    workload: Iterable[Request],
    replicas: Sequence[ReplicaParts],
    router: Router,
    view: PrefixView,
    *,
    slo: SLO | None = None,
    rate_scale: float = 1.0,
    failures: Iterable[Failure] = (),
    planner: Planner | None = None,
    phases: Mapping[str, Any] | None = None,
    residency: bool = True,
    trace: ClusterTrace | None = None,
    header: Mapping[str, Any] | None = None,
) -> ClusterResult:
    """Serve `workload` with several replicas, in the time that latency models give.

    Costs as much as its replicas would alone, and some microseconds a request for the router.

    Args:
        workload: a workload, or any requests in order of arrival.
        replicas: build the parts of each replica, at the start and after each failure.
        router: picks the replica of a request.
        view: the router's view of the caches.
        slo: the SLO of requests without one of their own.
        rate_scale: factor on the rate at which open-loop requests arrive.
        failures: replicas that fail, and return.
        planner: starts and stops replicas; None: all are up.
        phases: further arguments of `PhaseCluster`; None: each replica does all.
        residency: whether to measure how long blocks rest.
        trace: the trace of all decisions.
        header: more fields for the header of the trace.

    Raises:
        InputError: parts that do not fit one another, or a workload out of order.
        PolicyError: a plugin failed, or a scheduler lets nothing run.
    """
    failures = tuple(failures)

    def start(
        number: int,
        parts: ReplicaParts,
        on_first_token: Callable[[Request, int], None],
        on_ended: Callable[[Request, int], None],
    ) -> ReplicaLoop:
        """Build the loop of one life of a replica."""
        recorder = None if trace is None else trace.recorder(number)
        part = dict(parts(recorder))
        check_cache(part["cache"], "simulate")
        kind = ReplicaLoop if phases is None else PhaseLoop
        loop = replica_loop(part, slo, on_first_token, on_ended, kind)
        if recorder is not None:
            record_run(
                recorder,
                workload,
                part["scheduler"],
                loop.executor,
                part["batching"],
                rate_scale=rate_scale,
                slo=slo,
            )
        if residency:
            loop.cache.record_residency()
        return loop

    cluster_type = Cluster if phases is None else partial(PhaseCluster, **phases)
    cluster = cluster_type(
        Arrivals(check_keys(workload), rate_scale),
        [partial(start, number, parts) for number, parts in enumerate(replicas)],
        router,
        view,
        failures=failures,
        planner=planner,
        slo=slo,
        trace=trace,
    )
    check_block_sizes(server.loop.cache for server in cluster.servers)
    if trace is not None:
        routing: dict[str, Any] = {
            "view": str(view),
            "fail": [str(failure) for failure in failures],
        }
        if phases is not None:
            routing |= {"disaggregate": str(phases["split"])}
            routing |= {"block_bytes": phases["block_bytes"]}
        if planner is not None:
            up = [server.number for server in cluster.servers if server.up]
            routing |= {"autoscale": describe(planner), "up": up}
        trace.begin(describe(router), routing=routing, **(header or {}))
    begun = perf_counter()
    cluster.run()
    wall_s = perf_counter() - begun
    result = result_of(cluster, router, slo, wall_s)
    rented = None if planner is None else _rented(cluster)
    notes = [*notes_of(workload), *_routed_otherwise(workload, router)]
    return attrs.evolve(result, rented_ns=rented, notes=notes)


def replica_loop(
    parts: Mapping[str, Any],
    slo: SLO | None,
    on_first_token: Callable[[Request, int], None],
    on_ended: Callable[[Request, int], None],
    kind: type[ReplicaLoop] = ReplicaLoop,
) -> ReplicaLoop:
    """Return the loop of a replica with the parts that a `ReplicaParts` has built."""
    parts["latency"].bind()
    return kind(
        parts["cache"],
        parts["scheduler"],
        parts["latency"],
        parts["batching"],
        slo=slo,
        on_first_token=on_first_token,
        on_ended=on_ended,
        drafter=parts.get("drafter"),
    )


def result_of(
    cluster: Cluster, router: Router, slo: SLO | None, wall_s: float = 0.0
) -> ClusterResult:
    """Return the result of a cluster that has run."""
    lives = [
        [
            Result(
                loop.log, loop.cache, loop.batcher.batching, loop.executor.latency, None, wall_s
            )
            for loop in server.lives
        ]
        for server in cluster.servers
    ]
    logs = [
        (server.number, loop.log, loop.handed)
        for server in cluster.servers
        for loop in server.lives
    ]
    log, replica_of = merge_logs(logs, cluster, slo)
    changes = sorted(
        chain.from_iterable(scaler.changes for scaler in cluster.scalers),
        key=attrgetter("at", "replica"),
    )
    return ClusterResult(
        log,
        replica_of,
        lives,
        router,
        cluster.retried,
        wall_s,
        changes,
        phases=cluster.figures() if isinstance(cluster, PhaseCluster) else None,
    )


def _routed_otherwise(workload: object, router: Router) -> list[str]:
    """Return a note if a proxy has recorded the requests with another router than this one."""
    source: Any = workload.items if isinstance(workload, Ticked) else workload
    while isinstance(source, WorkloadSample):
        source = source.source
    recorded = getattr(source, "served_router", None)
    if recorded is None or recorded == (router.name, plain(router.options())):
        return []
    name = plugin_text(*recorded)
    return [f"{source.name}: recorded with another router: '--router {name}' routes as then"]


def _rented(cluster: Cluster) -> list[int]:
    """Return the ns for which each replica was paid for; those without a planner always."""
    scaled = dict(chain.from_iterable(scaler.rented.items() for scaler in cluster.scalers))
    always = cluster.end - cluster.begin
    return [scaled.get(server.number, always) for server in cluster.servers]


def check_block_sizes(caches: Iterable[ServedCache]) -> None:
    """Raise InputError if replicas have blocks of different sizes."""
    sizes = {cache.geometry.block_size for cache in caches}
    if len(sizes) > 1:
        msg = f"replicas have blocks of {sorted(sizes)} tokens: give all the same block_size"
        raise InputError(msg)
