"""Preemptions: written down, and watched for going round in circles."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, TypeAlias

from kvcore.cache import EvictionPolicy, KVCache
from kvcore.errors import OutOfBlocks, PolicyError
from kvcore.plugins import find_override, policy_error
from kvcore.serving.batching import Batching
from kvcore.serving.contiguous import growth_in
from kvcore.serving.decode_batch import Decoders
from kvcore.serving.latency import ServiceTimes
from kvcore.serving.scheduler import (
    DECODE,
    PAUSED,
    PREFILL,
    WAITING,
    Job,
    LoopState,
    Scheduler,
    StepPlan,
)

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
                f"{pool.blocks} blocks, of which {pool.free_blocks} are free. Scheduler "
                f"{self._scheduler.name!r} orders them differently every time it is asked: a "
                "running job's priority may only improve"
            )
            raise PolicyError(msg)


class Seats:
    """Carries out what the scheduler decides.

    Attributes:
        waiting: jobs without a seat, in scheduler order.
        running: jobs with a seat, in order of admission.
        paused: jobs off the batch that keep their blocks; they are in `waiting` too.
        chunks: what the next step prefills: jobs and tokens.
        changed: whether anything has happened since the last plan.
        preemptions: who writes them down.
        timers: when (ns) priorities of waiting jobs change by themselves, a heap.
        refused: who was refused a seat last, if nothing has happened since.
        growth: allocates for the jobs that generate.
    """

    def __init__(
        self,
        cache: KVCache,
        scheduler: Scheduler,
        batching: Batching,
        decoders: Decoders,
        server: ServiceTimes,
    ) -> None:
        """Start with all seats free."""
        self.waiting = Waiting(cache.eviction)
        self.running: dict[Job, None] = {}
        self.paused: dict[Job, None] = {}
        self.chunks: list[tuple[Job, int]] = []
        self.changed = True
        self.growth = growth_in(cache, decoders)
        self._cache = cache
        self._scheduler = scheduler
        self._batching = batching
        self._decoders = decoders
        self._server = server
        self._mixed = batching.steps == "mixed"
        self._spare = batching.spare(cache.pool.blocks)
        self._prefilling: dict[Job, None] = {}
        self.refused: Job | None = None
        self._victims: set[Job] = set()
        self.timers: list[tuple[int, int, Job]] = []
        self.preemptions = Preemptions(cache, scheduler)
        self._ranks = not find_override(scheduler, "plan")
        self._changes_at = find_override(scheduler, "changes_at")
        self._queued = find_override(scheduler, "queued")
        self._admitted = find_override(scheduler, "admitted")
        self._finished = find_override(scheduler, "finished")

    def queue(self, job: Job, now: int, *, front: bool = False) -> None:
        """Let `job` wait for a seat."""
        if self._ranks:
            self._rank(job, now)
        try:
            self.waiting.push(job, now, front=front)
        except TypeError as error:
            raise policy_error(self._scheduler, "priority", error) from error
        if self._queued is not None:
            self._call("queued", self._queued, job, now)
        self.changed = True

    def plan(self, now: int) -> bool:
        """Allocate what the next decode step needs, and say who prefills: `chunks`.

        Returns whether anything has happened since the last plan, growing aside.
        """
        self.chunks = []
        while self.timers and self.timers[0][0] <= now:
            self._rank_again(heappop(self.timers)[2], now)
        if self._mixed and not self.growth.next_step(now):
            self._grow(now)
        if self.changed and (self._prefilling or self.waiting):
            self._admit(now)
        if not (self._mixed or self.chunks):
            self._grow(now)
        if self._victims:
            self._victims.clear()
            if not self.running:
                self._decoders.grown = self._decoders.steps.count + self._mixed
                self._admit(now)
                if not (self._mixed or self.chunks):
                    self._grow(now)
        changed, self.changed = self.changed, False
        if not self._decoders.jobs:
            self._decoders.grown = self._decoders.steps.count
        return changed

    def prefilled(self, job: Job) -> None:
        """Learn that the prefill of `job` is done, which gives it a token."""
        del self._prefilling[job]
        self.preemptions.barren = 0

    def computed(self) -> None:
        """Learn that more is committed: who was refused may hit more now."""
        self.refused = None
        self.changed = True

    def leave(self, job: Job, now: int) -> None:
        """Take the seat of a job that is done."""
        del self.running[job]
        self.refused = None
        self.changed = True
        if self._finished is not None:
            self._call("finished", self._finished, job, now)

    def _grow(self, now: int) -> None:
        """OUT_OF_BLOCKS: preempt until the next decode step has the blocks it needs."""
        while not self.growth.next_step(now):
            self._recompute(self._last(now), now)

    def _admit(self, now: int) -> None:
        """Share the tokens of the next step out, in scheduler order."""
        ongoing = list(self._prefilling)
        preemptive = self._scheduler.preemptive
        if len(ongoing) > 1:
            if preemptive:
                ongoing.sort(key=lambda job: (self._priority(job, now), job.serial))
            ongoing.reverse()
        offers = self._offers(now)
        budget = self._batching.max_tokens
        if self._mixed:
            budget -= self._decoders.jobs
        while budget > 0:
            if ongoing and not (preemptive and self._head_before(ongoing[-1], now)):
                job = ongoing.pop()
                if job.stage == PREFILL:
                    budget -= self._allot(job, budget)
                continue
            offered = next(offers, None)
            if offered is not None and self._seat(offered, budget, now):
                budget -= self._allot(offered, budget)
            elif ongoing:
                offers, preemptive = iter(()), False
            else:
                break

    def _allot(self, job: Job, budget: int) -> int:
        """Give `job` its share of the step's tokens, and return it."""
        if job.stage == DECODE:
            return int(self._mixed)
        tokens = job.target - job.computed
        if tokens > budget:
            if self._batching.chunked:
                tokens = budget
            elif self.chunks:
                return budget
        self.chunks.append((job, tokens))
        return tokens

    def _offers(self, now: int) -> Iterator[Job]:
        """Yield who is to be offered a seat, in scheduler order; pause who is to lose one."""
        if self._ranks:
            return iter(self.waiting.head, None)
        state = LoopState(
            now,
            self.waiting,
            list(self.running),
            self._batching.max_seqs - len(self.running),
            self._cache.available_blocks,
            self._server,
        )
        plan: StepPlan = self._call("plan", self._scheduler.plan, state)
        if not isinstance(plan, StepPlan):
            name = self._scheduler.name
            msg = f"scheduler plugin {name!r}: plan() returned {plan!r}, which is no StepPlan"
            raise PolicyError(msg)
        for job in self._each(plan.pause):
            if job not in self.running:
                self._refuse_plan(job, "paused", "no seat")
            self._pause(job, now)
        return self._checked(plan)

    def _each(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Yield `jobs`, which a plan may make up as it is asked."""
        jobs = self._call("plan", iter, jobs)
        while (job := self._call("plan", next, jobs, None)) is not None:
            yield job

    def _checked(self, plan: StepPlan) -> Iterator[Job]:
        for job in self._each(plan.admit):
            if job not in self.waiting:
                self._refuse_plan(job, "admitted", "a seat already")
            yield job

    def _head_before(self, other: Job, now: int) -> bool:
        head = self.waiting.head() if self._ranks else None
        return head is not None and bool(head.rank < self._priority(other, now))

    def _seat(self, job: Job, budget: int, now: int) -> bool:
        """Give `job` a seat if there is one, or one can be taken, and there is room."""
        if job is self.refused or job in self._victims:
            return False
        if not (self._batching.chunked or self._in_one(job, budget, now)):
            return False
        if len(self.running) >= self._batching.max_seqs:
            last = self._behind(job, now)
            if last is None:
                return False
            if not self._fits(job, now):
                self.refused = job
                return False
            self._pause(last, now, job)
        take = self._resume if job.stage == PAUSED else self._open
        while not take(job, now):
            if not self._make_room(job, now):
                self.refused = job
                return False
        self.waiting.remove(job, now)
        self.running[job] = None
        if self._admitted is not None:
            self._call("admitted", self._admitted, job, now)
        return True

    def _in_one(self, job: Job, budget: int, now: int) -> bool:
        """Say whether the step has the tokens `job` needs, if these must come in one step."""
        if not self.chunks or job.stage == PAUSED:
            return True
        return self._to_prefill(job, now) <= budget

    def _to_prefill(self, job: Job, now: int) -> int:
        """Return how many tokens a job without blocks has to compute: what does not hit."""
        return job.target - self._server.probe(job.request, now)

    def _behind(self, job: Job, now: int) -> Job | None:
        """Return the running job that is last in order, if it must give its seat to `job`."""
        if not (self._ranks and self._scheduler.preemptive):
            return None
        # A running job has only come forward since it was ranked.
        behind = [other for other in self.running if job.rank < other.rank]
        ranks = {other: (self._priority(other, now), other.serial) for other in behind}
        last = max(ranks, key=ranks.__getitem__, default=None)
        return None if last is None or not job.rank < ranks[last][0] else last

    def _fits(self, job: Job, now: int) -> bool:
        """Say whether there is room for `job` beside those that hold blocks. Pure."""
        if job.seq is not None:
            return not self._lacks(job) or self.growth.room_for(job.seq)
        return self.growth.fits(job, now, self._spare)

    def _lacks(self, job: Job) -> int:
        """Return how many slots a paused job needs for the step that is allocated."""
        assert job.seq is not None
        if job.prefill_left or self.growth.pending:
            return 0
        return job.length + 1 - job.seq.tokens

    def _open(self, job: Job, now: int) -> bool:
        request, cache = job.request, self._cache
        again = job.admitted is not None
        first = self._to_prefill(job, now) if again else None
        spare = self._spare if self.running or self.paused else 0
        try:
            seq = cache.open(request, first, now, resumed=again, reserve=spare)
        except OutOfBlocks:
            return False
        job.seq = seq
        job.computed = seq.computed
        if self.growth.measured:
            self.growth.opened(seq)
        if not again:
            job.admitted, job.hit = now, seq.computed
        job.stage = PREFILL
        self._prefilling[job] = None
        return True

    def _resume(self, job: Job, now: int) -> bool:
        """Give a paused job its seat again, and the block it needs, if it needs one."""
        seq, cache = job.seq, self._cache
        assert seq is not None
        more = self._lacks(job)
        if more and not self.growth.room_for(seq):
            return False
        if cache.trace is not None:
            cache.trace.line("RESUME", now, request=job.request.id, seq=seq.id)
        del self.paused[job]
        if job.prefill_left:
            job.stage = PREFILL
            self._prefilling[job] = None
            return True
        self.growth.extend(seq, more, now)
        job.stage = DECODE
        self._decoders.add(job, job.generated)
        return True

    def _pause(self, job: Job, now: int, sake: Job | None = None) -> None:
        """Take `job` off the batch; it keeps its blocks."""
        assert job.seq is not None
        self._unseat(job)
        job.stage = PAUSED
        job.pauses += 1
        self.paused[job] = None
        self.refused = None
        self._record(job, "pause", now, sake)
        self.queue(job, now, front=True)

    def _recompute(self, job: Job, now: int, sake: Job | None = None) -> None:
        """Take all blocks of `job`; it will compute them again."""
        seq = job.seq
        assert seq is not None
        if job.stage == PAUSED:
            del self.paused[job]
            self.waiting.remove(job, now)
        else:
            self._unseat(job)
        self._record(job, "recompute", now, sake)
        if self.growth.measured:
            self.growth.closing(job)
        self._cache.close(seq, now)
        job.seq, job.stage = None, WAITING
        job.target, job.computed = job.request.prompt_tokens + job.generated, 0
        job.recomputes += 1
        self.queue(job, now, front=True)
        self.refused = None
        self._victims.add(job)

    def _unseat(self, job: Job) -> None:
        if job.stage == DECODE:
            self._decoders.remove(job)
            self.growth.settle(job)
        else:
            del self._prefilling[job]
            self.chunks = [chunk for chunk in self.chunks if chunk[0] is not job]
        del self.running[job]

    def _make_room(self, job: Job, now: int) -> bool:
        """Take the blocks of the last in order for `job`, if nothing else will ever free any.

        That is when nothing runs and what holds blocks is paused; return whether it was so.
        """
        if self.running or not self.paused:
            return False
        last = self._last(now)
        if last is job:
            return False
        self._recompute(last, now, job)
        return True

    def _last(self, now: int) -> Job:
        """Return the job that holds blocks and is last in order, the latest among equals."""

        def order(job: Job) -> tuple[Any, int]:
            assert job.seq is not None
            return self._priority(job, now), job.seq.admission

        return max(chain(self.running, self.paused), key=order)

    def _record(self, job: Job, how: str, now: int, sake: Job | None) -> None:
        jobs = len(self.running) + len(self.waiting)
        self.preemptions.record(job, how, now, sake, jobs)

    def _rank(self, job: Job, now: int) -> None:
        try:
            job.rank = self._scheduler.priority(job, now)
        except Exception as error:
            raise policy_error(self._scheduler, "priority", error) from error
        if self._changes_at is not None:
            due = self._call("changes_at", self._changes_at, job, now)
            if due is not None:
                heappush(self.timers, (max(due, now + 1), job.serial, job))

    def _rank_again(self, job: Job, now: int) -> None:
        if job in self.waiting and self._ranks:
            self._rank(job, now)
            self.waiting.push(job, now)
            self.changed = True

    def _priority(self, job: Job, now: int) -> Any:
        return self._call("priority", self._scheduler.priority, job, now)

    def _call(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise policy_error(self._scheduler, method, error) from error

    def _refuse_plan(self, job: Job, what: str, state: str) -> None:
        name = self._scheduler.name
        msg = f"scheduler plugin {name!r}: plan() {what} {job!r}, which has {state}"
        raise PolicyError(msg)


Entry: TypeAlias = tuple[Any, bool, int, Job]


SLACK = 4
"""How many entries the heap may hold for each job that waits, before it is made anew."""


class Waiting:
    """Jobs without a seat: a heap by rank, and the order in which they queued up.

    Among equals those go first that hold blocks, then those that arrived first. An
    eviction policy that wants to know who waits is told.
    """

    __slots__ = ("_entries", "_eviction", "_heap", "_on_dequeued", "_on_queued")

    def __init__(self, eviction: EvictionPolicy) -> None:
        """Start empty."""
        self._entries: OrderedDict[Job, Entry] = OrderedDict()
        self._heap: list[Entry] = []
        self._eviction = eviction
        self._on_queued = find_override(eviction, "on_queued")
        self._on_dequeued = find_override(eviction, "on_dequeued")

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Job]:
        """Yield the jobs in the order in which they queued up, the preempted ones first."""
        return iter(self._entries)

    def __contains__(self, job: object) -> bool:
        """Say whether `job` waits."""
        return job in self._entries

    def push(self, job: Job, now: int, *, front: bool = False) -> None:
        """Put `job` in by its rank, anew if it is there; at the front of the order of entry."""
        entry = (job.rank, job.stage != PAUSED, job.serial, job)
        if self._on_queued is not None and job not in self._entries:
            try:
                self._on_queued(job.request, now, front=front)
            except Exception as error:
                raise policy_error(self._eviction, "on_queued", error) from error
        self._entries[job] = entry
        if front:
            self._entries.move_to_end(job, last=False)
        heap = self._heap
        heappush(heap, entry)
        if len(heap) > SLACK * (len(self._entries) + SLACK):
            heap[:] = self._entries.values()
            heapify(heap)

    def head(self) -> Job | None:
        """Return the first in rank."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[3]) is entry:
                return entry[3]
            heappop(heap)
        return None

    def remove(self, job: Job, now: int) -> None:
        """Take `job` out."""
        del self._entries[job]
        if self._on_dequeued is not None:
            try:
                self._on_dequeued(job.request, now)
            except Exception as error:
                raise policy_error(self._eviction, "on_dequeued", error) from error
