"""Simulations that end as soon as the question that they are run for is decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from kvcore.cache import KVCache
from kvcore.config import RunParts
from kvcore.request import Request
from kvcore.serving.decode_batch import DecodeAllocator
from kvcore.serving.latency import Executor
from kvcore.serving.loop import AllocatorFactory, Arrivals, ServingLoop


class DecidedError(Exception):
    """Raised in a loop whose question is decided."""


class EarlyEndLoop(ServingLoop):
    """A serving loop that can end early, and records nothing of the pool."""

    def _planned(self, now: int) -> None:
        """Record nothing: the use of the pool is not reported."""

    def run_until_decided(self) -> bool:
        """Run the loop; return False if it ended early."""
        try:
            self.run()
        except DecidedError:
            return False
        return True


LoopT = TypeVar("LoopT", bound=EarlyEndLoop)


def loop_of(
    loop: type[LoopT],
    parts: RunParts,
    requests: Sequence[Request],
    cache: KVCache,
    executor: Executor,
    allocator: AllocatorFactory = DecodeAllocator,
) -> LoopT:
    """Return a loop that simulates `requests`; its scheduler is built from `parts`."""
    return loop(
        Arrivals(requests, parts.config.rate_scale, prefetches=cache.tiers is not None),
        cache,
        parts.scheduler(),
        executor,
        parts.batching,
        slo=parts.slo,
        allocator=allocator,
    )
