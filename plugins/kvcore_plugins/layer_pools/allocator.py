"""The blocks of jobs in a cache with a pool for each kind of layer."""

from __future__ import annotations

from typing import Any

from kvcore.cache import Sequence
from kvcore.serving.decode_batch import DecodeAllocator, DecodeBatch
from kvcore.serving.job import Job
from kvcore.serving.latency import StepTimes


class PooledAllocator(DecodeAllocator):
    """Allocates the blocks of jobs in a `PooledCache`: those of all pools, or none.

    Args:
        cache: the cache, a `PooledCache`.
        batch: the jobs that decode.
    """

    takes_drafts = False

    def __init__(self, cache: Any, batch: DecodeBatch) -> None:
        super().__init__(cache, batch)
        self._pools = cache
        self._in_bulk = False  # windows that pass make room for the next block

    def fits(self, job: Job, now: int, reserve: int) -> bool:
        """Return True if there is room for the whole prompt of `job`, in chunks. Pure."""
        pools, request = self._pools, job.known_request()
        match = pools.match(request, now, job.target)
        room = pools.full_blocks - match.unpinned_blocks - reserve
        if -(-job.target // self._block_size) - match.blocks > room:
            return False
        return not pools.lacks_slots(request, match, job.target, pools.longest_chunk)

    def open(
        self,
        job: Job,
        now: int,
        reserve: int,
        most: int | None = None,
        *,
        fits_prompt: bool = True,
    ) -> Sequence | None:
        """Return a new sequence for `job`, as `DecodeAllocator.open` does."""
        limits = [limit for limit in (most, self._pools.longest_chunk) if limit is not None]
        most = min(limits, default=None)
        return super().open(job, now, reserve, most, fits_prompt=fits_prompt)

    def chunk_tokens(self, job: Job, tokens: int) -> int:
        """Return how many of the next `tokens` prompt tokens of `job` find window slots."""
        chunk = self._pools.longest_chunk
        return tokens if chunk is None else min(tokens, chunk)

    def _allocate_ahead(self, steps: int, clock_ps: int, times: StepTimes) -> int:
        """Allocate for up to `steps` steps; return for how many there was room.

        For one if requests wait for slots, which any step may free.
        """
        if self.waiting and self._pools.tree.windows is not None:
            return 1
        return super()._allocate_ahead(steps, clock_ps, times)

    def _grow(self, jobs: list[Job], ahead: int, now: int) -> None:
        """Allocate a block for each of `jobs`; windows that pass may make room for others."""
        before = self._pools.passed_slots
        super()._grow(jobs, ahead, now)
        self.freed |= self._pools.passed_slots > before
