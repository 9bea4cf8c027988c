"""The serving loop: a discrete-event simulation of continuous batching.

Its events, who handles them, and the line of the trace that each makes:

    ARRIVAL        `ServingLoop._take_arrivals`  REQUEST
    PREFETCH       `ServingLoop._prefetch`       PREFETCH
    LOADED         `Batcher._loaded`             LOAD
    PREFILL_DONE   `ServingLoop._prefill_done`   FIRST_TOKEN
    DECODE_DONE    `ServingLoop._finish`         FINISH
    OUT_OF_BLOCKS  `Batcher._preempt_to_grow`,
                   `Batcher._has_blocks`,
                   `Batcher._make_room`          PREEMPT
    TIMER          `Batcher._rank_again`         none

Between two of them the same jobs decode, so that all the steps in between are one jump (see
`decode_batch`). One turn of the loop, `begin` and `end`:

    begin  1  _take_arrivals   requests up to now are queued, or rejected
           2  Batcher.plan     blocks of the next decode step: running jobs grow first, and
                               preempt others where none is left
                               prompts that are being computed get tokens of the step, then
                               waiting jobs are admitted, in scheduler order
           3  _planned         the pool is recorded
    end    4  _compute, _jump  one step with prefill; or many decode steps, up to the next event
           5  _pass            the clock moves on; requests that came meanwhile are queued
           6  commit           blocks that were filled can hit from now on, unless the rules
                               share what is scheduled: then they could since 2
           7  _prefill_done    first tokens; the jobs decode from the next step on
           8  _finish          jobs with all their tokens give their blocks back

Under a lag (`Rules.lag`), 8, and 6 of decoding jobs, follow 2 of the next step, which therefore
does not see them (`_catch_up`).

The clock counts picoseconds (`_ps`); requests, caches and schedulers use whole nanoseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeAlias, cast

import attrs

import kvcore
from kvcore.cache import Sequence as CacheSequence
from kvcore.cache import ServedCache
from kvcore.errors import InputError, PolicyError
from kvcore.models.cost import attended_pairs
from kvcore.plugins import find_override
from kvcore.request import SLO, Key, Request
from kvcore.serving import native
from kvcore.serving.batcher import Batcher
from kvcore.serving.decode_batch import DecodeAllocator, DecodeBatch
from kvcore.serving.job import DECODE, DONE, DecodeSteps, Job, admission_of
from kvcore.serving.latency import (
    Executor,
    LinearPiece,
    ServiceEstimates,
    StepResult,
    StepWork,
    decode_lines,
)
from kvcore.serving.scheduler import Batching, Scheduler
from kvcore.serving.stats import PENDING_EVENTS, Fragmentation, RunLog
from kvcore.units import INT64_LIMIT, PS_PER_NS, picoseconds
from kvcore.workloads.arrivals import NEVER, Arrivals

if TYPE_CHECKING:
    from kvcore.cache import KVCache
    from kvcore.serving.drafter import Drafter

_ALL: Final = (None,)
"""The attention windows of a model all of whose layers attend to everything."""


class ServingLoop:
    """Serves requests, step by step; decode steps between two events are one jump.

    Args:
        arrivals: the requests by time of arrival.
        cache: where K/V is kept, in `tokens` accounting.
        scheduler: the order of jobs.
        executor: runs a step, or computes its time. One with a drafter verifies drafts.
        batching: the limits of a step.
        jumps: whether to run many decode steps at once. It changes only the time that the
            run takes.
        slo: the SLO of requests without one of their own.
        allocator: makes the allocator of blocks; None: that of the cache.
        meter: measures the run; None: nothing.
        log: where requests are recorded; None: a new `RunLog`.

    Attributes:
        clock_ps: the time, in picoseconds.
        steps, arrivals, batch, allocator, batcher, log: its parts.
        on_first_token: called with each job whose first token has come, and the time (ns);
            None: there is no such call.

    Raises:
        InputError: parts that do not fit one another.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        cache: ServedCache,
        scheduler: Scheduler,
        executor: Executor,
        batching: Batching,
        *,
        jumps: bool = True,
        slo: SLO | None = None,
        allocator: AllocatorFactory | None = None,
        meter: Meter | None = None,
        log: RunLog | None = None,
    ) -> None:
        latency, rules = executor.latency, batching.rules
        self.clock_ps = 0
        self.steps = DecodeSteps()
        self.log = RunLog(cache.pool.blocks, slo) if log is None else log
        self._windows = latency.windows
        publishes, names = _output_commits(cache, scheduler, executor, batching)
        self.batch = DecodeBatch(
            self.steps,
            cache.geometry.block_size,
            latency.windows,
            self.log.itl,
            all_commit=names or cache.forgets,
            ahead=publishes and not rules.lag,
        )
        server = ServiceEstimates(cache, latency, batching.max_seqs)
        self.allocator: DecodeAllocator
        if allocator is None and cache.allocator is not None:
            self.allocator = cache.allocator(self.batch, batching)
        else:
            pages: AllocatorFactory = allocator or DecodeAllocator
            self.allocator = pages(cache, self.batch)
        # By the wall clock the front end takes its real time.
        frontend = picoseconds(latency.frontend, f"latency plugin {latency.name!r}: frontend")
        self._frontend_ns = frontend // PS_PER_NS if executor.mode == "model" else 0
        drafter = cast("Drafter | None", executor.drafter)
        _check_parts(drafter, cache, self.allocator, lag=rules.lag)
        scheduler.bind()
        self.batcher = Batcher(cache, scheduler, batching, self.batch, self.allocator, server)
        self.batcher.publishes_output, self.batcher.names_output = publishes, names
        if names and rules.lag:
            self.allocator.grown = self.batcher.publish_grown
        self.on_first_token: Callable[[Job, int], None] | None = None
        self.arrivals = arrivals
        self._cache = cache
        self._scheduler = scheduler
        self._executor = executor
        self._meter = meter
        self._mixed = batching.steps == "mixed"
        self._jumps = jumps and executor.jumps
        self._serial = 0
        # By number of jobs: a latency model is asked once for each.
        self._lines: dict[int, Sequence[LinearPiece]] = {}
        # The result or the jump of a turn that has begun and not ended.
        self._computed: StepResult | None = None
        self._jumped: tuple[int, int] | None = None
        self._longest = batching.max_model_len
        # The most tokens of a sequence that must be computed in one step; None: any number.
        waits = not batching.chunked and rules.unchunked == "wait"
        self._in_one = batching.max_tokens if waits else None
        # Under a lag, or with a front end: jobs that cannot be planned before a time (ns).
        self._unseen: deque[tuple[int, Job]] = deque()
        self._lag = Lag() if rules.lag else None
        self._drafts: kvcore.Speculation | None = None
        if drafter is not None:
            # The front door says where drafts are verified: most runs have none.
            self._drafts = kvcore.Speculation(
                drafter,
                cast("Any", executor),
                cast("KVCache", cache),
                self.batch,
                self.batcher,
                self.log,
            )

    def run(self) -> None:
        """Serve all requests that arrive.

        Raises:
            InputError: the workload is out of order, or its sessions do not close.
            PolicyError: a plugin failed, or the scheduler lets nothing run.
        """
        if type(self) is ServingLoop:  # others are driven from outside, turn by turn
            native.run(self)
        while True:
            if self.begin():
                self.end()
            elif not self._wait():
                break
        self.arrivals.check_all_came()
        self.log.last_start = self.arrivals.last_start

    def begin(self) -> bool:
        """Handle arrivals and plan the next step; return False if there is none to run."""
        batcher, arrivals, pins = self.batcher, self.arrivals, self._cache.pins
        now = self.clock_ps // PS_PER_NS
        if pins and pins.next_end <= now:
            pins.end(now)
            batcher.computed()
        if arrivals.next_at <= now:
            self._take_arrivals(now)
        if self._unseen:
            self._queue_seen(now)
        if batcher.plan(now):
            self._planned(now)
        if arrivals.prefetch_at <= now:
            self._prefetch(now)
        runs = self.batch.size > 0 or len(batcher.chunks) > 0
        if self._lag is not None and self._catch_up(self._lag, now) and not runs:
            return self.begin()
        return runs

    def _planned(self, now: int) -> None:
        """Record the state of the pool after a plan that changed something."""
        timeline, cache = self.log.pool, self._cache
        timeline.pending.append((now, cache.pool.free_blocks, cache.unpinned_blocks))
        if len(timeline.pending) > PENDING_EVENTS:
            timeline.settle()
        if self._meter is not None:
            self._meter.planned(self, now)

    def _queue_seen(self, now: int) -> None:
        """Queue the jobs that could be planned at the time at which this step was planned."""
        unseen, began_ps = self._unseen, None if self._lag is None else self._lag.began_ps
        seen = now if began_ps is None else began_ps // PS_PER_NS
        while unseen and unseen[0][0] <= seen:
            self.batcher.queue(unseen.popleft()[1], now)

    def _catch_up(self, lag: Lag, now: int) -> bool:
        """Apply the effects of the last step to the cache and the jobs.

        Under a lag that is after the plan of the next one. Return False if nothing has run
        since the plan before, so that another plan would be the same.
        """
        stepped, lag.began_ps = lag.began_ps is not None, None
        filled, lag.filled = lag.filled, []
        for job, seq, length in filled:
            if job.seq is seq and seq.is_open:
                if seq.tokens < length:
                    self._cache.settle(seq, length)
                self._cache.commit(seq, length - seq.computed, now)
                self.batcher.computed()
        late, lag.late = lag.late, []
        for job in sorted(late, key=admission_of):
            if job in self.batcher.running:
                self.batcher.finish(job, now)
            self.arrivals.ended(job.request, now)
        if late:
            self._planned(now)
        return stepped

    def end(self) -> None:
        """Run the planned step, or the decode steps up to the next event."""
        if self.batcher.chunks:
            self._prefill_step()
        else:
            self._decode_steps()

    def idle_until(self) -> int:
        """Return when (ns) the next event is if no step runs, or NEVER."""
        wake, batcher = self._next_event(), self.batcher
        if batcher.timers and batcher.waiting:
            wake = min(wake, batcher.timers[0][0])
        return wake

    def _next_event(self) -> int:
        """Return when (ns) an event comes by itself, timers and pins left out; or NEVER."""
        event = min(self.arrivals.next_at, self.arrivals.prefetch_at)
        if self._unseen:
            event = min(event, self._unseen[0][0])
        if self.batcher.loads:
            event = min(event, self.batcher.loads[0][0])
        return event

    def abort(self, job: Job, why: str) -> bool:
        """End `job` early, between two turns; return False if that has to wait."""
        now = self.clock_ps // PS_PER_NS
        if not self.batcher.abort(job, now):
            return False
        if job.seq is None:
            self._reject(job, why, now)
        else:
            self.log.ended(job, now)
            self.arrivals.ended(job.request, now)
        return True

    def break_off(self, now: int) -> None:
        """End the turn that has begun, at `now` (ns): no other follows.

        The blocks that were allocated for the batch as a whole are assigned to its sequences.
        """
        if self._drafts is not None:
            self._drafts.break_off(now)
        for job in self.batch:
            self.allocator.settle(job)

    def _take_arrivals(self, now: int) -> None:
        """ARRIVAL: queue each request up to `now`, or reject it."""
        arrivals = self.arrivals
        while arrivals.next_at <= now:
            arrival, request = arrivals.take()
            self._arrive(request, arrival, arrival)

    def _arrive(self, request: Request, now: int, arrival: int, **known: Any) -> Job:
        """Queue a request that its client sent at `arrival` (ns), or reject it.

        `known` are attributes of its job from the start, if another server has prefilled it.
        """
        self._serial += 1
        slo = request.slo or self.log.slo
        job = Job(request, self._serial, arrival, self.steps, request.prompt_tokens, slo)
        if self._longest is not None:
            job.output_tokens = self._bounded(request).output_tokens
        for name, value in known.items():
            setattr(job, name, value)
        if self._cache.trace is not None:
            self._cache.announce(request, now)
        why = self.unfit(request)
        if why:
            self._reject(job, why, now)
        elif (self._lag is not None or self._frontend_ns) and not known:
            self._unseen.append((now + self._frontend_ns, job))
        else:
            self.batcher.queue(job, now)
        return job

    def unfit(self, request: Request) -> str:
        """Return why a request can never be served; "" if it can be."""
        if not request.prompt_tokens:
            return "its prompt is empty"
        if self._longest is not None:
            prompt, longest = request.prompt_tokens, self._longest
            if prompt + min(request.output_tokens, 1) > longest:
                return f"its prompt has {prompt:,} tokens, and max_model_len is {longest:,}"
            request = self._bounded(request)
        if self._in_one is not None:
            tokens = request.prompt_tokens + max(request.output_tokens - 1, 0)
            if tokens > self._in_one:
                return (
                    f"its {tokens:,} tokens may have to be computed in one step, which has "
                    f"{self._in_one:,} at most"
                )
        return self.allocator.never_fits(request)

    def _bounded(self, request: Request) -> Request:
        """Return `request` with the output that `max_model_len` leaves room for."""
        longest = self._longest
        if longest is None or request.prompt_tokens + request.output_tokens <= longest:
            return request
        return attrs.evolve(request, output_tokens=max(0, longest - request.prompt_tokens))

    def _prefetch(self, now: int) -> None:
        """PREFETCH: load for each request whose hint is due, unless it has arrived."""
        arrivals = self.arrivals
        while arrivals.prefetch_at <= now:
            arrival, request = arrivals.take_prefetch()
            if arrival > now:
                self.batcher.prefetch(request, now, arrival)
        self._planned(now)

    def _reject(self, job: Job, why: str, now: int) -> None:
        """Reject a request that can never be served."""
        job.stage = DONE
        request = job.request
        if self._cache.trace is not None:
            self._cache.trace.reject(now, request=request.id, why=why)
        self.log.rejected(job, why)
        self.arrivals.ended(request, now)

    def _wait(self) -> bool:
        """Move the clock to the next arrival or timer; return False if there is none."""
        wake = self.idle_until()
        if wake < NEVER:
            before_ps = self.clock_ps
            self.clock_ps = max(before_ps, wake * PS_PER_NS)
            if self._meter is not None and self._serial:
                self._meter.passed(self, self.clock_ps - before_ps, 0, 0, 0)
            return True
        batcher = self.batcher
        if batcher.waiting:
            msg = (
                f"scheduler plugin {self._scheduler.name!r} leaves {len(batcher.waiting)} "
                f"requests waiting while nothing runs: the first is "
                f"{next(iter(batcher.waiting))!r}"
            )
            raise PolicyError(msg)
        return False

    def _result(self) -> StepResult:
        """Return the result of the step; jobs whose text ends in it have no more output."""
        result = self._computed or self._compute()
        self._computed = None
        for job, output_tokens in result.ended:
            job.output_tokens = output_tokens
            if job.stage == DECODE:
                self.batch.end(job)
        return result

    def _compute(self) -> StepResult:
        """Run the step that is planned, or compute how long it takes."""
        batch, chunks = self.batch, self.batcher.chunks
        total = doubled = 0
        for job, tokens in chunks:
            seq = job.seq
            assert seq is not None
            total += tokens
            # n tokens after a context of c attend to c + 1, ..., c + n tokens.
            doubled += tokens * (2 * (job.computed - seq.dropped_tokens) + tokens + 1)
        pairs: tuple[int, ...] = (doubled // 2,)
        if self._windows != _ALL:
            pairs = self._attended(chunks)
        work = StepWork(total, pairs)
        decoding: Iterable[Job] = ()
        if batch.size and (self._mixed or not chunks):
            decoding = batch
            work.decode, work.context = batch.size, tuple(batch.context)
        else:
            work.context = (0,) * len(pairs)
        if self._drafts is not None:
            return self._drafts.compute(work, chunks, decoding, self.clock_ps // PS_PER_NS)
        return self._executor.run(work, chunks, decoding)

    def _attended(self, chunks: Iterable[tuple[Job, int]]) -> tuple[int, ...]:
        """Return how many tokens those of prefill chunks attend to, by attention window."""
        parts = [
            (job.computed - job.seq.dropped_tokens, tokens)
            for job, tokens in chunks
            if job.seq is not None
        ]
        return tuple(
            sum(attended_pairs(context, tokens, window) for context, tokens in parts)
            for window in self._windows
        )

    def _prefill_step(self) -> None:
        """Run one step that prefills, and decodes as well if steps are mixed."""
        batch, batcher = self.batch, self.batcher
        chunks = batcher.chunks
        decoding = batch.size if self._mixed else 0
        took_ps, _, named, _ = self._result()
        if decoding:
            batch.run(self.clock_ps, took_ps, 0, 1)
        now = self._pass(1, took_ps, decoding, named)
        # What the step has computed can hit: of prompts, then of those that decode.
        commit, prefilled = self._cache.commit, []
        for job, tokens in chunks:
            assert job.seq is not None
            job.computed = computed = job.computed + tokens
            commit(job.seq, tokens, now)
            if computed == job.target:
                prefilled.append(job)
        if decoding and batch.committing:
            self._commit(now)
        batcher.computed()
        if decoding or prefilled:
            batcher.without_progress = 0
        # First tokens, then the ends.
        done = []
        for job in prefilled:
            del batcher.prefilling[job]
            if self._prefill_done(job, now):
                done.append(job)
        if decoding and batch.ends[0][0] <= self.steps.count:
            done += batch.pop_finished()
        if done:
            self._finish(done, now)

    def _decode_steps(self) -> None:
        """Run decode steps up to the next event: one jump."""
        batch, tokens = self.batch, self.batch.size
        named: Sequence[tuple[Job, Sequence[Key]]] = ()
        if self._jumps:
            steps, took_ps = self._jumped or self._jump(NEVER)
            self._jumped = None
        else:
            took_ps, _, named, _ = self._result()
            steps = 1
            batch.run(self.clock_ps, took_ps, 0, 1)
        now = self._pass(steps, took_ps, tokens * steps, named)
        self.batcher.without_progress = 0
        if batch.committing:
            self._commit(now)
        if batch.ends[0][0] <= self.steps.count:
            done = batch.pop_finished()
            if done:
                self._finish(done, now)

    def _jump(self, until: int) -> tuple[int, int]:
        """Run decode steps up to the next event, at most to the first that ends at `until`."""
        lines, event = self._foreseen()
        return self.allocator.jump(lines, self.clock_ps, min(event, until))

    def _foreseen(self) -> tuple[Sequence[LinearPiece], int]:
        """Return the lines of a decode step's time, and when (ns) the next event is.

        Events that steps bring about do not count; NEVER: there is no other.
        """
        size, batcher = self.batch.size, self.batcher
        lines = self._lines.get(size)
        if lines is None:
            lines = self._lines[size] = decode_lines(self._executor.latency, size)
        if batcher.changed:
            return lines, 0  # the next step is followed by another plan in any case
        event, pins = self._next_event(), self._cache.pins
        if batcher.timers:
            event = min(event, batcher.timers[0][0])
        return lines, min(event, pins.next_end) if pins else event

    def _pass(
        self, steps: int, took_ps: int, decode: int, named: Sequence[tuple[Job, Sequence[Key]]]
    ) -> int:
        """Advance the clock by steps that have run; return the time (ns).

        Args:
            steps: number of steps.
            took_ps: picoseconds they took.
            decode: tokens they generated.
            named: jobs, and block keys of their generated tokens that became known.
        """
        log = self.log
        if self._lag is not None:
            # Of a jump nothing has come before its last step, so that any of its steps will do.
            self._lag.began_ps = self.clock_ps
        self.clock_ps = clock_ps = self.clock_ps + took_ps
        log.steps += steps
        log.busy_ps += took_ps
        now = clock_ps // PS_PER_NS
        if clock_ps >= INT64_LIMIT and (took_ps >= INT64_LIMIT or now >= INT64_LIMIT):
            self._refuse_time(steps, took_ps, clock_ps)
        if self.arrivals.next_at <= now:
            self._take_arrivals(now)
        if named:
            self._name(named, now)
        if self._drafts is not None:
            self._drafts.settle(took_ps, now)
        if self._meter is not None:
            prefill = sum([tokens for _, tokens in self.batcher.chunks])
            self._meter.passed(self, took_ps, prefill, decode, steps)
        return now

    def _refuse_time(self, steps: int, took_ps: int, end_ps: int) -> NoReturn:
        """Raise the InputError of steps that took `took_ps` and ended at `end_ps`: too late."""
        # Integers of any size, which floats divide only up to 1e308.
        took, end = (float(Decimal(ps).scaleb(-12)) for ps in (took_ps, end_ps))
        what = "a step takes" if steps == 1 else f"{steps} steps take"
        msg = (
            f"{what} {took:.3g} s by latency model "
            f"{self._executor.latency.name!r}, to {end:.3g} s from the start: a step "
            "ends within 2^63 ps (106 days), and the clock at 2^63 ns"
        )
        raise InputError(msg)

    def _name(self, named: Iterable[tuple[Job, Sequence[Key]]], now: int) -> None:
        """Assign known keys to generated blocks."""
        trace = self._cache.trace
        for job, keys in named:
            assert job.seq is not None
            self._cache.append_keys(job.seq, keys)
            job.named_keys += tuple(keys)
            if trace is not None:
                trace.keys(now, request=job.request.id, keys=keys)

    def _commit(self, now: int) -> None:
        """Commit the blocks that jobs have just filled, which are then shared or dropped."""
        if self._drafts is not None:
            self._drafts.commit(now)
            return
        if self._lag is None and self.batcher.publishes_output:
            return  # the next plan does
        # A copy: a job whose sequence is compacted moves to another list.
        for job in [*self.batch.committers()]:
            seq = job.seq
            assert seq is not None
            if self._lag is not None:
                if self.batcher.shares_output(job, now):
                    self._lag.filled.append((job, seq, job.length))
                continue
            self._cache.settle(seq, job.length)
            before = seq.dropped_tokens
            self._cache.commit(seq, seq.tokens - seq.computed, now)
            if seq.dropped_tokens > before:
                self.batch.forgot(job, seq.dropped_tokens - before)
            self.batcher.computed()

    def _prefill_done(self, job: Job, now: int) -> bool:
        """PREFILL_DONE: record the next token; return True if it was the last."""
        if not job.output_tokens:
            return True
        request = job.request
        if job.first_token is None:
            job.first_token = now
            if self._cache.trace is not None and job.seq is not None:
                self._cache.trace.first_token(now, request=request.id, seq=job.seq.id)
            if self.on_first_token is not None:
                self.on_first_token(job, now)
        else:
            self.log.itl.pending.append((self.clock_ps - job.last_token_ps, 0, 1, 1))
        job.last_token_ps = self.clock_ps
        generated = job.target - request.prompt_tokens + 1
        if generated == job.output_tokens:
            job.generated_before = generated
            return True
        job.stage = DECODE
        self.batch.add(job, generated)
        return False

    def _finish(self, jobs: list[Job], now: int) -> None:
        """DECODE_DONE: finish the jobs that have all their tokens, in order of admission."""
        if len(jobs) > 1:
            jobs.sort(key=admission_of)
        for job in jobs:
            if self._lag is not None:
                self.batcher.retire(job)
                self._lag.late.append(job)
                self.log.ended(job, now)
                continue
            self.batcher.finish(job, now)
            self.log.ended(job, now)
            self.arrivals.ended(job.request, now)


AllocatorFactory: TypeAlias = Callable[[Any, DecodeBatch], DecodeAllocator]
"""Makes the allocator of a run from its cache, of a kind that it knows, and its batch."""


class Meter(Protocol):
    """Measures a run while it runs: a part that a loop is given, and tells what has happened.

    A meter may raise an exception to end the run. A loop without a meter pays nothing.
    """

    def planned(self, loop: ServingLoop, now: int) -> None:
        """Called after a plan at `now` (ns) that changed something."""

    def passed(
        self, loop: ServingLoop, took_ps: int, prefill: int, decode: int, steps: int
    ) -> None:
        """Called when `steps` steps have run, by which the clock has moved on by `took_ps`.

        They computed `prefill` tokens of prompts and generated `decode` tokens; their jobs
        have not ended yet. No step runs while the loop waits for an arrival.
        """


class MemoryMeter(Meter, Protocol):
    """A meter that measures how memory is used."""

    def summary(self) -> Fragmentation:
        """Return the shares of the pool, once the run has ended."""


class Lag:
    """The last step and what it has left behind, which the plan of the next one does not see.

    Under asynchronous scheduling a step is planned while the one before runs.

    Attributes:
        began_ps: when the last step, or jump, began; None: none has run since the last plan.
        late: the jobs that the step has finished.
        filled: the blocks that it has filled: job, sequence, and length in tokens.
    """

    __slots__ = ("began_ps", "filled", "late")

    def __init__(self) -> None:
        self.began_ps: int | None = None
        self.late: list[Job] = []
        self.filled: list[tuple[Job, CacheSequence, int]] = []


def _output_commits(
    cache: ServedCache, scheduler: Scheduler, executor: Executor, batching: Batching
) -> tuple[bool, bool]:
    """Return whether plans commit the generated blocks that their step fills.

    The first value is about blocks with keys. Rules that share what is scheduled have it so,
    where it is sure that the step fills them: not with drafts or a retention policy, nor if
    the plan may pause a job that decodes. The second is about those without keys as well,
    which are as good as committed when their request ends, unless the eviction policy goes by
    the order in which blocks were inserted.
    """
    rules = batching.rules
    keeps = rules.generated == "cached" or find_override(rules, "keeps_generated") is not None
    publishes = (
        rules.commit == "scheduled"
        and batching.steps == "mixed"
        and not (scheduler.preemptive or find_override(scheduler, "plan"))
        and cache.retention is None
        and executor.drafter is None
        and not cache.grouped
    )
    ordered = find_override(cache.eviction, "on_insert") is not None
    return publishes, publishes and ordered and keeps


def _check_parts(
    drafter: Drafter | None, cache: ServedCache, allocator: DecodeAllocator, *, lag: int
) -> None:
    """Raise InputError if two parts of a run contradict each other."""
    why, retention = "", cache.retention if cache.forgets else None
    if lag and (retention is not None or drafter is not None):
        what = "a retention policy" if retention is not None else "a drafter"
        why = (
            f"lag=1 with {what}: what a step leaves behind would be decided before it is "
            "known; leave out one of them"
        )
    elif drafter is not None and retention is not None:
        why = (
            f"drafter {drafter.name!r} with retention {retention.name!r}: what is rejected "
            "cannot be rolled back where tokens have been dropped; leave out one of the two"
        )
    elif drafter is not None and not allocator.takes_drafts:
        why = (
            f"drafter {drafter.name!r}: memory is measured, and contiguous, where a step adds "
            "one token a sequence; leave out the drafter, or that"
        )
    if why:
        raise InputError(why)
