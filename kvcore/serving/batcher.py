"""Continuous batching: which jobs run, wait and are preempted, as a scheduler decides.

A plan divides the tokens of the next step, `max_tokens`, in this order:

    1  decoding jobs     a token each; the blocks for it are allocated first (`next_step`).
                         Where none is left, the rules choose a job that loses its blocks,
                         until the others have theirs (`_preempt_to_grow`)
    2  prefilling jobs   their next chunks (`_allot`), in order of admission
    3  waiting jobs      admitted while tokens, slots and blocks last (`_schedule`, `_open`);
                         each gets its first chunk

Where an admission takes the blocks of a chunk alone (`Rules.reserve`), 2 may lack blocks as
well, and a job loses its blocks (`_has_blocks`): another one, or the one that needs more.

A job that the plan has preempted is offered no slot in the same plan, unless nothing else runs.
Jobs behind it in the queue are not either: admissions end at the first job that does not run.
Whom the same plan may still admit, and when waiting jobs are offered a slot next, depends on
the rules:

    admit_after_preemption   jobs before it in the queue   waiting jobs are offered a slot next
    true (kvcore)            in the same plan              when something has changed
    false (vLLM)             not in the same plan          by the next plan

With a preemptive scheduler 2 and 3 are merged by its order, and a waiting job may take the slot
of a running one, which is paused. With `steps="prefill-first"`, 1 follows only if 2 and 3 have
taken nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator
from heapq import heappop, heappush
from itertools import chain
from operator import lt
from typing import TYPE_CHECKING, Final, Literal, NoReturn

from kvcore.cache import ServedCache
from kvcore.errors import PolicyError, shorten
from kvcore.plugins import FAILURES, policy_error
from kvcore.request import Request, TextRequest
from kvcore.serving.decode_batch import DecodeAllocator, DecodeBatch
from kvcore.serving.job import (
    DECODE,
    DONE,
    LOADING,
    PAUSED,
    PREFILL,
    WAITING,
    Job,
    admission_of,
)
from kvcore.serving.rules import Decisions, StepState, TokenRatio
from kvcore.serving.scheduler import Batching, LoopState, Scheduler, ServiceTimes
from kvcore.serving.waiting import CheckedScheduler, WaitingQueue

if TYPE_CHECKING:
    from kvcore.cache.tiers import TierLoad


_PATIENCE: Final = 100
"""Preemptions without a new token that are no livelock yet, besides ten for each job."""


class Batcher:
    """Carries out the decisions of the scheduler.

    A job goes from `waiting` to `running`; a pause or a lack of blocks takes it back to
    `waiting`, with its blocks (then it is in `paused` too) or without them.

    Attributes:
        waiting: waiting jobs, in scheduler order.
        running: running jobs, in order of admission; at most `max_seqs`.
        prefilling: running jobs whose prompt is not computed yet, in order of admission.
        paused: jobs off the batch that keep their blocks; they are in `waiting` too.
        chunks: the jobs that prefill in the next step, with their numbers of tokens.
        changed: whether anything has happened since the last plan.
        timers: a heap of the times (ns) at which priorities of waiting jobs change by
            themselves.
        loads: a heap of the times (ns) at which loads from tiers end, with their jobs. The
            job is None for a prefetch, whose request has not arrived; these go first.
        blocked_job: the job that found no blocks last, if nothing has happened since.
        without_progress: preemptions since the last step that gave a token: many are a
            livelock.
        publishes_output: whether a plan shares the generated blocks that its step fills;
            names_output: those without keys too.
        moved: called with each job that was given its blocks; returns True if its K/V comes
            from another server. None: that never happens.
        batching: the limits of a step.
        server: hits and times of service, for the scheduler.
    """

    __slots__ = (
        "_allocator", "_batch", "_cache", "_decisions", "_full", "_in_order", "_lends",
        "_mixed", "_ratio", "_reserve", "_rules", "_scheduler", "_step", "_tiers", "batching",
        "blocked_job", "changed", "chunks", "loads", "moved", "names_output", "paused",
        "prefilling", "publishes_output", "running", "server", "timers", "waiting",
        "without_progress",
    )  # fmt: skip

    def __init__(
        self,
        cache: ServedCache,
        scheduler: Scheduler,
        batching: Batching,
        batch: DecodeBatch,
        allocator: DecodeAllocator,
        server: ServiceTimes,
    ) -> None:
        """Create a batcher without jobs.

        Args:
            cache: the cache, for its trace and the blocks that are available.
            scheduler: the scheduler, which is attached to `server`.
            batching: the limits of a step.
            batch: the jobs that decode.
            allocator: the blocks of all jobs.
            server: hits and times of service, for `plan` of the scheduler.
        """
        CheckedScheduler(scheduler).call("attach", scheduler.attach, server)
        self._scheduler = CheckedScheduler(scheduler)  # as `attach` leaves it
        levels = () if cache.tiers is None else cache.tiers.levels
        policies = [level.eviction for level in levels]
        self.waiting = WaitingQueue(self._scheduler, cache.eviction, *policies)
        self.running: dict[Job, None] = {}
        self.prefilling: dict[Job, None] = {}
        self.paused: dict[Job, None] = {}
        self.chunks: list[tuple[Job, int]] = []
        self.changed = True
        self.timers: list[tuple[int, int, Job]] = []
        self.loads: list[tuple[int, int, Job | None, TierLoad]] = []
        self.blocked_job: Job | None = None
        self.without_progress = 0
        self.publishes_output = self.names_output = False
        self.moved: Callable[[Job, int], bool] | None = None
        self.batching = batching
        self.server = server
        self._cache = cache
        self._tiers = cache.tiers
        self._batch = batch
        self._allocator = allocator
        allocator.waiting, allocator.prefilling = self.waiting.entries, self.prefilling
        self._mixed = batching.steps == "mixed"
        self._in_order = self._mixed and allocator.in_order
        # A prompt that is not chunked has tokens beside those of the jobs that decode.
        self._lends = self._in_order and batching.chunked
        self._rules = rules = batching.rules
        # Cache groups allocate what is loaded when a load begins.
        tiers = cache.tiers is not None and not cache.grouped
        self._decisions = Decisions(rules, chunked=batching.chunked, tiers=tiers)
        self._reserve = batching.reserved_blocks(cache.pool.blocks)
        ratio = rules.new_token_ratio
        self._ratio = None if ratio is None else TokenRatio(ratio)
        self._step = PlannedStep()
        # Whether a job has found no room by the rules, so that none is admitted until a
        # running job leaves.
        self._full = False

    def queue(self, job: Job, now: int, *, front: bool = False) -> None:
        """Add `job` to the waiting ones."""
        if self._scheduler.ranks:
            self._rank(job, now)
        self.waiting.enter(job, now, front=front)
        if self._scheduler.heard:
            self._scheduler.tell("queued", job, now)
        self.changed = True

    def prefetch(self, request: Request, now: int, arrival: int) -> None:
        """Start to load blocks of `request`, which arrives at `arrival` (ns), from tiers.

        The blocks of the watermark are left to running jobs.
        """
        if self._tiers is not None:
            load = self._tiers.prefetch(
                request, now, arrival, self.server.prefill_ns, self._reserve
            )
            if load is not None:
                heappush(self.loads, (load.ready, -load.seq.id, None, load))

    def plan(self, now: int) -> bool:
        """Allocate blocks for the next decode step, and fill `chunks` with its prefill.

        Return True if anything but growth has happened since the last plan.
        """
        step, timers, loads = self._step, self.timers, self.loads
        self.chunks = []
        while timers and timers[0][0] <= now:
            self._rank_again(heappop(timers)[2], now)
        while loads and loads[0][0] <= now:
            _, _, job, load = heappop(loads)
            self._loaded(job, load, now)
        retry = False
        self._divide(now)
        if step.preempted:
            # Where the rules do not admit after a preemption, jobs were offered no slot because
            # of it, and are by the next plan. Else all before the preempted one were.
            retry = not self._rules.admit_after_preemption or step.refuses
            step.preempted.clear()
            if all(job.stage == LOADING for job in self.running):  # also if none runs
                # All running jobs were preempted: admit again, with the freed blocks. The
                # blocks of the next step are those of nobody.
                self._allocator.allocated_until = self._batch.steps.count
                self.changed = True
                self._divide(now)
                step.preempted.clear()
        # Blocks that became free after the admissions are offered by the next plan.
        changed, self.changed = self.changed, retry or self._allocator.freed
        if not self._batch.size:
            # Jobs that join by a prefill have no blocks for their first decode step yet.
            self._allocator.allocated_until = self._batch.steps.count
        return changed

    def _divide(self, now: int) -> None:
        """Allocate for the next decode step, and divide its tokens among prompts.

        Running jobs go before waiting ones: first the blocks of the next decode step, then
        admissions. Where prefill goes first, a step decodes only if it has no prefill.
        """
        allocator = self._allocator
        if self._mixed and not allocator.next_step(now):
            self._preempt_to_grow(now, allocator.next_step)
        if allocator.freed:
            allocator.freed = False
            if self.waiting.entries:
                self.computed()
        if self.publishes_output and self._batch.committing:
            self._fill_output(now)
        if self.changed and (self.prefilling or self.waiting.entries):
            self._admit(now)
        elif self._step.unpublished:
            self._publish(now)
        decodes = self._in_order if self._mixed else not self.chunks
        if decodes and not allocator.finish_step(now):
            self._preempt_to_grow(now, allocator.finish_step)

    def computed(self) -> None:
        """Record that blocks were committed or freed: the job that found none may fit now."""
        self.blocked_job = None
        self.changed = True

    def retire(self, job: Job) -> None:
        """Record that `job` has all its tokens, before its slot and blocks are freed."""
        if job.stage == DECODE:
            assert job.seq is not None
            self._cache.settle(job.seq, job.request.prompt_tokens + job.output_tokens - 1)
        job.stage = DONE

    def finish(self, job: Job, now: int, *, complete: bool = True) -> None:
        """FINISH: free the slot and the blocks of `job`, which has all its tokens.

        It is not `complete` while the last token is being computed, which a lag allows.
        """
        if self._decisions.keeps:
            self.retire(job)
            self._keep_generated(job, now, complete=complete)
        trace, request, seq = self._cache.trace, job.request, job.seq
        if trace is not None and seq is not None:
            known = job.known_request()
            trace.finish(
                now,
                request=request.id,
                seq=seq.id,
                output=job.output_tokens,
                # The output keys of other requests are in REQUEST already.
                output_keys=known.output_keys if isinstance(known, TextRequest) else None,
            )
        decoded, job.stage = job.stage == DECODE, DONE
        length = request.prompt_tokens + job.output_tokens - 1 if decoded else None
        self._allocator.close(job, now, length)
        del self.running[job]
        self.blocked_job, self._full = None, False
        self.changed = True
        if self._scheduler.heard:
            self._scheduler.tell("finished", job, now)

    def ended(self, job: Job, now: int) -> None:
        """Call `finished` of the scheduler for `job`, which ran and was aborted."""
        self._scheduler.tell("finished", job, now)

    def abort(self, job: Job, now: int) -> bool:
        """Remove `job` from the server before its end, and free its slot and blocks.

        Return False if that has to wait: a transfer still writes into its blocks, or it was
        preempted and has none, so that it can end only after its next admission.
        """
        if job.stage == LOADING or (job.stage == WAITING and job.admitted is not None):
            return False
        trace, seq = self._cache.trace, job.seq
        ran = job.stage not in (WAITING, PAUSED)
        if ran:
            self._leave_batch(job)
            self._keep_generated(job, now, complete=not self._rules.lag)
        else:
            self.withdraw(job, now)
        if trace is not None and seq is not None:
            if job.stage == PAUSED:
                trace.resume(now, request=job.request.id, seq=seq.id)
            trace.finish(now, request=job.request.id, seq=seq.id, output=job.generated)
        job.output_tokens, job.stage = job.generated, DONE
        if seq is not None:
            self._allocator.close(job, now)
        if ran:
            self.ended(job, now)
        self.computed()
        return True

    def withdraw(self, job: Job, now: int) -> None:
        """Remove `job`, which waits and will not be served, from the queue."""
        self.waiting.remove(job, now)
        self.paused.pop(job, None)
        if self._scheduler.heard:
            self._scheduler.tell("withdrawn", job, now)

    def _preempt_to_grow(self, now: int, grow: Callable[[int], bool]) -> None:
        """OUT_OF_BLOCKS: preempt until `grow` finds the blocks of the next decode step."""
        while True:
            if not self._decisions.whole:
                self._allocator.serve_first(now)
            self._take_blocks(self._choose_victim(now, None), now)
            if grow(now):
                return

    def _admit(self, now: int) -> None:  # noqa: C901 - one merge of two sequences
        """Divide the tokens of the next step among prompts, in scheduler order."""
        step = self._step
        ongoing = list(self.prefilling)
        preemptive = self._scheduler.preemptive
        if len(ongoing) > 1:
            if preemptive:
                ranks = {
                    job: (self._scheduler.priority(job, now), job.serial) for job in ongoing
                }
                self._scheduler.call("priority", ongoing.sort, key=ranks.__getitem__)
            ongoing.reverse()
        offers = None if self._scheduler.ranks else self._offers(now)
        asks, step.refuses = self._decisions.headroom is not None, False
        admits, after_preemption = True, asks or self._rules.admit_after_preemption
        step.budget = self.batching.max_tokens - (self._batch.size if self._mixed else 0)
        # Two sequences are merged: prompts that are being computed, and waiting jobs. The
        # former go first, unless the scheduler is preemptive and the head is before them.
        while step.budget > 0 or (self._in_order and ongoing):
            if ongoing and not (preemptive and self._head_before(ongoing[-1], now)):
                job = ongoing.pop()
                if job.stage == PREFILL:
                    self._allot_running(job, now)
                continue
            if not ongoing and (step.unpublished or self._in_order):
                self._running_served(now)
            offered: Job | None = None
            if admits and (after_preemption or not step.preempted):
                offered = self.waiting.head() if offers is None else next(offers, None)
            if asks and offered is not None:
                step.refuses = self._room_for(offered, now, step.preempted) is None
                offered = None if step.refuses else offered
            if offered is not None and self._schedule(offered, now):
                self._allot(offered, now)
            elif ongoing:
                admits = preemptive = False
            else:
                break
        self._postpone(now)
        if step.unpublished:
            self._publish(now)

    def _allot_running(self, job: Job, now: int) -> None:
        """Add the chunk of a running job; in order, those that decode behind it come later."""
        step = self._step
        behind = self._lends and sum(
            admission_of(job) < admission_of(other) for other in self._batch
        )
        step.budget += behind
        if step.budget > 0:
            self._allot(job, now)
        step.budget -= behind

    def _postpone(self, now: int) -> None:
        """Stop decoding the last jobs, to which running jobs before them leave no token.

        The next token of each is then the end of a prompt of which all else is computed.
        """
        if self._step.budget >= 0 or not self._lends:
            return
        for job in sorted(self._batch, key=admission_of)[self._step.budget :]:
            seq = job.seq
            assert seq is not None
            self._batch.remove(job)
            self._allocator.settle(job)
            self._cache.commit(seq, job.length - seq.computed, now)
            job.stage, job.computed, job.target = PREFILL, job.length, job.length + 1
            self.prefilling[job] = None
        order = sorted(self.prefilling, key=admission_of)
        self.prefilling.clear()
        self.prefilling.update(dict.fromkeys(order))

    def _running_served(self, now: int) -> None:
        """Called when all prompts that are being computed have their chunks of the step."""
        if self._in_order and not self._allocator.finish_step(now):
            self._preempt_to_grow(now, self._allocator.finish_step)
        if self._step.unpublished:
            self._publish(now)

    def _room_for(
        self, job: Job, now: int, preempted: Collection[Job], last: Job | None = None
    ) -> int | None:
        """Return the blocks to leave beside `job`, with `last` paused; None: it may not run."""
        if not (self.running or self.paused):
            if self._ratio is not None:
                self._ratio.restart(self._batch.steps.count)
            if not preempted:
                return 0
        if self._decisions.headroom is None and self._ratio is None:
            return self._reserve
        state = self._state(now, preempted)
        if last is not None:
            state = state._replace(
                running=[other for other in self.running if other is not last],
                paused=[*self.paused, last],
                waiting=state.waiting + 1,
                decoding=state.decoding - (last.stage == DECODE),
                chunks=[chunk for chunk in self.chunks if chunk[0] is not last],
            )
        return (self._decisions.headroom or self._rules.headroom)(job, state)

    def _fill_output(self, now: int) -> None:
        """Note the generated blocks to be published: those that the planned step fills.

        Under a lag publish those that the running step fills, whose tokens are known by now.
        """
        for job in self._batch.committers():
            if not self.shares_output(job, now):
                continue
            if self._rules.lag:
                self.publish_filled(job, now)
            else:
                seq, length = job.seq, job.length
                assert seq is not None
                self._cache.settle(seq, length + 1)
                self._cache.commit(seq, length - seq.computed, now)
                self._step.unpublished.append((job, 1))
            self.computed()

    def shares_output(self, job: Job, now: int) -> bool:
        """Return True if the blocks that `job` generates have keys, or stay by the rules."""
        return job.request.publishes or self._keeps_output(job, now)

    def _keeps_output(self, job: Job, now: int) -> bool:
        keeps = self._decisions.keeps_generated
        return keeps is None or keeps(job, self._state(now), preempted=False)

    def publish_grown(self, job: Job, now: int) -> None:
        """Called with each decoding `job` that has got a block, if generated blocks stay."""
        if self._keeps_output(job, now):
            self.publish_filled(job, now)

    def publish_filled(self, job: Job, now: int) -> None:
        """Share the blocks that the decoding `job` has filled, in the running step too."""
        assert job.seq is not None
        self._share(job, job.length - job.seq.computed, now)

    def _publish(self, now: int) -> None:
        """Commit the blocks that the planned step will fill, if `commit` is `scheduled`.

        Called when the chunks of all ongoing prompts are planned: nothing else can lack blocks
        in this plan, so that no job with published blocks is preempted before it computes them.
        """
        step = self._step
        for job, tokens in step.unpublished:
            self._share(job, tokens, now)
        step.unpublished.clear()

    def _share(self, job: Job, tokens: int, now: int) -> None:
        """Share the blocks that the next `tokens` tokens of `job` fill."""
        seq = job.seq
        assert seq is not None
        self._cache.publish(seq, tokens, now)
        if self.names_output:
            self._keep_output(job, seq.computed + tokens, now)

    def _allot(self, job: Job, now: int) -> None:
        """Add the chunk of `job` in the planned step to `chunks`, and allocate its blocks."""
        step, decisions = self._step, self._decisions
        if job.stage != PREFILL:
            step.budget -= self._mixed and job.stage == DECODE
            return
        tokens = job.target - job.computed
        if decisions.plain:
            if tokens > step.budget:
                tokens = step.budget
            self.chunks.append((job, tokens))
            step.budget -= tokens
            return
        # How many tokens: by the rules, and where the cache lets a chunk end.
        limit = self._most_tokens()
        if decisions.chunk_tokens is not None:
            tokens = decisions.chunk_tokens(job, tokens, self._state(now))
        elif tokens > limit:
            tokens = limit if decisions.chunked else 0 if self.chunks else tokens
        if not tokens:
            step.budget = 0
            return
        tokens = self._allocator.chunk_tokens(job, tokens)
        if not tokens:
            return
        # Their blocks, unless the admission took those of the whole prompt.
        by_chunk = not decisions.whole or decisions.reserved is not None
        if by_chunk and not self._has_blocks(job, job.computed + tokens, now):
            return
        # Whether others hit the blocks before the step computes them.
        shares = decisions.shares_scheduled
        publishes = decisions.publishes if shares is None else shares(job, self._state(now))
        self.chunks.append((job, tokens))
        step.budget -= tokens
        if publishes:
            step.unpublished.append((job, tokens))

    def _most_tokens(self) -> int:
        """Return how many tokens of a prompt the step that is planned may compute."""
        cap = self._rules.max_chunk
        if cap is None or len(self.running) + len(self.waiting) <= 1:
            return self._step.budget
        return min(cap, self._step.budget)

    def _has_blocks(self, job: Job, tokens: int, now: int) -> bool:
        """OUT_OF_BLOCKS: preempt until `job` has the blocks of its first `tokens` tokens.

        Return False if `job` was itself the last in order, and has lost its blocks.
        """
        seq = job.seq
        assert seq is not None
        tokens -= seq.tokens
        if tokens <= 0:
            return True
        while not self._allocator.finds_blocks(seq, tokens, now):
            # The trace names no request for which blocks are taken: the job may lose its own.
            victim = self._choose_victim(now, job)
            self._take_blocks(victim, now)
            if victim is job:
                return False
        self._allocator.extend(seq, tokens, now)
        return True

    def _offers(self, now: int) -> Iterator[Job]:
        """Pause the jobs that the plan of the scheduler pauses; yield those that it admits."""
        state = LoopState(
            now,
            self.waiting,
            list(self.running),
            self.batching.max_seqs - len(self.running),
            self._cache.available_blocks,
            self.server,
        )
        plan, unpaused = self._scheduler.plan(state), set()
        for job in self._jobs(plan.pause, "paused", self.running, "is not running"):
            if job.stage in (LOADING, DONE):
                unpaused.add(job)
            else:
                self._pause(job, now)
        # A plan may admit the jobs that it pauses; the `unpaused` ones run on.
        return self._jobs(plan.admit, "admitted", self.waiting, "is not waiting", unpaused)

    def _jobs(
        self, planned: Iterable[Job], what: str, known: Container[Job], why: str,
        ignored: Container[Job] = (),
    ) -> Iterator[Job]:  # fmt: skip
        """Yield the jobs of a plan, except for `ignored` ones; all others must be `known`."""
        for job in self._scheduler.planned(planned):
            is_job = isinstance(job, Job)
            if is_job and job in ignored:
                continue
            if not is_job or job not in known:
                reason, shown = why if is_job else "is no job", shorten(repr(job))
                name = self._scheduler.scheduler.name
                msg = f"scheduler plugin {name!r}: plan() {what} {shown}, which {reason}"
                raise PolicyError(msg)
            yield job

    def _head_before(self, other: Job, now: int) -> bool:
        """Return True if the first waiting job goes before `other`."""
        scheduler = self._scheduler
        head = self.waiting.head() if scheduler.ranks else None
        if head is None:
            return False
        rank = scheduler.priority(other, now)
        return bool(scheduler.call("priority", lt, head.rank, rank))

    def _schedule(self, job: Job, now: int) -> bool:
        """Make `job` run if a slot is or can be made free, and it finds its blocks."""
        if job is self.blocked_job and not self._cache.eviction.expires_spans:
            return False
        if self._full or job in self._step.preempted:
            return False
        if not (self._decisions.chunked or self._has_chunk(job, now)):
            return False
        if len(self.running) >= self.batching.max_seqs and not self._take_slot(job, now):
            return False
        take = self._resume if job.stage == PAUSED else self._open
        while not take(job, now):
            if not self._make_room(job, now):
                self.blocked_job = job
                return False
        self.waiting.remove(job, now)
        self.running[job] = None
        if self._scheduler.heard:
            self._scheduler.tell("admitted", job, now)
        return True

    def _take_slot(self, job: Job, now: int) -> bool:
        """Pause the running job that is last in order for `job`; return False if none is."""
        last = self._scheduler.call("priority", self._behind, job, now)
        if last is None:
            return False
        # Checked first: without blocks for `job` the pause would be in vain.
        if not self._fits(job, now, last):
            self.blocked_job = job
            return False
        self._pause(last, now, job)
        return True

    def _has_chunk(self, job: Job, now: int) -> bool:
        """Return True if this step may compute a chunk of `job`, or all that it has to."""
        step = self._step
        step.chunk, decides = None, self._decisions.chunk_tokens
        alone = not self.chunks and self._rules.unchunked == "alone"
        if job.stage == PAUSED or (alone and decides is None):
            return True
        hit = self._cache.probe(job.known_request(), now, job.target)
        tokens = job.target - hit * self._cache.geometry.block_size
        if decides is None:
            return tokens <= step.budget
        step.chunk = decides(job, tokens, self._state(now))
        return step.chunk > 0

    def _behind(self, job: Job, now: int) -> Job | None:
        """Return the running job that is last in order, if `job` may take its slot."""
        if not (self._scheduler.ranks and self._scheduler.preemptive):
            return None
        # A running job has only come forward since it was ranked.
        behind = [
            other
            for other in self.running
            if job.rank < other.rank and other.stage not in (LOADING, DONE)
        ]
        ranks = {
            other: (self._scheduler.priority(other, now), other.serial) for other in behind
        }
        last = max(ranks, key=ranks.__getitem__, default=None)
        return None if last is None or not job.rank < ranks[last][0] else last

    def _fits(self, job: Job, now: int, last: Job) -> bool:
        """Return True if `job` finds blocks beside those of all others, `last` paused. Pure."""
        if job.seq is not None:
            return not self._missing_slots(job) or self._allocator.can_extend(job.seq)
        reserve = self._room_for(job, now, (), last)
        return reserve is not None and self._allocator.fits(job, now, reserve)

    def _missing_slots(self, job: Job) -> int:
        """Return how many slots a paused job needs for the step that is allocated."""
        assert job.seq is not None
        if job.prefill_left or self._allocator.allocated_until <= self._batch.steps.count:
            return 0
        return job.length + 1 - job.seq.compacted - job.seq.tokens

    def _open(self, job: Job, now: int) -> bool:
        """Allocate the blocks of `job` and start its prefill; return False without blocks."""
        # That the step may admit is known; jobs are preempted for `job` itself since then.
        reserve = self._room_for(job, now, ())
        if reserve is None:
            return False
        # Blocks of the whole prompt, or of its first chunk: what is loaded comes at once.
        takes = self._rules.reserve
        if self._decisions.reserved is not None:
            takes = self._decisions.reserved(job, self._state(now))
        loads = self._tiers is not None and not self._cache.grouped
        at_once = takes == "prompt" or loads or self.moved is not None
        chunk = None
        if not at_once:
            chunk = min(self._step.chunk or self._step.budget, self._most_tokens())
        seq = self._allocator.open(job, now, reserve, chunk, fits_prompt=takes != "first-chunk")
        if seq is None:
            self._full = self._ratio is not None and bool(self.running)
            return False
        job.seq = seq
        job.computed = seq.computed
        first = job.admitted is None
        if first:
            job.admitted, job.hit = now, seq.computed
        # The rest of the prompt comes from another server or a tier, or is computed.
        if self.moved is not None and self.moved(job, now):
            job.stage = LOADING
            return True
        if self._tiers is not None:
            load = self._tiers.load(seq, now, self.server.prefill_ns, resumed=not first)
            if load is not None:
                job.stage = LOADING
                if load.ready > now:
                    heappush(self.loads, (load.ready, job.serial, job, load))
                else:
                    self._loaded(job, load, now)
                return True
        job.stage = PREFILL
        self.prefilling[job] = None
        return True

    def _loaded(self, job: Job | None, load: TierLoad, now: int) -> None:
        """LOADED: continue with the part of the prompt that was not loaded."""
        assert self._tiers is not None
        if job is None:
            self._tiers.finish(load, now)
            self.computed()
            return
        before = job.computed
        job.computed = self._tiers.finish(load, now)
        self._allocator.loaded(job.computed - before)
        if not load.resumed:
            job.loaded = job.computed - before
        self.prefill(job)

    def prefill(self, job: Job) -> None:
        """Prefill what is left of the prompt of a job, whose other K/V has come."""
        job.stage = PREFILL
        self.prefilling[job] = None
        self.computed()

    def _resume(self, job: Job, now: int) -> bool:
        """Continue a paused job, with the block it needs; return False without one."""
        seq, trace = job.seq, self._cache.trace
        assert seq is not None
        missing = self._missing_slots(job)
        can_extend = not missing or self._allocator.can_extend(seq)
        if not (can_extend or self._cache.make_room(1, now)):
            return False
        if trace is not None:
            trace.resume(now, request=job.request.id, seq=seq.id)
        del self.paused[job]
        if job.prefill_left:
            job.stage = PREFILL
            self.prefilling[job] = None
            return True
        self._allocator.extend(seq, missing, now)
        job.stage = DECODE
        self._batch.add(job, job.generated)
        return True

    def _pause(self, job: Job, now: int, requester: Job | None = None) -> None:
        """Remove `job` from the batch, for `requester` if given; it keeps its blocks."""
        self._leave_batch(job)
        job.stage = PAUSED
        job.pauses += 1
        self.paused[job] = None
        self.blocked_job = None
        self._record(job, "pause", now, requester)
        self.queue(job, now, front=True)

    def _take_blocks(self, job: Job, now: int, requester: Job | None = None) -> None:
        """Close the sequence of `job`, and let it wait.

        Its private blocks are free then: those not computed yet, the partial last one, and
        those without a key. Those in spans are unpinned: they stay cached until they are
        evicted, and the job hits those that are left when it is admitted again, as others may.
        The rest is computed again, or loaded from a tier where that is faster.

        A job that has all its tokens finishes instead.

        Args:
            job: a running or paused job.
            now: the time, ns.
            requester: the job whose admission takes the place of a paused one, for the trace;
                None: running jobs have too few blocks.
        """
        if job.stage == DONE:
            self.finish(job, now, complete=False)
            # Rules that do not admit after a preemption do not after this one.
            self._step.preempted.add(job)
            return
        paused = job.stage == PAUSED
        if paused:
            del self.paused[job]
            self.waiting.remove(job, now)
        else:
            # Its tokens of the step go to jobs that are planned after it. (Before `_admit` it
            # has none, and the budget is set there.)
            chunks = sum(tokens for other, tokens in self.chunks if other is job)
            self._step.budget += self._mixed if job.stage == DECODE else chunks
            self._leave_batch(job)
        level = None
        tokens = job.length
        if self._tiers is not None and job.seq is not None:
            level = self._tiers.can_swap(job.seq, tokens, now, self.server.prefill_ns)
        if level is None and not paused:
            # Under a lag, its newest token is known once the slot of the next is allocated.
            served = job.seq is not None and job.seq.tokens > job.length
            complete = served or not self._rules.lag
            self._keep_generated(job, now, complete=complete, preempted=True)
        self._record(job, "swap" if level else "recompute", now, requester)
        if level is None:
            job.recomputes += 1
        elif job.seq is not None:
            job.swaps += 1
            level.park(job.seq, tokens, now)
        self._allocator.close(job, now)  # as preempted: its stage is not DONE
        job.seq, job.stage = None, WAITING
        job.target, job.computed = job.request.prompt_tokens + job.generated, 0
        self.queue(job, now, front=True)  # for `Scheduler.plan`; else the order decides
        self.blocked_job = None
        self._step.preempted.add(job)
        if self._ratio is not None:
            decoding = (other for other in self.running if other.stage == DECODE)
            self._ratio.preempted(decoding, self._batch.steps.count)

    def _leave_batch(self, job: Job) -> None:
        """Stop the prefill or the decoding of `job`."""
        step = self._step
        if job.stage == DECODE:
            self._batch.remove(job)
            self._allocator.settle(job)
        else:
            del self.prefilling[job]
            self.chunks = [chunk for chunk in self.chunks if chunk[0] is not job]
        if step.unpublished:
            step.unpublished = [chunk for chunk in step.unpublished if chunk[0] is not job]
        del self.running[job]
        self._full = False

    def _keep_generated(
        self, job: Job, now: int, *, complete: bool, preempted: bool = False
    ) -> None:
        """Cache the full blocks that `job` has generated, if generated blocks stay cached.

        There are none while its first prompt is computed, but where it is computed again.

        If it is not `complete`, its newest token is not known yet, and does not count.
        """
        if not self._decisions.keeps or job.seq is None:
            return
        tokens = job.length
        if not complete and tokens > job.computed:
            tokens -= 1
        self._keep_output(job, tokens, now, preempted=preempted)

    def _keep_output(self, job: Job, tokens: int, now: int, *, preempted: bool = False) -> None:
        """Cache the generated blocks in the first `tokens` tokens of `job`, by the rules."""
        keeps = not (preempted and self._rules.preempts == "shortest")
        if self._decisions.keeps_generated is not None:
            state = self._state(now)
            keeps = self._decisions.keeps_generated(job, state, preempted=preempted)
        if keeps:
            self._cache.keep_generated(job.seq, tokens, now)

    def _make_room(self, job: Job, now: int) -> bool:
        """Preempt the last in order for `job` if no other event can free blocks.

        That is the case when no job runs and all jobs with blocks are paused. Return True if
        one was preempted.
        """
        if self.running or not self.paused:
            return False
        last = self._choose_victim(now, job)
        if last is job:
            return False
        self._take_blocks(last, now, job)
        return True

    def _choose_victim(self, now: int, requester: Job | None) -> Job:
        """Return the job with blocks that loses them, as the rules choose it."""
        # A transfer still writes into the blocks of a job that is loading. One that has all its
        # tokens may be chosen: it finishes then.
        jobs = [job for job in chain(self.running, self.paused) if job.stage != LOADING]
        state = self._state(now)
        if self._decisions.victim is not None:
            return self._decisions.victim(jobs, state, requester)
        # Without an override only priorities can fail to compare.
        victim: Job = self._scheduler.call(
            "priority", self._rules.victim, jobs, state, requester
        )
        return victim

    def _state(self, now: int, preempted: Collection[Job] | None = None) -> StepState:
        """Return the step that is planned, for a decision of the rules."""
        ratio = self._ratio
        return StepState(
            now,
            self.batching.max_tokens,
            self.batching.max_seqs,
            self.batching.chunked,
            self._cache.geometry.block_size,
            self._cache.pool.blocks,
            self._cache.available_blocks,
            self._reserve,
            self.running,
            self.paused,
            len(self.waiting),
            self._batch.size,
            self.chunks,
            self._step.budget,
            self._step.preempted if preempted is None else preempted,
            None if ratio is None else ratio.at(self._batch.steps.count),
            lambda job: self._scheduler.priority(job, now),
        )

    def _record(
        self,
        job: Job,
        how: Literal["pause", "recompute", "swap"],
        now: int,
        requester: Job | None,
    ) -> None:
        """PREEMPT: record that `job` loses its slot or its blocks.

        Raises:
            PolicyError: livelock: nothing but preemption happens any more.
        """
        self.without_progress += 1
        trace, seq = self._cache.trace, job.seq
        if trace is not None and seq is not None:
            trace.preempt(
                now,
                request=job.request.id,
                seq=seq.id,
                how=how,
                requester=None if requester is None else requester.request.id,
            )
        jobs, pool = len(self.running) + len(self.waiting), self._cache.pool
        # Jobs that get their blocks chunk by chunk may lose them at every chunk.
        chunks = 1 if self._decisions.whole else pool.blocks
        if self.without_progress > (_PATIENCE + 10 * jobs) * chunks:
            counts = self.without_progress, job.request.id, jobs, pool.free_blocks
            raise self.livelock(now, *counts)

    def livelock(
        self, now: int, preemptions: int, last: int | str, jobs: int, free_blocks: int
    ) -> PolicyError:
        """Return the error of a run of `jobs` jobs in which nothing but preemption happens."""
        msg = (
            f"livelock at {now} ns: {preemptions} preemptions without a new token, the last of "
            f"request {last!r}; {jobs} requests run or wait for {self._cache.pool.blocks} "
            f"blocks, of which {free_blocks} are free. Scheduler "
            f"{self._scheduler.scheduler.name!r} orders them differently every time it is "
            "asked: a running job's priority may only improve"
        )
        if self._rules.decides():
            msg += f"; or rules {self._rules.name!r} preempt those that come next"
        return PolicyError(msg)

    def refuse_order(self, error: BaseException) -> NoReturn:
        """Raise the error of priorities that do not compare, which the core in C has met."""
        if not isinstance(error, FAILURES):
            raise error
        raise policy_error(self._scheduler.scheduler, "priority", error) from error

    def _rank(self, job: Job, now: int) -> None:
        """Set the rank of a waiting job, and schedule when to do so again."""
        job.rank = self._scheduler.priority(job, now)
        if self._scheduler.changes:
            due = self._scheduler.changes_at(job, now)
            if due is not None:
                heappush(self.timers, (due, job.serial, job))

    def _rank_again(self, job: Job, now: int) -> None:
        """TIMER: rank `job` again, if it still waits."""
        if job in self.waiting and self._scheduler.ranks:
            self._rank(job, now)
            self.waiting.enter(job, now)
            self.changed = True


class PlannedStep:
    """The decisions of a plan on the step after it so far, besides its chunks.

    Attributes:
        budget: tokens of the step that are not planned yet.
        chunk: tokens that the rules give to the job that is offered a slot; None: they were
            not asked.
        preempted: the jobs that the plan has preempted; none between two plans.
        refuses: whether the rules admit no job any more.
        unpublished: jobs with tokens of theirs whose blocks are shared before the step computes
            them; they are once all ongoing prompts have their chunks.
    """

    __slots__ = ("budget", "chunk", "preempted", "refuses", "unpublished")

    def __init__(self) -> None:
        self.budget = 0
        self.chunk: int | None = None
        self.preempted: set[Job] = set()
        self.refuses = False
        self.unpublished: list[tuple[Job, int]] = []
