"""The serving loop: a discrete-event simulation of continuous batching.

The events are ARRIVAL, PREFILL_DONE, DECODE_DONE, OUT_OF_BLOCKS and TIMER. Between two of
them the same jobs decode, so that all the steps in between are one jump (see `decode_batch`).
One turn of the loop:

    arrivals up to now -> plan (admit, pause, preempt) -> one step or one jump -> the clock
         |                   |                               |
         v                   v                               v
      waiting  <-preempt-  running: prefill chunks, then the decode batch  ->  finished

The clock counts picoseconds (`_ps`); requests, caches and schedulers use whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import TypeAlias

from kvcore.cache import KVCache
from kvcore.errors import InputError, PolicyError
from kvcore.models.cost import attended_pairs
from kvcore.request import SLO, Key, TextRequest
from kvcore.serving.arrivals import NEVER, Arrivals
from kvcore.serving.batcher import Batcher, Batching
from kvcore.serving.decode_batch import DecodeAllocator, DecodeBatch
from kvcore.serving.latency import Executor, ServiceEstimates, StepTimes, StepWork
from kvcore.serving.run_log import RunLog
from kvcore.serving.scheduler import DECODE, DONE, DecodeSteps, Job, Scheduler
from kvcore.serving.stats import PENDING_EVENTS, Fragmentation
from kvcore.units import INT64_LIMIT, PS_PER_NS

AllocatorFactory: TypeAlias = Callable[[KVCache, DecodeBatch], DecodeAllocator]


class ServingLoop:
    """Serves requests, step by step of the batch, as many steps at once as change nothing.

    Args:
        arrivals: the requests by time of arrival.
        cache: where K/V is kept; it counts `tokens`.
        scheduler: the order of jobs.
        executor: runs a step, or computes the time it takes.
        batching: the limits of a step.
        jumps: whether to run many decode steps at once. It changes nothing but the time
            the run takes.
        slo: the SLO of requests that bring none of their own.
        allocator: makes the allocator of blocks.

    Attributes:
        clock_ps: the time, in picoseconds.
        steps, batch, allocator, batcher, log: its parts.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        cache: KVCache,
        scheduler: Scheduler,
        executor: Executor,
        batching: Batching,
        *,
        jumps: bool = True,
        slo: SLO | None = None,
        allocator: AllocatorFactory = DecodeAllocator,
    ) -> None:
        self.clock_ps = 0
        self.steps = DecodeSteps()
        self.log = RunLog(cache.pool.blocks, slo)
        self._windows = windows = executor.latency.windows
        self.batch = DecodeBatch(
            self.steps,
            cache.geometry.block_size,
            windows,
            self.log.itl,
            forgetting=cache.retention is not None,
        )
        server = ServiceEstimates(cache, executor.latency, batching.max_seqs)
        scheduler.bind()
        scheduler.attach(server)
        self.allocator = allocator(cache, self.batch)
        self.batcher = Batcher(cache, scheduler, batching, self.batch, self.allocator, server)
        self._arrivals = arrivals
        self._cache = cache
        self._scheduler = scheduler
        self._executor = executor
        self._mixed = batching.steps == "mixed"
        self._jumps = jumps and executor.jumps
        self._serial = 0
        self._no_pairs = (0,) * len(windows)
        self._is_plain = windows == (None,)

    def run(self) -> None:
        """Serve all requests that arrive.

        Raises:
            InputError: the workload is out of order, or its sessions do not close.
            PolicyError: a plugin failed, or the scheduler lets nothing run.
        """
        batcher, batch, arrivals = self.batcher, self.batch, self._arrivals
        while True:
            now = self.clock_ps // PS_PER_NS
            if arrivals.next_at <= now:
                self._take_arrivals(now)
            if batcher.plan(now):
                self._planned(now)
            if batcher.chunks:
                self._prefill_step()
            elif batch.size:
                self._decode_steps()
            elif not self._wait():
                break
        arrivals.check_all_came()

    def fragmentation(self) -> Fragmentation | None:
        """Return what the memory was used for; None, since this loop does not measure it."""
        return None

    def _planned(self, now: int) -> None:
        """Record the state of the pool after a plan that changed something."""
        events = self.log.pool.pending
        events.append((now, self._cache.pool.free_blocks, self._cache.tree.unpinned_blocks))
        if len(events) > PENDING_EVENTS:
            self.log.pool.settle()

    def _take_arrivals(self, now: int) -> None:
        """ARRIVAL: queue each request up to `now`, or reject it."""
        arrivals = self._arrivals
        while arrivals.next_at <= now:
            at, request = arrivals.take()
            self._serial += 1
            job = Job(
                request,
                self._serial,
                at,
                self.steps,
                request.prompt_tokens,
                request.slo or self.log.slo,
                output_tokens=request.output_tokens,
            )
            self._cache.announce(request, at)
            if request.prompt_tokens:
                why = self.allocator.never_fits(request)
            else:
                why = "its prompt is empty"
            if why:
                self._reject(job, why, at)
            else:
                self.batcher.queue(job, at)

    def _reject(self, job: Job, why: str, now: int) -> None:
        """Reject a request that can never be served."""
        job.stage = DONE
        request = job.request
        if self._cache.trace is not None:
            self._cache.trace.reject(now, request=request.id, why=why)
        self.log.rejected(job, why)
        self._arrivals.ended(request, now)

    def _wait(self) -> bool:
        """Move the clock to the next arrival or timer; return False if there is none."""
        batcher = self.batcher
        wake = self._arrivals.next_at
        if batcher.timers and batcher.waiting:
            wake = min(wake, batcher.timers[0][0])
        if wake < NEVER:
            self.clock_ps = max(self.clock_ps, wake * PS_PER_NS)
            return True
        if batcher.waiting:
            msg = (
                f"scheduler plugin {self._scheduler.name!r} leaves {len(batcher.waiting)} "
                f"requests waiting while nothing runs: the first is "
                f"{next(iter(batcher.waiting))!r}"
            )
            raise PolicyError(msg)
        return False

    def _prefill_step(self) -> None:
        """Run one step that prefills, and decodes as well if steps are mixed."""
        batch, chunks = self.batch, self.batcher.chunks
        decodes = self._mixed and batch.size > 0
        work = self._work(chunks, decodes=decodes)
        took_ps, ended, named = self._executor.run(work, chunks, batch if decodes else ())
        if ended:
            self._cut_short(ended)
        if decodes:
            batch.advance(self.clock_ps, ((took_ps, 0, 1),))
        now = self._pass(1, took_ps, work.prefill, work.decode, named)
        for job, tokens in chunks:
            assert job.seq is not None
            job.computed += tokens
            self._cache.commit(job.seq, tokens, now)
        if batch.committing and decodes:
            self._commit(now)
        prefilled = [job for job, _ in chunks if job.computed == job.target]
        self.batcher.computed(prefilled)
        done = [job for job in prefilled if self._prefill_done(job, now)]
        if decodes:
            done += batch.pop_finished()
        if done:
            self._finish(done, now)

    def _decode_steps(self) -> None:
        """Run decode steps up to the next event: one jump."""
        batch = self.batch
        named: Sequence[tuple[Job, Sequence[Key]]] = ()
        if self._jumps:
            times = self._executor.decode_times(batch.size, batch.context, batch.growth)
            steps = self._steps_to_event(times)
            segments = times.segments(steps)
        else:
            work = StepWork(0, self._no_pairs, batch.size, tuple(batch.context))
            took_ps, ended, named = self._executor.run(work, (), batch)
            if ended:
                self._cut_short(ended)
            segments = ((took_ps, 0, 1),)
        tokens = batch.size
        steps, took_ps = batch.advance(self.clock_ps, segments)
        now = self._pass(steps, took_ps, 0, tokens * steps, named)
        self.batcher.without_progress = 0
        if batch.committing:
            self._commit(now)
        done = batch.pop_finished()
        if done:
            self._finish(done, now)

    def _steps_to_event(self, times: StepTimes) -> int:
        """Return how many steps change nothing but lengths, and allocate for them."""
        event = self._arrivals.next_at
        if self.batcher.timers:
            event = min(event, self.batcher.timers[0][0])
        event_ps = event * PS_PER_NS if event < NEVER else None
        return self.allocator.jump(times, self.clock_ps, event_ps)

    def _cut_short(self, ended: Iterable[tuple[Job, int]]) -> None:
        """Reduce the output of jobs whose text has ended to the tokens they have."""
        for job, output_tokens in ended:
            job.output_tokens = output_tokens
            if job.stage == DECODE:
                self.batch.end(job)

    def _pass(
        self,
        steps: int,
        took_ps: int,
        prefill: int,
        decode: int,
        named: Sequence[tuple[Job, Sequence[Key]]],
    ) -> int:
        """Move the clock over steps that have run; return the time (ns).

        Args:
            steps: number of steps.
            took_ps: picoseconds they took.
            prefill: prompt tokens they computed.
            decode: tokens they generated.
            named: block keys that they made known.
        """
        del prefill, decode
        self.clock_ps += took_ps
        self.log.steps += steps
        self.log.busy_ps += took_ps
        now = self.clock_ps // PS_PER_NS
        if took_ps >= INT64_LIMIT or now >= INT64_LIMIT:
            # Integers of any size, which floats divide only up to 1e308.
            took, end = float(Decimal(took_ps).scaleb(-12)), float(Decimal(now).scaleb(-9))
            msg = (
                f"{steps} steps take {took:.3g} s by latency model "
                f"{self._executor.latency.name!r}, to {end:.3g} s from the start: a step "
                "ends within 2^63 ps (106 days), and the clock at 2^63 ns"
            )
            raise InputError(msg)
        if self._arrivals.next_at <= now:
            self._take_arrivals(now)
        if named:
            self._name(named, now)
        return now

    def _name(self, named: Iterable[tuple[Job, Sequence[Key]]], now: int) -> None:
        """Give generated blocks the keys that have become known."""
        trace = self._cache.trace
        for job, keys in named:
            assert job.seq is not None
            self._cache.append_keys(job.seq, keys)
            job.named_keys += tuple(keys)
            if trace is not None:
                trace.keys(now, request=job.request.id, keys=keys)

    def _work(self, chunks: Sequence[tuple[Job, int]], *, decodes: bool) -> StepWork:
        """Return the work of a step with these prefill chunks, and the decode batch or not."""
        total = doubled = 0
        contexts = []
        for job, tokens in chunks:
            assert job.seq is not None
            context = job.computed - job.seq.dropped_tokens
            contexts.append(context)
            total += tokens
            # n tokens after a context of c attend to c + 1, ..., c + n tokens.
            doubled += tokens * (2 * context + tokens + 1)
        pairs: tuple[int, ...] = (doubled // 2,)
        if not self._is_plain:
            parts = [(c, tokens) for c, (_, tokens) in zip(contexts, chunks, strict=True)]
            pairs = tuple(
                sum(attended_pairs(context, tokens, window) for context, tokens in parts)
                for window in self._windows
            )
        if decodes:
            return StepWork(total, pairs, self.batch.size, tuple(self.batch.context))
        return StepWork(total, pairs, 0, self._no_pairs)

    def _commit(self, now: int) -> None:
        """Commit the blocks that jobs have just filled, to be shared or dropped."""
        # A list of its own: a job whose sequence is compacted moves to another one.
        for job in [*self.batch.committers()]:
            seq = job.seq
            assert seq is not None
            self._cache.settle(seq, job.length)
            before = seq.dropped_tokens
            self._cache.commit(seq, seq.tokens - seq.computed, now)
            if seq.dropped_tokens > before:
                self.batch.forgot(job, seq.dropped_tokens - before)
            self.batcher.computed()

    def _prefill_done(self, job: Job, now: int) -> bool:
        """PREFILL_DONE: record the next token; return True if it was the last."""
        request = job.request
        if not job.output_tokens:
            return True
        if job.first_token is None:
            job.first_token = now
            if self._cache.trace is not None and job.seq is not None:
                self._cache.trace.first_token(now, request=request.id, seq=job.seq.id)
        else:
            self.log.itl.pending.append((self.clock_ps - job.last_token_ps, 0, 1, 1))
        job.last_token_ps = self.clock_ps
        generated = job.target - request.prompt_tokens + 1
        if generated == job.output_tokens:
            return True
        job.stage = DECODE
        self.batch.add(job, generated)
        return False

    def _finish(self, jobs: list[Job], now: int) -> None:
        """DECODE_DONE: finish the jobs that have all their tokens, in order of admission."""
        trace, arrivals = self._cache.trace, self._arrivals
        if len(jobs) > 1:
            jobs.sort(key=lambda job: 0 if job.seq is None else job.seq.admission)
        for job in jobs:
            request = job.request
            if trace is not None and job.seq is not None:
                known = job.known_request()
                trace.finish(
                    now,
                    request=request.id,
                    seq=job.seq.id,
                    output=job.output_tokens,
                    # Those of other requests are in REQUEST already.
                    output_keys=known.output_keys if isinstance(known, TextRequest) else None,
                )
            self.batcher.finish(job, now)
            self.log.ended(job, now)
            if arrivals.following:
                arrivals.ended(request, now)
