"""Search, by simulation, for the load or the memory with which a server keeps up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from fractions import Fraction
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, cast

import attrs

from kvcore.config import RunParts
from kvcore.errors import InputError
from kvcore.models.memory import tensor_degrees
from kvcore.progress import Tick, unseen
from kvcore.request import Request
from kvcore.serving import Result
from kvcore.serving.batcher import Batcher
from kvcore.serving.latency import LatencyModel, SimulatedExecutor
from kvcore.serving.loop import AllocatorFactory, ServingLoop
from kvcore.serving.native import serves
from kvcore.units import PS_PER_NS
from kvcore.workloads.arrivals import NEVER
from kvcore_lab.contiguous.loop import ContiguousAllocator, contiguous_cache
from kvcore_lab.plans.early_end import DecidedError, EarlyEnd, loop_of, run_until_decided
from kvcore_plugins.load import LAST_MOMENTS, Queue, finished_work, moments, offered

if TYPE_CHECKING:
    from kvcore_cluster.config import ClusterParts
    from kvcore_cluster.result import ClusterResult

__all__ = ["find_capacity"]

MOST_RATES = 6
"""The most simulations in a search for a rate or for a number of replicas."""

DOUBLINGS = 5
"""The most times that a pool is doubled."""

MORE = 1.25
"""Factor from one number of replicas to the next one that is tried."""

CLOSE = 1.05
"""Ratio of two rates, rounded to two digits, between which no further rate is tried."""


def find_capacity(
    parts: RunParts, result: Result, tick: Tick = unseen
) -> dict[str, float | int]:
    """Return options with which the queue of a workload does not grow until its last request.

    Empty if the queue does not grow anyway. Otherwise each of these that is found, to be
    changed alone: `rate_scale`, the fastest rate of two digits within 5 %; `blocks`, the
    smallest doubling of a pool whose size was given; `tensor_parallel`, the fewest GPUs of a
    server of 8 that can share the model. Each was simulated, without drafts: mostly 3 to 5
    runs, at most 16, which end as soon as it is certain whether the queue grows. The requests
    are read once, and stay in memory during the search.

    Args:
        parts: the parts of the run; plugins are given by name, or as functions, since each
            simulation builds its own.
        result: the result of the run.
        tick: called with 1 after each simulation.
    """
    if result.saturation is None or not result.saturation.saturated:
        return {}
    search = _Search(parts, result, tick, list(parts.workload))
    figures = {
        "rate_scale": search.rate(),
        "blocks": search.blocks(),
        "tensor_parallel": search.devices(),
    }
    return {name: value for name, value in figures.items() if value is not None}


def can_find_replicas(parts: ClusterParts) -> bool:
    """Return True if all replicas are equal and do both phases: only their number can grow."""
    return isinstance(parts.config.replicas, int) and parts.split is None


def find_replicas(
    parts: ClusterParts, result: ClusterResult, tick: Tick = unseen
) -> dict[str, float | int]:
    """Return a number of replicas with which the queue of a cluster does not grow to the end.

    Empty if the queue does not grow anyway, if replicas differ or have split phases, or if no
    number was found. The first number tried would serve requests as fast as they arrive if each
    replica served as fast as in `result`; each further one is `MORE` times the last. At most
    `MOST_RATES` numbers are tried.

    Args:
        parts: the parts of the run; plugins are given by name, or as functions, since each
            simulation builds its own.
        result: the result of the run.
        tick: called with 1 after each simulation.
    """
    from kvcore_cluster.simulate import simulate_cluster  # noqa: PLC0415 - one server does without it

    saturation = result.saturation
    if saturation is None or not saturation.saturated or not can_find_replicas(parts):
        return {}
    count = cast("int", parts.config.replicas)
    load = result.offered_load or 0
    needed = count * max(saturation.arrivals_per_s / saturation.served_per_s, load)
    for _ in range(MOST_RATES):
        count = max(ceil(needed), count + 1)
        config = parts.config.changed(replicas=count)
        again = type(parts)(config, parts.plugins, workload=parts.workload)
        tried = simulate_cluster(again.workload, **again.cluster(), residency=False).saturation
        tick(1)
        if tried is None or not tried.saturated:
            return {"replicas": count}
        needed = count * MORE
    return {}


@attrs.frozen
class _Search:
    """Simulates one workload again and again, each time with one option changed."""

    parts: RunParts
    result: Result
    tick: Tick
    requests: Sequence[Request]

    def rate(self) -> float | None:
        """Return the fastest rate at which the queue does not grow; None if none was found.

        The first guess is the rate at which requests were served. If the queue does not grow
        at that rate, the rate 5 % above is tried, at which it mostly does; otherwise the search
        is a bisection.
        """
        saturation, load = self.result.saturation, self.result.offered_load or 0
        assert saturation is not None
        asked_rate = self.parts.config.rate_scale
        # Above an offered load of 1 every queue grows.
        high, low = asked_rate / max(load, 1), 0.0
        served = asked_rate * saturation.served_per_s / saturation.arrivals_per_s
        rate = _two_digits(min(high, served), ROUND_FLOOR)
        for step in range(MOST_RATES):
            if not low < rate < high:
                break
            if self._holds(rate_scale=rate):
                low = rate
            else:
                high = rate
            above = _two_digits(CLOSE * low, ROUND_CEILING)
            if low and high <= above:
                break
            if low and not step:
                rate = above
            else:
                rate = _two_digits((low + high) / 2 if low else 0.8 * high, ROUND_FLOOR)
        return low or None

    def blocks(self) -> int | None:
        """Return the smallest pool with which the queue does not grow, if a size was given."""
        if not self.parts.sized:
            return None
        null = self.parts.null_blocks
        sizes = [(self.parts.blocks + null) << times for times in range(1, DOUBLINGS + 1)]
        able = [blocks for blocks in sizes if self._may(blocks - null, None)]
        enough = (blocks for blocks in able if self._holds(blocks=blocks, memory=None))
        return next(enough, None)

    def devices(self) -> int | None:
        """Return the smallest number of GPUs of a server with which the queue does not grow."""
        parts = self.parts
        for devices in tensor_degrees(parts.model, parts.deployment.devices)[1:]:
            with suppress(InputError):  # A latency model may not know this number.
                blocks = parts.blocks
                if not parts.sized:
                    blocks = attrs.evolve(parts.deployment, devices=devices).blocks(
                        parts.batching.max_seqs
                    )
                if self._may(blocks, devices) and self._holds(tensor_parallel=devices):
                    return devices
        return None

    def _may(self, blocks: int, devices: int | None) -> bool:
        """Return False if the offered load shows that a queue would grow."""
        parts, tokens = self.parts, blocks * self.parts.geometry.block_size
        latency = self.result.latency if devices is None else parts.latency(devices)
        forgetting = self.result.cache.forgets
        work = finished_work(self.result.log)
        load = offered(work, parts.batching, latency, tokens, forgetting=forgetting).load()
        return load is None or load <= 1

    def _holds(self, **changes: Any) -> bool:
        """Return True if the queue does not grow with these options."""
        parts = self.parts
        config = parts.config.changed(**changes)
        again = config.build(parts.plugins, workload=parts.workload)
        cache, latency = again.served_cache(), again.latency()
        latency.bind()
        allocator: AllocatorFactory | None = None
        if config.allocation == "contiguous":
            cache = contiguous_cache(again.cache())
            allocator = partial(ContiguousAllocator, max_output=self.result.max_output or 0)
        executor = SimulatedExecutor(latency)
        judge = _QueueJudge()
        loop = loop_of(None, again, self.requests, cache, executor, allocator)
        if serves(loop):
            loop.run()  # as a whole it takes the core less time than a part takes Python
        else:
            loop = loop_of(judge, again, self.requests, cache, executor, allocator)
            judge.moments = self._moments(loop, again, latency)
            run_until_decided(loop)
        self.tick(1)
        if judge.grows is None:
            run = Result(loop.log, cache, parts.batching, latency, None)
            return run.saturation is None or not run.saturation.saturated
        return not judge.grows

    def _moments(self, loop: ServingLoop, parts: RunParts, latency: LatencyModel) -> list[int]:
        """Return times (ns), latest first: an empty queue at one shows that no queue grows.

        There are such times if the offered load is at most 1 even if nothing hits. Without
        them, or if arrival times depend on the run, the list is empty.
        """
        fits = loop.allocator.never_fits
        served = [
            request for request in self.requests if request.prompt_tokens and not fits(request)
        ]
        if not served or any(request.session is not None for request in served):
            return []
        scale = Fraction(str(parts.config.rate_scale))
        came = [int(request.arrival / scale) for request in served]
        prompts = [request.prompt_tokens for request in served]
        outputs = [request.output_tokens for request in served]
        misses_alone = [(came, prompts, [0] * len(served), outputs)]
        tokens = parts.blocks * parts.geometry.block_size
        forgetting = parts.config.retention is not None
        load = offered(
            misses_alone, parts.batching, latency, tokens, forgetting=forgetting
        ).load()
        if load is None or load > 1:
            return []
        return moments(came[0], came[-1])[: -LAST_MOMENTS - 1 : -1]


class _QueueJudge(EarlyEnd):
    """Ends a run when it is decided whether its queue grows.

    That is decided after the last arrival, or earlier if the queue does not grow.

    Attributes:
        moments: times (ns), latest first: an empty queue at one shows that no queue grows.
        grows: whether the queue grows; None: only the whole run decides it.
    """

    def __init__(self) -> None:
        self.moments: list[int] = []
        self.grows: bool | None = None
        self._all_came: int | None = None

    def passed(
        self, loop: ServingLoop, took_ps: int, prefill: int, decode: int, steps: int
    ) -> None:
        """Check the queue before the time that the clock has."""
        del took_ps, prefill, decode
        if not steps:
            return
        now = loop.clock_ps // PS_PER_NS
        # All jobs that were admitted before `now` are known: the clock has gone on.
        while self.moments and self.moments[-1] < now:
            if not self._waits(loop.batcher, self.moments.pop()):
                self.grows = False
                raise DecidedError
        if self._all_came is None:
            if loop.arrivals.next_at >= NEVER and not loop.arrivals.following:
                self._all_came = now
        elif 0 <= self._all_came < now:
            self._all_came = -1
            if loop.arrivals.last_start is None:  # a closed loop is judged as a whole
                self._look(loop)

    def _waits(self, jobs: Batcher, now: int) -> bool:
        """Return True if a job waited at the time `now`, which lies before the clock."""
        return any(job.arrival < now for job in jobs.waiting) or any(
            job.arrival < now < (job.admitted or 0) for job in jobs.running
        )

    def _look(self, loop: ServingLoop) -> None:
        """End the run once it is decided whether the queue grows."""
        log, batcher = loop.log, loop.batcher
        rows = [row for row, finish in enumerate(log.finish) if finish >= 0]
        jobs = [*batcher.running, *batcher.waiting]
        queue = Queue.from_times(
            [log.arrival[row] for row in rows] + [job.arrival for job in jobs],
            [log.admitted[row] for row in rows]
            + [job.admitted for job in jobs if job.admitted is not None],
            [log.finish[row] for row in rows],
            batcher.batching.max_seqs,
        )
        if queue is None or not queue.grows or queue.persists:
            self.grows = queue is not None and queue.grows
            raise DecidedError


def _two_digits(value: float, rounding: str) -> float:
    """Round a number to two digits."""
    return float(Context(prec=2, rounding=rounding).create_decimal(value))
