"""The jobs that decode: many steps of them at once, and the blocks that they grow into.

Between two events the same jobs decode, so that k steps are one jump, in closed form:

    step         d       d+1      ...      d+k-1      d+k
                 |--------|--------|--------|----------|
    constant     jobs, their order of admission, growth of the context, lines of the latency
    counted      steps.count += k, context += growth * k, clock += sum of k step times
    ends before  a job finishes, fills an attention window or commits a block  (until_change)
                 a request arrives, or a priority changes by itself            (event_ps)
                 a block is needed that is neither free nor evictable          (_allocate_ahead)

Blocks: `DecodeAllocator` takes those of a sequence, at admission (`open`, for the batcher) and
while it decodes (`next_step`, `jump`); `close` gives them back, at a preemption and at the end.
Blocks of a full prefix stay in the cache until the eviction policy drops them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sized
from collections.abc import Sequence as Lines
from heapq import heappop, heappush
from itertools import chain
from typing import TypeAlias

from kvcore.cache import KVCache, Sequence
from kvcore.errors import OutOfBlocks
from kvcore.request import Request
from kvcore.serving.job import DONE, DecodeSteps, Job, admission_of
from kvcore.serving.latency import LinearPiece, StepTimes, Windows
from kvcore.serving.stats import PENDING_EVENTS, TokenGaps
from kvcore.units import INT64_LIMIT, PS_PER_NS

GROWTH_BLOCKS = 4096
"""Blocks of a jump from which on they are a line of the trace."""

End: TypeAlias = tuple[int, int, int, Job]
"""(step at which a job finishes, its admission, its residue, the job)."""


class DecodeBatch:
    """Jobs that generate one token in every decode step, without any work per token.

    Lengths are one step counter away from their value when a job joined. Finishing is a
    heap of step numbers. Growing is counted by residues: a job with L tokens in its blocks
    that joins at step d needs a block at every step s with s = d - L modulo the block size.

    Attributes:
        steps: the step counter.
        size: number of jobs.
        context: tokens that the next step attends to, by attention window; without a window,
            the lengths of all jobs, the new token included.
        growth: tokens that a step adds to `context`.
        fresh: jobs that joined after the last step.
        committing: jobs that commit every block they fill, by the residue of the steps before
            which they do: because they share generated blocks, or may drop tokens.
        last_step_ps: when the last step ended.
        ends: a heap of the steps at which jobs finish; not empty while jobs are here.
    """

    def __init__(
        self,
        steps: DecodeSteps,
        block_size: int,
        windows: Windows,
        gaps: TokenGaps,
        *,
        all_commit: bool = False,
        ahead: int = 0,
    ) -> None:
        """Create an empty batch.

        Args:
            steps: the step counter, which `advance` moves.
            block_size: tokens in a block.
            windows: the attention windows that the latency model distinguishes.
            gaps: where the times between tokens are recorded.
            all_commit: whether all jobs commit the blocks they fill, not only those whose
                output has keys.
            ahead: steps between the commit of a block and the end of the one that fills it.
        """
        self.steps = steps
        self.size = 0
        self.context = [0 for _ in windows]
        self.growth = [0 for _ in windows]
        self.fresh: list[Job] = []
        self.last_step_ps = 0
        self.committing: dict[int, list[Job]] = {}
        self._gaps = gaps
        self._block_size = block_size
        self._windows = windows
        self._is_plain = windows == (None,)
        self._all_commit = all_commit
        self._ahead = ahead
        # (residue, admission, job), sorted: the jobs in the order in which they grow.
        self._growing: list[tuple[int, int, Job]] = []
        # Entries stay in these heaps when they are outdated: `_end_of` and `_full_at` have the
        # valid entry of each job.
        self.ends: list[End] = []
        self._end_of: dict[Job, End] = {}
        self._full: list[tuple[int, int, int, Job]] = []
        self._full_at: dict[tuple[Job, int], int] = {}

    def __iter__(self) -> Iterator[Job]:
        """Yield the jobs in the order in which they joined."""
        return iter(self._end_of)

    def add(self, job: Job, generated: int) -> None:
        """Add `job`, which has generated `generated` tokens; it decodes from the next step."""
        request, seq, count = job.request, job.seq, self.steps.count
        assert seq is not None
        job.generated_before, job.joined = generated, count
        length = request.prompt_tokens + generated - 1
        residue = (count - length + seq.compacted) % self._block_size
        end = (count + job.output_tokens - generated, seq.admission, residue, job)
        self._end_of[job] = end
        heappush(self.ends, end)
        self.size += 1
        self.fresh.append(job)
        insort(self._growing, (residue, seq.admission, job))
        if self._all_commit or request.publish or request.output_keys:
            self._start_committing(job, residue)
        self._attend(job, length + 1 - seq.dropped_tokens, seq.admission)

    def restore(
        self, ends: Lines[End], fresh: list[Job], context: int, last_step_ps: int
    ) -> None:
        """Add jobs to an empty batch, as they were in the core; see the attributes.

        `ends` are their ends, in the order in which the jobs joined.
        """
        self.ends = sorted(ends)
        self._end_of = {end[3]: end for end in ends}
        self._growing = sorted((residue, order, job) for _, order, residue, job in ends)
        self.size = self.growth[0] = len(ends)
        self.fresh, self.context[0], self.last_step_ps = fresh, context, last_step_ps
        if self._all_commit:
            for _, _, residue, job in ends:
                self._start_committing(job, residue)

    def remove(self, job: Job) -> None:
        """Remove `job`. O(log jobs), and a move in memory."""
        self.size -= 1
        if self.fresh and job in self.fresh:
            self.fresh.remove(job)
        else:
            job.last_token_ps = self.last_step_ps
        assert job.seq is not None
        assert job.joined is not None
        job.generated_before += self.steps.count - job.joined
        job.joined = None
        _, admission, residue, _ = self._end_of.pop(job)
        del self._growing[bisect_left(self._growing, (residue, admission))]
        if self.committing:
            self._stop_committing(job, residue)
        attended = job.request.prompt_tokens + job.generated_before - job.seq.dropped_tokens
        self._unattend(job, attended)

    def forgot(self, job: Job, tokens: int) -> None:
        """Subtract `tokens` tokens that `job` has just dropped from the context.

        After a compaction it fills its blocks at other steps.
        """
        seq = job.seq
        assert seq is not None
        self._lengthen(job, -tokens)
        end_step, _, before, _ = self._end_of[job]
        residue = (self.steps.count - seq.tokens) % self._block_size
        if residue != before:
            self._move(job, end_step, residue)

    def gain(self, job: Job, tokens: int) -> None:
        """Add `tokens` tokens to `job` beyond those that the last step gave to all."""
        job.generated_before += tokens
        self._lengthen(job, tokens)
        end_step, _, before, _ = self._end_of[job]
        self._move(job, end_step - tokens, (before - tokens) % self._block_size)

    def _move(self, job: Job, end_step: int, residue: int) -> None:
        """Reschedule `job` to finish at `end_step`, and to fill its blocks at other steps."""
        _, admission, before, _ = self._end_of[job]
        end = self._end_of[job] = (end_step, admission, residue, job)
        heappush(self.ends, end)
        if residue == before:
            return
        del self._growing[bisect_left(self._growing, (before, admission))]
        insort(self._growing, (residue, admission, job))
        if self._stop_committing(job, before):
            self._start_committing(job, residue)

    def _start_committing(self, job: Job, residue: int) -> None:
        """Add `job`, whose blocks are full at `residue`, to those that commit them."""
        residue = (residue - self._ahead) % self._block_size
        insort(self.committing.setdefault(residue, []), job, key=admission_of)

    def _stop_committing(self, job: Job, residue: int) -> bool:
        """Remove `job` from those that commit the blocks they fill; return False if it is not.

        O(jobs that commit at the same steps).
        """
        residue = (residue - self._ahead) % self._block_size
        jobs = self.committing.get(residue, [])
        if job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self.committing[residue]
        return True

    def end(self, job: Job) -> None:
        """Make `job` finish with the step that runs."""
        self._move(job, self.steps.count + 1, self._end_of[job][2])

    def advance(
        self, start_ps: int, segments: Iterable[tuple[int, int, int]]
    ) -> tuple[int, int]:
        """Run steps from `start_ps` on; record the gaps between tokens.

        Args:
            start_ps: when the first of the steps begins.
            segments: parts of the steps, each (ps of its first step, ps that each step adds,
                steps).

        Returns:
            The number of steps, and the picoseconds they took.
        """
        steps = took_ps = 0
        for first, slope, count in segments:
            took_ps += self.run(start_ps + took_ps, first, slope, count)
            steps += count
        return steps, took_ps

    def run(self, start_ps: int, first: int, slope: int, steps: int) -> int:
        """Run one segment from `start_ps` on, as `advance` does; return its picoseconds."""
        pending, fresh = self._gaps.pending, self.fresh
        # Are all newest tokens from the moment at which the first step begins? Then the gap
        # before each token of it is the time of the step.
        even = start_ps == self.last_step_ps
        if fresh:
            even = even or len(fresh) == self.size
            for job in fresh:
                even = even and job.last_token_ps == start_ps
        if even:
            pending.append((first, slope, steps, self.size))
        else:
            self._record_uneven(start_ps + first)
            if steps > 1:
                pending.append((first + slope, slope, steps - 1, self.size))
        if len(pending) > PENDING_EVENTS:
            self._gaps.settle()
        fresh.clear()
        took_ps = steps * first + slope * (steps * (steps - 1) // 2)
        self.steps.count = now = self.steps.count + steps
        self.last_step_ps = start_ps + took_ps
        self.context[0] += self.growth[0] * steps
        if not self._is_plain:
            self._fill_windows(steps, now)
        return took_ps

    def _fill_windows(self, steps: int, now: int) -> None:
        """Add `steps` steps, up to step `now`, to the contexts of all windows but the first."""
        for index in range(1, len(self.growth)):
            self.context[index] += self.growth[index] * steps
        full = self._full
        while full and full[0][0] <= now:
            full_step, _, index, job = heappop(full)
            if self._full_at.get((job, index)) == full_step:
                del self._full_at[job, index]
                self.growth[index] -= 1

    def until_change(self) -> int:
        """Return after how many steps one finishes, fills a window, or commits a block."""
        ends, valid = self.ends, self._end_of
        while valid.get(ends[0][3]) is not ends[0]:
            heappop(ends)
        count = self.steps.count
        steps = ends[0][0] - count
        if self._full:
            steps = min(steps, max(self._full[0][0] - count, 1))
        for residue in self.committing:
            steps = min(steps, (residue - count - 1) % self._block_size + 1)
        return steps

    def pop_finished(self) -> list[Job]:
        """Remove and return the jobs that have generated all their tokens."""
        ends, count = self.ends, self.steps.count
        done: list[Job] = []
        while ends and ends[0][0] <= count:
            job = (end := heappop(ends))[3]
            if self._end_of.get(job) is end:
                self.remove(job)
                done.append(job)
        return done

    def committers(self) -> list[Job]:
        """Return the jobs that commit a block before the next step, in order of admission."""
        return self.committing.get(self.steps.count % self._block_size, [])

    def growing(self, step: int) -> list[Job]:
        """Return the jobs that need a block at `step`, in order of admission. O(log jobs)."""
        residue, order = step % self._block_size, self._growing
        first = bisect_left(order, (residue,))
        if first == len(order) or order[first][0] != residue:
            return []
        return [job for _, _, job in order[first : bisect_left(order, (residue + 1,), first)]]

    def growth_between(self, first: int, end: int) -> int:
        """Return how many blocks the steps `[first, end)` need. O(log jobs)."""
        # Every residue comes once a turn of `block_size` steps, so each job needs a block a
        # turn; the remaining steps are a range of residues, which may wrap around.
        size, order = self._block_size, self._growing
        turns, rest = divmod(end - first, size)
        low = first % size
        high = low + rest
        count = bisect_left(order, (high,)) - bisect_left(order, (low,))
        if high > size:
            count += bisect_left(order, (high - size,))
        return turns * self.size + count

    def growing_between(self, first: int, end: int) -> Iterator[tuple[int, list[Job]]]:
        """Yield the steps in `[first, end)` at which jobs need blocks, each with its jobs."""
        size, order = self._block_size, self._growing
        start, last = bisect_left(order, (first % size,)), -1
        classes: list[tuple[int, list[Job]]] = []
        for residue, _, job in chain(order[start:], order[:start]):
            offset = (residue - first) % size
            if offset == last:
                classes[-1][1].append(job)
            elif first + offset < end:
                classes.append((offset, [job]))
                last = offset
            else:
                break
        for turn in range(first, end, size):
            for offset, jobs in classes:
                if turn + offset >= end:
                    return
                yield turn + offset, jobs

    def _record_uneven(self, now_ps: int) -> None:
        """Record the gaps before tokens that come at `now_ps`, where they differ by job."""
        fresh, pending = self.fresh, self._gaps.pending
        pending.extend((now_ps - job.last_token_ps, 0, 1, 1) for job in fresh)
        if len(fresh) < self.size:
            pending.append((now_ps - self.last_step_ps, 0, 1, self.size - len(fresh)))

    def _attend(self, job: Job, pairs: int, admission: int) -> None:
        """Add the next context of `job`, in each window: it grows until that is full."""
        for index, window in enumerate(self._windows):
            if window is None or pairs < window:
                self.context[index] += pairs
                self.growth[index] += 1
                if window is not None:
                    full = self._full_at[job, index] = self.steps.count + window - pairs
                    heappush(self._full, (full, admission, index, job))
            else:
                self.context[index] += window

    def _lengthen(self, job: Job, tokens: int) -> None:
        """Count the tokens that `job` has more by now, or less, in its next context."""
        if self._is_plain:
            self.context[0] += tokens
            return
        seq = job.seq
        assert seq is not None
        attended = job.length + 1 - seq.dropped_tokens
        self._unattend(job, attended - tokens)
        self._attend(job, attended, seq.admission)

    def _unattend(self, job: Job, pairs: int) -> None:
        """Subtract the next context of `job`, in each window."""
        for index, window in enumerate(self._windows):
            if window is None or pairs < window:
                self.context[index] -= pairs
                self.growth[index] -= 1
                self._full_at.pop((job, index), None)
            else:
                self.context[index] -= window


class DecodeAllocator:
    """Allocates the blocks of jobs: at admission, and while they decode, many steps ahead.

    Where the cache only counts blocks and enough are free, the growth of many steps is one
    sum, and the cache gets the length of a sequence when its job leaves the batch (`settle`).
    Else each sequence that needs a block is extended by itself, at the time of its step.

    A run has one allocator, chosen at its start. This one pages; a subclass may allocate in
    another way, or measure how the memory is used.

    Attributes:
        takes_drafts: whether a step may add several tokens to a sequence.
        in_order: whether running jobs get their blocks in order of admission, since they free
            some; else those that decode go first.
        allocated_until: the first decode step whose blocks are not allocated yet.
        freed: whether growth has freed blocks, which waiting jobs may get; the batcher resets
            it.
        waiting: the waiting jobs, of which it reads whether there are any.
        prefilling: the jobs whose prompt is not computed yet.
        grown: called with each job that has got a block at the next step, and the time (ns);
            None: there is no such call.
    """

    takes_drafts = True
    in_order = False

    def __init__(self, cache: KVCache, batch: DecodeBatch) -> None:
        self.allocated_until = 0
        self.freed = False
        self.waiting: Sized = ()
        self.prefilling: Iterable[Job] = ()
        self.grown: Callable[[Job, int], None] | None = None
        self._served: set[Job] = set()
        self._cache = cache
        self._batch = batch
        self._by_count = cache.counts_only
        # Whether blocks of many steps are allocated at once, in one line of a trace.
        self._in_bulk = cache.trace is not None
        self._block_size = cache.geometry.block_size

    def never_fits(self, request: Request) -> str:
        """Return why `request` can never have all its slots, or "" if it can."""
        length = request.prompt_tokens + max(request.output_tokens - 1, 0)
        blocks, pool = -(-length // self._block_size), self._cache.pool.blocks
        return f"it needs {blocks:,} blocks; the pool has {pool:,}" if blocks > pool else ""

    def fits(self, job: Job, now: int, reserve: int) -> bool:
        """Return True if `open` would succeed. Pure.

        Args:
            job: a job without blocks.
            now: the time, ns.
            reserve: blocks that must stay free or evictable.
        """
        match = self._cache.match(job.known_request(), now, job.target)
        available = self._cache.available_blocks - match.unpinned_blocks - reserve
        return -(-job.target // self._block_size) - match.blocks <= available

    def open(
        self,
        job: Job,
        now: int,
        reserve: int,
        most: int | None = None,
        *,
        fits_prompt: bool = True,
    ) -> Sequence | None:
        """Return a new sequence for `job`, or None if there are no blocks for it.

        Args:
            job: a job without blocks.
            now: the time, ns.
            reserve: blocks that must stay free or evictable.
            most: tokens after the hit for which it gets blocks at most; None: for all.
            fits_prompt: whether there must be room for the whole prompt, even if `most` is
                less.
        """
        target = None if job.admitted is None else job.target
        request = job.request if target is None else job.known_request()
        resumed = target is not None
        if most is not None:
            # If no other sequence is open it fits in the end: pins of clients yield to it.
            if fits_prompt and self._cache.sequences and not self.fits(job, now, reserve):
                return None
            hit = self._cache.probe(request, now, target)
            most = min(most, job.target - hit * self._block_size)
        try:
            return self._cache.open(
                request, most, now, resumed=resumed, target=target, reserve=reserve
            )
        except OutOfBlocks:
            return None

    def close(self, job: Job, now: int, length: int | None = None) -> None:
        """Free the blocks of `job`.

        `length`: tokens of its text if it was in the batch until now; None: it was settled.
        """
        assert job.seq is not None
        self._cache.close(job.seq, now, length, preempted=job.stage != DONE)

    def loaded(self, tokens: int) -> None:
        """Called when `tokens` tokens were loaded from tiers into their slots."""

    def can_extend(self, seq: Sequence) -> bool:
        """Return True if `seq` can get a slot more."""
        return seq.tokens < seq.blocks * self._block_size or self._cache.available_blocks > 0

    def finds_blocks(self, seq: Sequence, tokens: int, now: int) -> bool:
        """Return True if the blocks of `tokens` more slots of `seq` are free or evictable."""
        need = -(-(seq.tokens + tokens) // self._block_size) - seq.blocks
        return need <= self._cache.available_blocks or self._cache.make_room(need, now)

    def chunk_tokens(self, job: Job, tokens: int) -> int:
        """Return how many of the next `tokens` prompt tokens of `job` end where a chunk may."""
        del job
        return tokens

    def extend(self, seq: Sequence, tokens: int, now: int) -> None:
        """Allocate `tokens` more slots of `seq`."""
        self._cache.extend(seq, tokens, now)

    def settle(self, job: Job) -> None:
        """Set the cached length of a job that has left the batch and keeps its blocks.

        The slot of its next token counts if it is allocated.
        """
        assert job.seq is not None
        allocated = self.allocated_until > self._batch.steps.count or job in self._served
        self._served.discard(job)
        self._cache.settle(job.seq, job.length + allocated)

    def next_step(self, now: int) -> bool:
        """Allocate for the next step, unless that is done; return False if there is no room."""
        batch = self._batch
        step = batch.steps.count
        if self.allocated_until <= step:
            jobs = batch.growing(step)
            if jobs:
                cache = self._cache
                if self._served:
                    jobs = [job for job in jobs if job not in self._served]
                if len(jobs) > cache.available_blocks:
                    if not cache.make_room(len(jobs), now):
                        return False
                    self.freed = True  # pins of clients have ended: waiting jobs may fit
                self._grow(jobs, 0, now)
                self._served.clear()
            self.allocated_until = step + 1
        return True

    def finish_step(self, now: int) -> bool:
        """Allocate for what `next_step` has left until prompts have their blocks: nothing."""
        return self.next_step(now)

    def serve_first(self, now: int) -> None:
        """Allocate for as many jobs of the next step, from the first on, as there is room for.

        The blocks that this evicts are lost, however many a preemption then frees.
        """
        jobs = self._batch.growing(self._batch.steps.count)
        jobs = [job for job in jobs if job not in self._served][: self._cache.available_blocks]
        self._grow(jobs, 0, now)
        self._served.update(jobs)

    def jump(self, lines: Lines[LinearPiece], clock_ps: int, event: int) -> tuple[int, int]:
        """Run decode steps as long as nothing changes but lengths, and allocate for them.

        The first of them is allocated already.

        Args:
            lines: the time of a step, as the maximum of lines in the context.
            clock_ps: when they begin.
            event: when (ns) the next event comes from outside.

        Returns:
            The number of steps, and the picoseconds they took.
        """
        return self.run(*self.foresee(lines, clock_ps, event), clock_ps)

    def foresee(
        self, lines: Lines[LinearPiece], clock_ps: int, event: int
    ) -> tuple[int, StepTimes]:
        """Return how many steps `jump` would run if there is room, and their times."""
        batch = self._batch
        times = StepTimes(lines, batch.context, batch.growth)
        steps = batch.until_change()
        if steps > 1 and event != INT64_LIMIT:
            steps = times.reach(event * PS_PER_NS - clock_ps, steps)
        return steps, times

    def run(self, steps: int, times: StepTimes, clock_ps: int) -> tuple[int, int]:
        """Run up to `steps` steps, or as many as there is room for, as `jump` does."""
        if steps > 1:
            steps = self._allocate_ahead(steps, clock_ps, times)
        if times.line is None:
            return self._batch.advance(clock_ps, times.segments(steps))
        first, slope = times.line
        return steps, self._batch.run(clock_ps, first, slope, steps)

    def _allocate_ahead(self, steps: int, clock_ps: int, times: StepTimes) -> int:
        """Allocate for up to `steps` steps; return for how many there was room."""
        batch, cache, tree = self._batch, self._cache, self._cache.tree
        start = batch.steps.count
        first, end = start + 1, start + steps
        if self._by_count:
            need = batch.growth_between(first, end)
            missing = need - cache.pool.free_blocks
            # A watcher has to be called at the time of each eviction.
            ahead = tree.fixed_order and tree.watcher is None
            if missing > 0 and ahead and missing <= tree.unpinned_blocks:
                self._evict_ahead(missing, need, steps, clock_ps, times)
                missing = 0
            if missing <= 0:
                self._grow_by_count(need)
                self.allocated_until = end
                return steps
        order: list[tuple[int, Sequence]] = []
        for step, jobs in batch.growing_between(first, end):
            if len(order) + len(jobs) > cache.available_blocks:
                end = step
                break
            now = (clock_ps + times.total(step - start)) // PS_PER_NS
            if not self._in_bulk:
                self._grow(jobs, step - start, now)
            else:
                order += [(now, job.seq) for job in jobs]  # type: ignore[misc]  # they decode
                if len(order) >= GROWTH_BLOCKS:
                    self._grow_in_order(order)
                    order = []
        if order:
            self._grow_in_order(order)
        self.allocated_until = end
        return end - start

    def _evict_ahead(
        self, missing: int, need: int, steps: int, clock_ps: int, times: StepTimes
    ) -> None:
        """Evict the last `missing` of the `need` blocks of `steps` steps, in a fixed order."""
        batch, cache = self._batch, self._cache
        times_ns: list[int] | None = None
        if cache.tree.residency is not None:
            times_ns, start = [], batch.steps.count
            for step, jobs in batch.growing_between(start + 1, start + steps):
                now = (clock_ps + times.total(step - start)) // PS_PER_NS
                times_ns.extend([now] * len(jobs))
            del times_ns[: need - missing]
        cache.free_ahead(missing, next(iter(batch)).request.id, clock_ps // PS_PER_NS, times_ns)

    def _grow(self, jobs: list[Job], ahead: int, now: int) -> None:
        """Allocate a block for each of `jobs`, which will be `ahead` tokens longer."""
        cache, grown = self._cache, None if ahead else self.grown
        if self._by_count and grown is None and len(jobs) <= cache.pool.free_blocks:
            cache.pool.free_blocks -= len(jobs)  # all that a pool does that counts
            return
        if jobs and cache.trace is not None and grown is None:
            cache.grow([(now, job.seq) for job in jobs])  # type: ignore[misc]  # they decode
            return
        for job in jobs:
            assert job.seq is not None
            if self._by_count:
                cache.reserve(job.seq, now)
            elif cache.trace is not None:
                cache.grow([(now, job.seq)])
            else:
                cache.settle(job.seq, job.length + ahead)
                cache.extend(job.seq, 1, now)
            if grown is not None:
                grown(job, now)

    def _grow_in_order(self, order: Lines[tuple[int, Sequence]]) -> None:
        """Allocate a block for each of `order`: the time of its step (ns), and a sequence."""
        self._cache.grow(order)

    def _grow_by_count(self, blocks: int) -> None:
        """Allocate free blocks for the batch as a whole, to be settled per job later."""
        self._cache.pool.free_blocks -= blocks
