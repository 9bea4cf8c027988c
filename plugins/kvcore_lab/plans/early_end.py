"""Simulations that end as soon as the question that they are run for is decided."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.cache import ServedCache
from kvcore.config import RunParts
from kvcore.request import Request
from kvcore.serving.latency import Executor
from kvcore.serving.loop import AllocatorFactory, Meter, ServingLoop
from kvcore.workloads.arrivals import Arrivals


class DecidedError(Exception):
    """Raised by a meter of a loop whose question is decided."""


class EarlyEnd(Meter):
    """A meter that may raise `DecidedError`, and measures nothing of the pool."""

    def planned(self, loop: ServingLoop, now: int) -> None:
        """Record nothing: the use of the pool is not reported."""


def loop_of(
    meter: EarlyEnd | None,
    parts: RunParts,
    requests: Sequence[Request],
    cache: ServedCache,
    executor: Executor,
    allocator: AllocatorFactory | None = None,
) -> ServingLoop:
    """Return a loop that simulates `requests`; its scheduler is built from `parts`."""
    return ServingLoop(
        Arrivals(requests, parts.config.rate_scale, prefetches=cache.tiers is not None),
        cache,
        parts.scheduler(),
        executor,
        parts.batching,
        slo=parts.slo,
        allocator=allocator,
        meter=meter,
    )


def run_until_decided(loop: ServingLoop) -> bool:
    """Run the loop; return False if its meter ended it early."""
    try:
        loop.run()
    except DecidedError:
        return False
    return True
