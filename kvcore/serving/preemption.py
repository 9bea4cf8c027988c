"""Preemptions: written down, and watched for going round in circles."""

from __future__ import annotations

from kvcore.cache import KVCache
from kvcore.errors import PolicyError
from kvcore.policy import Job, Scheduler

PATIENCE = 100
"""Preemptions without a new token that are no livelock yet, besides ten for each job."""


class Preemptions:
    """Counts preemptions, and those since the last new token.

    Attributes:
        barren: how many there were without a new token: many are a livelock.
    """

    __slots__ = ("_cache", "_scheduler", "barren")

    def __init__(self, cache: KVCache, scheduler: Scheduler) -> None:
        """Take where they are written down, and who is to blame."""
        self._cache = cache
        self._scheduler = scheduler
        self.barren = 0

    def record(self, job: Job, how: str, now: int, sake: Job | None, jobs: int) -> None:
        """PREEMPT: write down that `job`, one of `jobs`, loses its seat or its blocks.

        Raises:
            PolicyError: nothing but preemption happens any more.
        """
        self.barren += 1
        trace, seq = self._cache.trace, job.seq
        if trace is not None and seq is not None:
            whom = {} if sake is None else {"for": sake.request.id}
            trace.line("PREEMPT", now, request=job.request.id, seq=seq.id, how=how, **whom)
        if self.barren > PATIENCE + 10 * jobs:
            pool = self._cache.pool
            msg = (
                f"livelock at {now} ns: {self.barren} preemptions without a new token, the "
                f"last of request {job.request.id!r}; {jobs} requests run or wait for "
                f"{pool.blocks} blocks, of which {pool.free} are free. Scheduler "
                f"{self._scheduler.name!r} orders them differently every time it is asked: a "
                "running job's priority may only improve"
            )
            raise PolicyError(msg)
