"""Measuring how memory is used: a meter of a loop, and an allocator that counts slots.

A run that does not measure uses neither, and pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.cache import KVCache
from kvcore.cache import Sequence as CacheSequence
from kvcore.request import Request
from kvcore.serving.decode_batch import DecodeAllocator, DecodeBatch
from kvcore.serving.job import Job
from kvcore.serving.loop import ServingLoop
from kvcore.serving.stats import Fragmentation


class MeasuredAllocator(DecodeAllocator):
    """Allocates as `DecodeAllocator` does, and counts slots that hold no token.

    Attributes:
        slots: slots of the whole pool, of a token each.
        idle: slots that open requests hold without a token in them.
        uncomputed: those of them that prefill fills next.
    """

    takes_drafts = False

    def __init__(self, cache: KVCache, batch: DecodeBatch) -> None:
        super().__init__(cache, batch)
        self.slots = cache.pool.blocks * self._block_size
        self.idle = self.uncomputed = 0
        self._compacted = 0

    def held(self) -> tuple[int, int]:
        """Return the slots that open requests hold, and those that only the prefix cache holds.

        Updates `idle` by the slots that compactions have freed: filled ones, and some idle
        ones behind them.
        """
        stats = self._cache.stats
        taken = stats.compacted_blocks * self._block_size - stats.compacted_tokens
        self.idle += self._compacted - taken
        self._compacted = taken
        cached = self._cache.tree.unpinned_blocks * self._block_size
        return self.slots - self._cache.pool.free_blocks * self._block_size - cached, cached

    def slots_of(self, seq: CacheSequence) -> int:
        """Return how many slots `seq` has, or had before it was compacted."""
        return seq.blocks * self._block_size + seq.compacted

    def filled(self, prefill: int, decode: int) -> None:
        """Count slots that were filled by prompt tokens and by generated ones."""
        self.idle -= prefill + decode
        self.uncomputed -= prefill

    def is_fragmented(self, request: Request) -> bool:
        """Return True if enough is free for `request` in total, but in no usable place."""
        del request
        return False  # blocks may lie anywhere

    def loaded(self, tokens: int) -> None:
        """Count slots of prompts that were filled by loads from tiers."""
        self.filled(tokens, 0)

    def open(
        self,
        job: Job,
        now: int,
        reserve: int,
        most: int | None = None,
        *,
        fits_prompt: bool = True,
    ) -> CacheSequence | None:
        """Return a new sequence for `job`, or None if there are no blocks for it."""
        seq = super().open(job, now, reserve, most, fits_prompt=fits_prompt)
        if seq is not None:
            self.idle += self.slots_of(seq) - seq.computed
            self.uncomputed += seq.tokens - seq.computed
        return seq

    def close(self, job: Job, now: int, length: int | None = None) -> None:
        """Free the blocks of `job`."""
        assert job.seq is not None
        if length is not None:
            self._cache.settle(job.seq, length)
        left = job.seq.tokens - job.computed if job.prefill_left else 0
        self.idle -= self.slots_of(job.seq) - job.length
        self.uncomputed -= left
        super().close(job, now)

    def extend(self, seq: CacheSequence, tokens: int, now: int) -> None:
        """Allocate `tokens` more slots of `seq`."""
        before = self.slots_of(seq)
        self.uncomputed += max(min(tokens, seq.target - seq.tokens), 0)
        super().extend(seq, tokens, now)
        self.idle += self.slots_of(seq) - before

    def _grow(self, jobs: list[Job], ahead: int, now: int) -> None:
        """Allocate a block for each of `jobs`, which will be `ahead` tokens longer."""
        super()._grow(jobs, ahead, now)
        self.idle += len(jobs) * self._block_size

    def _grow_in_order(self, order: Sequence[tuple[int, CacheSequence]]) -> None:
        """Allocate a block for each of `order`: a time (ns), and a sequence."""
        super()._grow_in_order(order)
        self.idle += len(order) * self._block_size

    def _grow_by_count(self, blocks: int) -> None:
        """Allocate free blocks for the batch as a whole, to be settled per job later."""
        super()._grow_by_count(blocks)
        self.idle += blocks * self._block_size


class Occupancy:
    """A meter that sums the use of slots over time, from event to event. O(1) a step.

    The loop allocates by a `MeasuredAllocator`.
    """

    def __init__(self) -> None:
        # The state since the last event.
        self._running = self._held = self._cached = self._idle = self._uncomputed = 0
        self._blocked = False
        self._slots = 1
        # Since then: picoseconds, steps, and slots that were filled.
        self._took_ps = self._steps = self._filled = 0
        self._last = 0, 0, 0
        # Sums over time; twice the sums of numbers that change between events.
        self._time_ps = self._ran = self._ahead = self._waited = 0
        self._holds = self._caches = self._idles = self._frees = 0
        self._peak = 0

    def planned(self, loop: ServingLoop, now: int) -> None:
        """Record an event, and the state that holds until the next one."""
        del now
        self._end_state()
        allocator, blocked = loop.allocator, loop.batcher.blocked_job
        assert isinstance(allocator, MeasuredAllocator)
        self._slots = allocator.slots
        self._running = len(loop.batcher.running)
        self._held, self._cached = allocator.held()
        self._idle, self._uncomputed = allocator.idle, allocator.uncomputed
        self._blocked = blocked is not None and allocator.is_fragmented(blocked.request)

    def passed(
        self, loop: ServingLoop, took_ps: int, prefill: int, decode: int, steps: int
    ) -> None:
        """Record `steps` steps, whose blocks are allocated.

        Args:
            loop: the loop that runs them.
            took_ps: picoseconds they took; without steps, idle time.
            prefill: prompt tokens that filled slots.
            decode: generated tokens, the same number with each step.
            steps: number of steps.
        """
        allocator = loop.allocator
        assert isinstance(allocator, MeasuredAllocator)
        # The slots that would be idle if nothing had been filled since the event.
        self._last = *allocator.held(), allocator.idle + self._filled
        self._took_ps += took_ps
        self._steps += steps
        self._filled += prefill + decode
        allocator.filled(prefill, decode)

    def summary(self) -> Fragmentation:
        """Return the shares."""
        self._end_state()
        time, slots = max(self._time_ps, 1), self._slots
        slot_time = time * slots
        waited = self._waited
        return Fragmentation(
            running=self._ran / time,
            used=(self._holds - self._idles) / (2 * slot_time),
            cached=self._caches / (2 * slot_time),
            internal=self._idles / (2 * slot_time),
            uncomputed=self._ahead / slot_time,
            internal_peak=self._peak / slots,
            external=waited / time,
            external_free=self._frees / (2 * waited * slots) if waited else None,
        )

    def _end_state(self) -> None:
        """Add the time since the last event, in which slots were taken and filled evenly."""
        took_ps, (used, cached, idle) = self._took_ps, self._last
        if not took_ps:
            return
        # A step's tokens are there after it: those of the last one do not count yet.
        idle -= self._filled - self._filled // max(self._steps, 1)
        used += self._held
        self._time_ps += took_ps
        self._ran += took_ps * self._running
        self._ahead += took_ps * self._uncomputed
        self._holds += took_ps * used
        self._caches += took_ps * (self._cached + cached)
        self._idles += took_ps * (self._idle + idle)
        self._peak = max(self._peak, self._idle, idle)
        if self._blocked:
            self._waited += took_ps
            self._frees += took_ps * (2 * self._slots - used)
        self._took_ps = self._steps = self._filled = 0
