"""Simulate a server that serves a workload, in the time of a latency model.

The front door says where drafts are verified and memory is measured: most runs do without.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING

import kvcore
from kvcore.cache import Recorder, ServedCache
from kvcore.errors import InputError
from kvcore.plugins import describe, resolve
from kvcore.request import SLO, Request
from kvcore.serving.latency import Executor, LatencyModel, SimulatedExecutor
from kvcore.serving.loop import AllocatorFactory, MemoryMeter, ServingLoop
from kvcore.serving.result import Result
from kvcore.serving.rules import with_choices
from kvcore.serving.scheduler import Batching, Scheduler
from kvcore.workloads import Workload, check_keys, notes_of
from kvcore.workloads.arrivals import Arrivals

if TYPE_CHECKING:
    from kvcore.serving.drafter import Drafter
    from kvcore.serving.stats import Fragmentation


def simulate(
    workload: Iterable[Request],
    *,
    cache: ServedCache,
    scheduler: Scheduler | None = None,
    latency: LatencyModel | None = None,
    batching: Batching | None = None,
    slo: SLO | None = None,
    rate_scale: float = 1.0,
    fragmentation: bool = False,
    residency: bool = True,
    jumps: bool = True,
    drafter: Drafter | type[Drafter] | str | None = None,
    allocator: AllocatorFactory | None = None,
) -> Result:
    """Serve `workload` in the time that a latency model gives.

    Costs some tens of microseconds a request, whatever its number of tokens.

    Args:
        workload: a workload, or any requests in order of arrival.
        cache: where K/V is kept, in `tokens` accounting; a new one for each run. With a
            cache of groups blocks are allocated by `chunk`, whatever the rules reserve.
        scheduler: the order in which requests are served; None is the `fcfs` plugin.
        latency: how long a step takes; None is the `roofline` plugin.
        batching: the limits of a step; None: `Batching()`.
        slo: the SLO of requests without one of their own.
        rate_scale: factor on the rate at which open-loop requests arrive.
        fragmentation: whether to measure how memory is used, in some 10 % more time.
        residency: whether to measure how long blocks rest, which costs 15 % more time, and
            40 % where blocks are small and many.
        jumps: whether decode steps between two events are run as one, which changes only the
            time that the simulation takes. With a drafter they are not.
        drafter: how many drafts are accepted, such as the `acceptance` plugin; None: one
            token a sequence and step.
        allocator: makes an allocator that measures; None: one that pages.

    Raises:
        InputError: parts that do not fit one another, or a workload out of order.
        PolicyError: a plugin failed, or the scheduler lets nothing run.
    """
    check_cache(cache, "simulate")
    scheduler, latency, batching = serving_parts(scheduler, latency, batching, slo)
    batching = served_batching(
        cache, batching, drafter=drafter, allocator=allocator, fragmentation=fragmentation
    )
    executor = SimulatedExecutor(latency)
    built: Drafter | None = resolve("drafter", drafter)
    if built is not None:
        executor = kvcore.SpeculativeSimulator(latency, built)
    loop, memory, wall_s = serve(
        workload,
        cache,
        scheduler,
        executor,
        batching,
        slo=slo,
        rate_scale=rate_scale,
        fragmentation=fragmentation,
        residency=residency,
        jumps=jumps,
        allocator=allocator,
    )
    return Result(
        loop.log,
        cache,
        batching,
        latency,
        memory,
        wall_s=wall_s,
        notes=notes_of(workload),
        drafter=built,
    )


def serving_parts(
    scheduler: Scheduler | None,
    latency: LatencyModel | None,
    batching: Batching | None,
    slo: SLO | None,
) -> tuple[Scheduler, LatencyModel, Batching]:
    """Return the parts of a run, with the default for each that is None.

    Raises:
        InputError: `batching`, `slo` or a plugin is of another type, or is in use already.
    """
    if batching is None:
        batching = Batching()
    elif not isinstance(batching, Batching):
        msg = f"batching={batching!r:.60}: give a Batching, such as Batching(max_seqs=64)"
        raise InputError(msg)
    if slo is not None and not isinstance(slo, SLO):
        msg = f"slo={slo!r:.60}: give an SLO in ns, such as SLO(ttft_ns=500_000_000), or None"
        raise InputError(msg)
    scheduler = resolve("scheduler", scheduler, "fcfs")
    latency = resolve("latency", latency, "roofline")
    latency.check_unused()
    return scheduler, latency, batching


def served_batching(cache: ServedCache, batching: Batching, **parts: object) -> Batching:
    """Return the limits of a run; those with cache groups allocate by chunk.

    Raises:
        InputError: a run with cache groups has `parts` that do not know these.
    """
    if not cache.grouped:
        return batching
    for name, part in parts.items():
        if part:
            msg = (
                f"{name} with cache groups, which it does not know: leave it out, or serve the "
                "model as one group, with a KVCache"
            )
            raise InputError(msg)
    return by_chunk(batching)


def by_chunk(batching: Batching) -> Batching:
    """Return the limits with rules that allocate the blocks of a prompt chunk by chunk."""
    if batching.rules.reserve != "prompt":
        return batching
    return Batching(**batching.limits, rules=with_choices(batching.rules, {"reserve": "chunk"}))


def check_cache(cache: ServedCache, verb: str) -> None:
    """Raise InputError if `cache` cannot serve a run under a clock, or has served one."""
    if cache.geometry.accounting != "tokens":
        msg = (
            f"{verb} with a cache in {cache.geometry.accounting!r} accounting: under a clock "
            "tokens count; make it with KVCache(..., accounting='tokens')"
        )
        raise InputError(msg)
    if cache.sequences or cache.stats.requests:
        msg = f"{verb} with a cache that has served before: make a new KVCache for each run"
        raise InputError(msg)


def serve(
    workload: Iterable[Request],
    cache: ServedCache,
    scheduler: Scheduler,
    executor: Executor,
    batching: Batching,
    *,
    slo: SLO | None,
    rate_scale: float,
    fragmentation: bool = False,
    residency: bool = True,
    jumps: bool = True,
    allocator: AllocatorFactory | None = None,
) -> tuple[ServingLoop, Fragmentation | None, float]:
    """Serve `workload` with any executor.

    Returns the loop, how its memory was used if that was measured, and the seconds it took.

    `executor` runs a step, or computes the time it takes. The other arguments are those of
    `simulate`, which raises the same errors.
    """
    meter: MemoryMeter | None = None
    if allocator is not None or fragmentation:
        meter, allocator = kvcore.Occupancy(), allocator or kvcore.MeasuredAllocator
    loop = ServingLoop(
        Arrivals(check_keys(workload), rate_scale, prefetches=cache.tiers is not None),
        cache,
        scheduler,
        executor,
        batching,
        jumps=jumps,
        slo=slo,
        allocator=allocator,
        meter=meter,
    )
    executor.latency.bind()  # after all that may refuse the run, which can be mended then
    if cache.trace is not None:
        record_run(
            cache.trace,
            workload,
            scheduler,
            executor,
            batching,
            rate_scale=rate_scale,
            slo=slo,
        )
    if residency:
        cache.record_residency()
    start = perf_counter()
    loop.run()
    seconds = perf_counter() - start
    return loop, None if meter is None else meter.summary(), seconds


def record_run(
    trace: Recorder,
    workload: Iterable[Request],
    scheduler: Scheduler,
    executor: Executor,
    batching: Batching,
    *,
    rate_scale: float,
    slo: SLO | None,
) -> None:
    """Record the configuration of a run in `trace`, so that the run can be repeated."""
    latency, rules = executor.latency, batching.rules
    expected = {} if slo is None else {"slo": slo}
    # Rules that override nothing are their options, which `batching` has.
    plugins = (scheduler, *([rules] if rules.decides() else []), *executor.plugins)
    trace.describe(
        mode=executor.mode,
        executor=executor.name,
        workload=workload if isinstance(workload, Workload) else None,
        plugins={plugin.kind: describe(plugin) for plugin in plugins},
        batching=batching.as_dict(),
        latency=latency.coefficients(),
        rate_scale=rate_scale,
        **expected,
    )
