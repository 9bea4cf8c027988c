"""Blocks for the jobs that generate: one each, whenever its last one is full."""

from __future__ import annotations

from kvcore.cache import KVCache, Sequence
from kvcore.request import Request
from kvcore.serving.decode_batch import Decoders
from kvcore.serving.latency import StepTimes
from kvcore.serving.scheduler import Job
from kvcore.units import PS_PER_NS


class Growth:
    """Allocates what decode steps write to, for one step or for many in advance.

    Where the cache only counts blocks and enough are free, they are taken in one sum, and
    the sequences are told when they leave (`settle`). Else each sequence that needs a block
    is extended by itself, at the time of its step.

    Attributes:
        measured: whether anybody asks for what follows.
        slots: in the whole pool, of a token each.
        idle: slots that open requests hold without a token in them.
        uncomputed: those of them that prefill has yet to reach.
    """

    def __init__(self, cache: KVCache, decoders: Decoders) -> None:
        """Take the cache and the jobs that grow."""
        self._cache = cache
        self._decoders = decoders
        self._by_count = cache.counts_only
        self._size = cache.geometry.block_size
        self.slots = cache.pool.blocks * self._size
        self.measured = False
        self.idle = self.uncomputed = 0

    def held(self) -> tuple[int, int]:
        """Return the slots that open requests hold, and those only the prefix cache does."""
        cached = self._cache.tree.unpinned_blocks * self._size
        return self.slots - self._cache.pool.free_blocks * self._size - cached, cached

    def unfit(self, request: Request) -> str:
        """Say why `request` can never have all its slots; nothing if it can."""
        blocks = -(-(request.prompt_tokens + max(request.output_tokens - 1, 0)) // self._size)
        most = self._cache.pool.blocks
        return f"it needs {blocks:,} blocks; the pool has {most:,}" if blocks > most else ""

    def fits(self, job: Job, now: int, spare: int) -> bool:
        """Say whether `job` could be opened, with `spare` blocks left. Pure."""
        cache = self._cache
        prompt = cache.geometry.prompt(job.request)
        match = cache.tree.match(prompt.keys, prompt.limit, now)
        room = cache.available_blocks - match.unpinned_blocks - spare
        return -(-job.target // self._size) - match.blocks <= room

    def splintered(self, request: Request) -> bool:
        """Say whether enough is free for `request`, but in pieces: blocks may lie anywhere."""
        del request
        return False

    def opened(self, seq: Sequence) -> None:
        """Learn that `seq` was admitted."""
        self.idle += self._slots(seq) - seq.computed
        self.uncomputed += seq.tokens - seq.computed

    def closing(self, job: Job) -> None:
        """Learn that `job` gives up its slots; if it generated, it is settled."""
        assert job.seq is not None
        left = job.prefill_left
        self.idle -= self._slots(job.seq) - (job.computed if left else job.length)
        self.uncomputed -= left

    def room_for(self, seq: Sequence) -> bool:
        """Say whether `seq` can get a slot more."""
        return seq.tokens < seq.blocks * self._size or self._cache.available_blocks > 0

    def extend(self, seq: Sequence, tokens: int, now: int) -> None:
        """Allocate `tokens` more slots of `seq`."""
        before = self._slots(seq)
        self._cache.extend(seq, tokens, now)
        self.idle += self._slots(seq) - before

    @property
    def pending(self) -> bool:
        """Whether the next step still lacks its blocks."""
        return self._decoders.grown <= self._decoders.steps.count

    def next_step(self, now: int) -> bool:
        """Allocate for the next step if that has not been done; say whether there was room."""
        decoders = self._decoders
        step = decoders.steps.count
        if decoders.grown <= step:
            jobs = decoders.growing(step)
            if jobs is not None:
                if len(jobs) > self._cache.available_blocks:
                    return False
                self._grow(jobs, 0, now)
            decoders.grown = step + 1
        return True

    def ahead(self, steps: int, clock: int, times: StepTimes) -> int:
        """Allocate for up to `steps` steps; return for how many there is room.

        The first of them is allocated already. They begin at `clock` (ps) and take `times`.
        """
        decoders, cache = self._decoders, self._cache
        start = decoders.steps.count
        first, end = start + 1, start + steps
        if self._by_count:
            need = decoders.growth_between(first, end)
            if need <= cache.pool.free_blocks:
                cache.reserve_blocks(need)
                self.idle += need * self._size
                decoders.grown = end
                return steps
        for step in decoders.growing_between(first, end):
            jobs = decoders.growing(step) or []
            if len(jobs) > cache.available_blocks:
                end = step
                break
            now = (clock + times.total(step - start)) // PS_PER_NS
            self._grow(jobs, step - start, now)
        decoders.grown = end
        return end - start

    def settle(self, job: Job) -> None:
        """Tell the cache how many tokens a generating job has, with the slot of its next."""
        assert job.seq is not None
        self._cache.settle(job.seq, job.length + (not self.pending))

    def _grow(self, jobs: list[Job], ahead: int, now: int) -> None:
        """Allocate a block for each of `jobs`, which will be `ahead` tokens longer."""
        self.idle += len(jobs) * self._size
        if self._by_count and len(jobs) <= self._cache.pool.free_blocks:
            self._cache.reserve_blocks(len(jobs))
            return
        for job in jobs:
            assert job.seq is not None
            self._cache.settle(job.seq, job.length + ahead)
            self._cache.extend(job.seq, 1, now)

    def _slots(self, seq: Sequence) -> int:
        """Return how many slots `seq` has."""
        return seq.blocks * self._size
