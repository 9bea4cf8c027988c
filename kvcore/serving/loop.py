"""The serving loop: a discrete-event simulation of continuous batching.

The events are ARRIVAL, PREFILL_DONE, DECODE_DONE, OUT_OF_BLOCKS and TIMER. Between two of
them the same jobs decode, so that all the steps in between are one jump.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvcore.cache import KVCache
from kvcore.errors import InputError, PolicyError
from kvcore.models.cost import attended_pairs
from kvcore.request import SLO, Request
from kvcore.serving.arrivals import NEVER, Arrivals
from kvcore.serving.batcher import Seats
from kvcore.serving.batching import Batching
from kvcore.serving.contiguous import Occupancy
from kvcore.serving.decode_batch import Decoders
from kvcore.serving.executor import Executor
from kvcore.serving.latency import Batch, ServiceTimes, StepTimes
from kvcore.serving.result import RunLog
from kvcore.serving.scheduler import DECODE, DONE, DecodeSteps, Job, Scheduler
from kvcore.trace.fields import key_fields, told_keys
from kvcore.units import INT64_LIMIT, PS_PER_NS


class ServingLoop:
    """Serves requests, step by step of the batch, as many steps at once as change nothing.

    The clock counts picoseconds; everybody else is told whole nanoseconds.

    Args:
        arrivals: what arrives when.
        cache: where K/V is kept; it counts `tokens`.
        scheduler: who runs.
        executor: what runs a step, or says how long it takes.
        batching: the caps of a step.
        jumps: whether to run many decode steps at once. It changes nothing but the time
            the run takes.
        slo: what is expected for requests that bring no SLO of their own.
        fragmentation: whether to measure what memory is used for.

    Attributes:
        clock: the time, in picoseconds.
        steps, decoders, seats, log, occupancy: its parts.
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
        fragmentation: bool = False,
    ) -> None:
        """Put the parts together."""
        self.clock = 0
        self.steps = DecodeSteps()
        self._windows = windows = executor.latency.windows
        self.decoders = Decoders(
            self.steps,
            cache.geometry.block_size,
            windows,
            forgetting=cache.retention is not None,
        )
        server = ServiceTimes(cache, executor.latency, batching)
        scheduler.bind()
        scheduler.attach(server)
        self.seats = Seats(cache, scheduler, batching, self.decoders, server)
        self.seats.growth.measured = fragmentation
        self.log = RunLog(cache.pool.blocks, slo)
        self.occupancy = Occupancy(self.seats.growth) if fragmentation else None
        self._arrivals = arrivals
        self._cache = cache
        self._scheduler = scheduler
        self._executor = executor
        self._mixed = batching.steps == "mixed"
        self._jumps = jumps and executor.jumps
        self._serial = 0
        self._no_pairs = (0,) * len(windows)
        self._plain = windows == (None,)

    def run(self) -> None:
        """Serve everything that arrives.

        Raises:
            InputError: the workload is out of order, or its sessions do not close.
            PolicyError: a plugin failed, or the scheduler lets nothing run.
        """
        seats, decoders, timeline = self.seats, self.decoders, self.log.pool
        pool, tree = self._cache.pool, self._cache.tree
        while True:
            now = self.clock // PS_PER_NS
            if self._arrivals.next_at <= now:
                self._take_arrivals(now)
            if seats.plan(now):
                timeline.add(now, pool.free_blocks, tree.unpinned_blocks)
                if self.occupancy is not None:
                    self.occupancy.event(len(seats.running), seats.refused)
            if seats.chunks:
                self._prefill_step()
            elif decoders.jobs:
                self._decode_steps()
            elif not self._idle():
                break
        self._arrivals.check_all_came()

    def _take_arrivals(self, now: int) -> None:
        """ARRIVAL: let each request up to `now` wait for a seat, or reject it."""
        for at, request in self._arrivals.until(now):
            self._serial += 1
            slo = request.slo or self.log.slo
            job = Job(request, self._serial, at, self.steps, request.prompt_tokens, slo)
            self._cache.announce(request, at)
            why = self._unfit(request)
            if why:
                self._reject(job, why, at)
            else:
                self.seats.queue(job, at)

    def _unfit(self, request: Request) -> str:
        """Say why `request` can never be served; nothing if it can."""
        if not request.prompt_tokens:
            return "its prompt is empty"
        return self.seats.growth.unfit(request)

    def _reject(self, job: Job, why: str, now: int) -> None:
        job.stage = DONE
        request = job.request
        if self._cache.trace is not None:
            self._cache.trace.line("REJECT", now, request=request.id, why=why)
        self.log.rejected(job, why)
        self._arrivals.ended(request, now)

    def _idle(self) -> bool:
        """Wait for the next arrival; return False if there is none."""
        wake = self._arrivals.next_at
        if self.seats.waiting and self.seats.timers:
            wake = min(wake, self.seats.timers[0][0])
        if wake < NEVER:
            clock = max(self.clock, wake * PS_PER_NS)
            if self._serial and self.occupancy is not None:
                self.occupancy.passed(clock - self.clock, steps=0)
            self.clock = clock
            return True
        if self.seats.waiting:
            msg = (
                f"scheduler plugin {self._scheduler.name!r} leaves {len(self.seats.waiting)} "
                f"requests waiting while nothing runs: the first is "
                f"{next(iter(self.seats.waiting))!r}"
            )
            raise PolicyError(msg)
        return False

    def _prefill_step(self) -> None:
        """Run one step that prefills, and decodes as well if steps are mixed."""
        decoders, chunks, cache = self.decoders, self.seats.chunks, self._cache
        decodes = self._mixed and decoders.jobs > 0
        batch = self._batch(chunks, decodes=decodes)
        took = self._executor.run(batch, chunks, decoders if decodes else None)
        if self._executor.ended:
            self._cut_short()
        if self.occupancy is not None:
            self.occupancy.passed(took, batch.prefill, batch.decode)
        if decodes:
            self.log.step(decoders, self.clock, took)
            decoders.advance(1, self.clock + took)
        now = self._pass(1, took)
        for job, tokens in chunks:
            assert job.seq is not None
            job.computed += tokens
            cache.commit(job.seq, tokens, now)
        self.seats.computed()
        if decoders.committing and decodes:
            self._commit(now)
        done = []
        for job, _ in chunks:
            if job.computed == job.target and self._prefill_done(job, now):
                done.append(job)
        if decodes:
            done += decoders.finished()
        if done:
            self._finish(done, now)

    def _decode_steps(self) -> None:
        """Run decode steps up to the next event: one jump."""
        decoders = self.decoders
        if self._jumps:
            lines = self._executor.lines(decoders.jobs)
            times = StepTimes(lines, decoders.context, decoders.growth)
            steps = self._steps_to_event(times)
            took = times.total(steps)
            self.log.jump(decoders, self.clock, times, steps)
        else:
            batch = Batch(0, self._no_pairs, decoders.jobs, tuple(decoders.context))
            steps, took = 1, self._executor.run(batch, (), decoders)
            if self._executor.ended:
                self._cut_short()
            self.log.step(decoders, self.clock, took)
        if self.occupancy is not None:
            self.occupancy.passed(took, 0, decoders.jobs * steps, steps)
        decoders.advance(steps, self.clock + took)
        now = self._pass(steps, took)
        self.seats.preemptions.barren = 0
        if decoders.committing:
            self._commit(now)
        done = decoders.finished()
        if done:
            self._finish(done, now)

    def _cut_short(self) -> None:
        """Let texts that have ended ask for no more than they have from now on."""
        for job, output in self._executor.ended:
            job.request = attrs.evolve(job.request, output_tokens=output)
            if job.stage == DECODE:
                self.decoders.end(job)

    def _pass(self, steps: int, took: int) -> int:
        """Let `took` picoseconds pass, take in who arrives, and return the time (ns)."""
        self.clock += took
        self.log.steps += steps
        self.log.busy += took
        now = self.clock // PS_PER_NS
        if self._arrivals.next_at <= now:
            self._take_arrivals(now)
        if took >= INT64_LIMIT or now >= INT64_LIMIT:
            msg = (
                f"{steps} steps take {took / 1e12:.3g} s by latency model "
                f"{self._executor.latency.name!r}, to {now / 1e9:.3g} s from the start: a step "
                "ends within 2^63 ps (106 days), and the clock at 2^63 ns"
            )
            raise InputError(msg)
        if self._executor.named:
            self._name(now)
        return now

    def _name(self, now: int) -> None:
        """Give generated blocks the keys that have become known."""
        for job, keys in self._executor.named:
            assert job.seq is not None
            self._cache.append_keys(job.seq, keys)
            known = [*job.request.output_keys, *keys]
            job.request = attrs.evolve(job.request, output_keys=known)
            if self._cache.trace is not None:
                self._cache.trace.line(
                    "KEYS", now, request=job.request.id, keys=key_fields(keys, job.request.id)
                )

    def _steps_to_event(self, times: StepTimes) -> int:
        """Return how many steps change nothing but lengths, and allocate for them."""
        steps = self.decoders.until_change()
        at = self._arrivals.next_at
        if self.seats.timers:
            at = min(at, self.seats.timers[0][0])
        if at < NEVER and steps > 1:
            steps = times.reach(at * PS_PER_NS - self.clock, steps)
        if steps > 1:
            steps = self.seats.growth.ahead(steps, self.clock, times)
        return steps

    def _batch(self, chunks: Sequence[tuple[Job, int]], *, decodes: bool) -> Batch:
        total = squares = 0
        for job, tokens in chunks:
            total += tokens
            squares += tokens * (2 * _context(job) + tokens + 1)
        pairs: tuple[int, ...] = (squares // 2,)
        if not self._plain:
            pairs = tuple(
                sum(attended_pairs(_context(job), tokens, window) for job, tokens in chunks)
                for window in self._windows
            )
        if decodes:
            return Batch(total, pairs, self.decoders.jobs, tuple(self.decoders.context))
        return Batch(total, pairs, 0, self._no_pairs)

    def _commit(self, now: int) -> None:
        """Commit the blocks that jobs have just filled, to be shared or forgotten."""
        for job in self.decoders.committers():
            seq = job.seq
            assert seq is not None
            self._cache.settle(seq, job.length)
            before = seq.dropped_tokens
            self._cache.commit(seq, job.length - seq.computed, now)
            if seq.dropped_tokens > before:
                self.decoders.forgot(job, seq.dropped_tokens - before)
            self.seats.computed()

    def _prefill_done(self, job: Job, now: int) -> bool:
        """PREFILL_DONE: the next token is there; return whether it was the last."""
        self.seats.prefilled(job)
        request = job.request
        if not request.output_tokens:
            return True
        if job.first_token is None:
            job.first_token = now
            if self._cache.trace is not None and job.seq is not None:
                self._cache.trace.line("FIRST_TOKEN", now, request=request.id, seq=job.seq.id)
        else:
            self.log.gap(self.clock - job.last_token)
        job.last_token = self.clock
        generated = job.target - request.prompt_tokens + 1
        if generated == request.output_tokens:
            return True
        job.stage = DECODE
        self.decoders.add(job, generated)
        return False

    def _finish(self, jobs: list[Job], now: int) -> None:
        """DECODE_DONE: let go of the jobs that have all their tokens, in order of admission."""
        cache = self._cache
        if len(jobs) > 1:
            jobs.sort(key=lambda job: 0 if job.seq is None else job.seq.admission)
        for job in jobs:
            seq, request = job.seq, job.request
            assert seq is not None
            if job.stage == DECODE:
                self.decoders.remove(job)
                self._cache.settle(seq, request.prompt_tokens + request.output_tokens - 1)
            job.stage = DONE
            if cache.trace is not None:
                told = told_keys(request)
                cache.trace.line(
                    "FINISH",
                    now,
                    request=request.id,
                    seq=seq.id,
                    output=request.output_tokens,
                    **told,
                )
            if self.occupancy is not None:
                self.seats.growth.closing(job)
            cache.close(seq, now)
            self.seats.leave(job, now)
            self.log.ended(job, now)
            self._arrivals.ended(request, now)


def _context(job: Job) -> int:
    """Return how many tokens the next one of a prefill attends to, besides its own."""
    assert job.seq is not None
    return job.computed - job.seq.dropped_tokens
