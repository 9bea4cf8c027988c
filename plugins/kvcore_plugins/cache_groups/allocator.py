"""The blocks of cache groups while jobs are prefilled and decode.

With full attention alone a decoding job needs a block each time its newest one is full. In
groups more happens, each at its own lengths (`GroupAllocator._lengths`): a window passes a
block, which is freed; the state before the newest one is no longer needed; blocks of several
sizes fill. Between these lengths nothing changes, so many decode steps are still one jump.

Prompts with states are cut: a state can be cached only where a chunk ends (`chunk_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

import kvcore
from kvcore.cache.sequence import Sequence
from kvcore.errors import InputError, OutOfBlocks
from kvcore.request import Request
from kvcore.serving.decode_batch import DecodeAllocator, DecodeBatch
from kvcore.serving.job import Job, admission_of
from kvcore.serving.latency import StepTimes
from kvcore.serving.scheduler import Batching
from kvcore.units import INT64_LIMIT, PS_PER_NS
from kvcore_plugins.cache_groups.groups import GroupSequence


class GroupAllocator(DecodeAllocator):
    """Allocates the blocks of jobs in a `GroupedCache`, chunk by chunk and step by step.

    Jobs are served one after the other: those that a step has served before one finds no room
    keep what they have.

    Args:
        cache: the cache.
        batch: the jobs that decode.
        batching: the limits of a step, and its rules.

    Raises:
        InputError: rules or limits that cache groups cannot have.
    """

    takes_drafts = False
    in_order = True

    def __init__(
        self, cache: kvcore.GroupedCache, batch: DecodeBatch, batching: Batching
    ) -> None:
        super().__init__(cast("Any", cache), batch)
        rules, size = batching.rules, cache.geometry.block_size
        self._groups = cache
        if cache.has_states and not batching.chunked:
            msg = (
                "chunked=False with a model that keeps states: they are cached where chunks "
                "end, so its prompts are computed in chunks; leave it out"
            )
            raise InputError(msg)
        self._max_tokens = batching.max_tokens
        self._lag = rules.lag
        # A prompt alone in its step, and one again after a preemption, may be of any length.
        alone = not batching.chunked and rules.unchunked == "alone"
        most = INT64_LIMIT if alone else batching.max_tokens
        cache.in_flight_tokens = most * (1 + rules.lag)
        cache.names_generated = rules.generated == "cached"
        # Under a lag the token of the step before is not known yet when a step is planned.
        self._known = int(rules.commit == "scheduled" and not rules.lag)
        self._residues = sorted({length % size for length in self._lengths(size)})
        # Under a lag, jobs whose first decode step did not see that their prompt is computed.
        self._joined: list[Job] = []

    def _lengths(self, size: int) -> Iterator[int]:
        """Yield the lengths, modulo `size`, at which a decoding job needs or frees a block."""
        yield -self._known
        for group in self._groups.groups:
            for start in range(0, size, group.block_size):
                yield start
                if group.kind != "full":
                    yield start + group.kept + self._lag

    # Admission and prefill.

    def never_fits(self, request: Request) -> str:
        """Return why `request` can never have all its blocks, or "" if it can."""
        length = request.prompt_tokens + max(request.output_tokens - 1, 0)
        blocks, pool_blocks = self._groups.most_blocks(length), self._groups.pool.blocks
        return (
            f"it needs {blocks:,} blocks; the pool has {pool_blocks:,}"
            if blocks > pool_blocks
            else ""
        )

    def fits(self, job: Job, now: int, reserve: int) -> bool:
        """Return True if there are blocks for the whole prompt of `job`. Pure."""
        cache = self._groups
        match = cache.match(job.known_request(), now, job.target)
        need = cache.need(match, job.target, whole=True)
        return need + reserve <= cache.available_blocks and cache.is_computed(match)

    def open(
        self,
        job: Job,
        now: int,
        reserve: int,
        most: int | None = None,
        *,
        fits_prompt: bool = True,
    ) -> Sequence | None:
        """Return a new sequence for `job` with its first chunk, or None without blocks for it.

        The arguments are those of `DecodeAllocator.open`.
        """
        cache = self._groups
        target = None if job.admitted is None else job.target
        request = job.request if target is None else job.known_request()
        match = cache.match(request, now, job.target)
        available = cache.available_blocks - reserve
        if fits_prompt and cache.need(match, job.target, whole=True) > available:
            return None
        tokens = job.target - match.tokens
        tokens = self._chunk(job, match.tokens, min(tokens, most or tokens), match.boundaries)
        if not tokens:
            return None
        if cache.tiers is not None:
            # What tiers load is allocated by the load; the chunk, which has room, after it.
            if cache.need(match, match.tokens + tokens) > available:
                return None
            tokens = 0
        try:
            return cache.open(
                request, tokens, now, resumed=target is not None, target=target,
                reserve=reserve, match=match,
            )  # fmt: skip
        except OutOfBlocks:
            return None

    def chunk_tokens(self, job: Job, tokens: int) -> int:
        """Return how many of the next `tokens` prompt tokens of `job` end where a chunk may.

        0: it waits for a step with more tokens.
        """
        seq = cast("GroupSequence", job.seq)
        return self._chunk(job, job.computed, tokens, seq.boundaries)

    def _chunk(self, job: Job, start: int, tokens: int, boundaries: tuple[int, ...]) -> int:
        prompt = job.request.prompt_tokens
        return self._groups.chunk_tokens(
            start, tokens, prompt, job.target, boundaries, self._max_tokens
        )

    def can_extend(self, seq: Sequence) -> bool:
        """Return True if `seq` can get a slot more."""
        return self._groups.has_room(cast("GroupSequence", seq), seq.tokens + 1)

    def finds_blocks(self, seq: Sequence, tokens: int, now: int) -> bool:
        """Return True if the blocks of `tokens` more slots of `seq` are free or evictable.

        Jobs that were admitted before it grow first, and what its window has passed is freed.
        """
        self._groups.now = now
        if not self._serve_before(seq.admission):
            return False
        own = cast("GroupSequence", seq)
        # Under a lag, a chunk of the step before is still being computed.
        in_flight = self._lag and own.committed_at == now
        settled = own.settled if in_flight else own.computed
        self.freed |= self._groups.free_passed(own, settled)
        return self._groups.has_room(own, own.tokens + tokens)

    def extend(self, seq: Sequence, tokens: int, now: int) -> None:
        """Allocate `tokens` more slots of `seq`."""
        self._groups.now = now
        own = cast("GroupSequence", seq)
        self._groups.grow(own, own.tokens + tokens)

    # Decoding.

    def next_step(self, now: int) -> bool:
        """Allocate for the next step, unless that is done; return False if there is no room.

        Running jobs free blocks while they grow, so that their order decides what is evicted:
        those that were admitted after one that prefills are served after it.
        """
        self._groups.now = now
        first = min(map(admission_of, self.prefilling), default=None)
        if first is None:
            return self.finish_step(now)
        return self._serve_before(first)

    def finish_step(self, now: int) -> bool:
        """Allocate for all jobs that are not served yet; return False if there is no room."""
        self._groups.now = now
        if not self._serve_before(None):
            return False
        step = self._batch.steps.count
        if self.allocated_until <= step:
            self._served.clear()
            self._joined = self._batch.fresh[:] if self._lag else []
            self.allocated_until = step + 1
        return True

    def _serve_before(self, admission: int | None) -> bool:
        """Allocate at the next step for the jobs admitted before one; None: for all."""
        batch, step = self._batch, self._batch.steps.count
        if self.allocated_until > step:
            return True
        # A job that has joined frees what the window has passed in its last chunk.
        jobs = {*batch.fresh, *self._joined}
        for residue in self._residues:
            jobs.update(batch.growing(step - residue))
        order = sorted(jobs, key=admission_of)
        if admission is not None:
            order = [job for job in order if admission_of(job) < admission]
        return self._serve(order, step)

    def serve_first(self, now: int) -> None:
        """Do nothing: jobs that find blocks have them already."""

    def _serve(self, jobs: list[Job], step: int) -> bool:
        """Allocate for `jobs` at a decode step, in order; return False if one finds no room."""
        cache, ahead = self._groups, step - self._batch.steps.count
        for job in jobs:
            if job in self._served or job.joined is None:
                continue
            seq, length = cast("GroupSequence", job.seq), job.length + ahead
            settled = length
            if self._lag:
                settled = seq.settled if job in self._batch.fresh and not ahead else length - 1
            self.freed |= cache.free_passed(seq, settled)
            if not cache.grow(seq, length + 1):
                return False
            cache.store(seq, length + self._known)
            self._served.add(job)
        return True

    def _allocate_ahead(self, steps: int, clock_ps: int, times: StepTimes) -> int:
        """Allocate for up to `steps` steps; return for how many there was room."""
        start = self._batch.steps.count
        first, end = start + 1, start + steps
        if self.freed and self.waiting:
            # The planned step itself has freed blocks, after waiting jobs were offered some.
            self.allocated_until = first
            return 1
        events = merge(
            *(self._growing_between(residue, first, end) for residue in self._residues),
            *([iter([(first, self._joined)])] if self._joined else []),
            key=itemgetter(0),
        )
        for step, entries in groupby(events, key=itemgetter(0)):
            jobs = sorted(
                {job for _, admitted in entries for job in admitted}, key=admission_of
            )
            self._groups.now = (clock_ps + times.total(step - start)) // PS_PER_NS
            if not self._serve(jobs, step) or (self.freed and self.waiting):
                # The step is planned; those that are served already have their blocks then.
                end = step
                break
            self._served.clear()
        self._joined = []
        self.allocated_until = end
        return end - start

    def _growing_between(
        self, residue: int, first: int, end: int
    ) -> Iterator[tuple[int, list[Job]]]:
        """Yield the steps in `[first, end)` at which lengths have `residue`, and their jobs."""
        for step, jobs in self._batch.growing_between(first - residue, end - residue):
            yield step + residue, jobs
