"""What schedulers are tested with: a server in miniature that checks their plans."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeAlias
from weakref import WeakSet

import attrs

from kvcore.policy import (
    Batch,
    DecodeSteps,
    Job,
    LatencyModel,
    Line,
    LoopState,
    Scheduler,
    StepPlan,
    overridden,
)
from kvcore.policy.job import DECODE, DONE, PAUSED, PREFILL, WAITING
from kvcore.request import Key, Request
from kvcore.units import PICOSECONDS

STEP = 10**7
"""Nanoseconds a step takes, whatever it computes."""

CHUNK = 16
"""Tokens that a step computes of each prompt that has a seat."""

Call: TypeAlias = tuple[str, int, int | str | None]
"""What a scheduler is told or asked: (method, ns, id of the request or None)."""


def watched(scheduler: Scheduler, jobs: WeakSet[Job] | None = None) -> list[Call]:
    """Return a list into which each call of `scheduler` goes from now on.

    Its class seems to override `queued`, `admitted` and `finished`, whether it does or not,
    and else what it does. The jobs go into `jobs`.
    """
    calls: list[Call] = []
    seen = WeakSet() if jobs is None else jobs
    cls = type(scheduler)

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(cls, name)

        def method(self: Scheduler, job: Job, now: int) -> Any:
            seen.add(job)
            calls.append((name, now, job.request.id))
            return original(self, job, now)

        return method

    def plan(self: Scheduler, state: LoopState) -> StepPlan:
        calls.append(("plan", state.now, None))
        return cls.plan(self, state)

    names = {name: getattr(cls, name) for name in ("name", "__module__", "__qualname__")}
    methods = {name: noting(name) for name in ("queued", "admitted", "finished", "priority")}
    if overridden(scheduler, "changes_at") is not None:
        methods["changes_at"] = noting("changes_at")
    if overridden(scheduler, "plan") is not None:
        methods["plan"] = plan
    scheduler.__class__ = type(cls.__name__, (cls,), names | methods)
    return calls


@attrs.define(slots=False, eq=False)
class Steady(LatencyModel):
    """Every step takes 10 ms, and a nanosecond for each token of a prompt."""

    name: ClassVar[str] = "steady"

    def pieces(self, batch: Batch) -> list[Line]:
        """Return one line."""
        return [((STEP + batch.prefill) * PICOSECONDS, *(0 for _ in batch.context))]


class ToyServer:
    """Serves requests as a scheduler plans, without a cache, a latency model or a fast path.

    Every step takes 10 ms, computes up to 16 tokens of each prompt that has a seat, and
    generates a token for each job whose prompt is done. A job takes room for its prompt and
    output when it is admitted, and keeps it while it is paused. If all who hold room are
    paused and nobody else fits, the last of them in order gives its room back. Prefixes that
    are computed stay cached for good.

    The scheduler is asked when something has happened, not at every step, and its answers are
    checked: AssertionError says which of them was wrong.

    Args:
        scheduler: a new one.
        seats: jobs that may run at once.
        room: tokens that all jobs may hold together.
    """

    def __init__(self, scheduler: Scheduler, seats: int = 3, room: int = 400) -> None:
        """Take the scheduler into use."""
        self._scheduler = scheduler
        self._asks = overridden(scheduler, "plan") is None
        self._seats, self._room = seats, room
        self._now = self._arrived = 0
        self._steps = DecodeSteps()
        self._changed = False
        self._waiting: OrderedDict[Job, None] = OrderedDict()
        self._running: dict[Job, None] = {}
        self._held: dict[Job, int] = {}
        self._due: dict[Job, int] = {}
        self._before: set[tuple[Job, Job]] = set()
        self._cached: set[Key] = set()
        scheduler.claim()
        scheduler.attach(self)

    def run(self, requests: Iterable[Request]) -> None:
        """Serve `requests`, in order of arrival, to the end."""
        coming = deque(requests)
        while coming or self._waiting or self._running:
            if not (self._waiting or self._running):
                self._now = max(self._now, coming[0].arrival)
            while coming and coming[0].arrival <= self._now:
                self._arrive(coming.popleft())
            for job in [job for job, due in self._due.items() if due <= self._now]:
                self._rank(job)
            while self._changed:
                self._changed = False
                self._plan()
            self._step()

    def probe(self, request: Request, now: int) -> int:
        """Return how many tokens of the prompt are cached, but for its last token."""
        del now
        hit = 0
        for key in request.keys[: (request.prompt - 1) // request.key_tokens]:
            if key not in self._cached:
                break
            hit += request.key_tokens
        return hit

    def prefill_ns(self, tokens: int, context: int) -> int:
        """Return the time of the steps it takes."""
        del context
        return -(-tokens // CHUNK) * STEP

    def decode_ns(self, tokens: int, context: int, sequences: int) -> int:
        """Return the time of a step for each token."""
        del context, sequences
        return tokens * STEP

    def _arrive(self, request: Request) -> None:
        self._arrived += 1
        arrival, target = request.arrival, request.prompt
        job = Job(request, self._arrived, arrival, self._steps, target, request.slo)
        self._queue(job)

    def _queue(self, job: Job, *, front: bool = False) -> None:
        self._waiting[job] = None
        if front:
            self._waiting.move_to_end(job, last=False)
        self._rank(job)
        self._scheduler.queued(job, self._now)

    def _rank(self, job: Job) -> None:
        """Ask for the priority of a waiting job, and when to ask again."""
        self._changed = True
        self._due.pop(job, None)
        if not self._asks:
            return
        job.rank = self._scheduler.priority(job, self._now)
        due = self._scheduler.changes_at(job, self._now)
        if due is not None:
            assert due > self._now, (
                f"changes_at({job!r}, {self._now}) is {due}: it must be later, or None"
            )
            self._due[job] = due

    def _plan(self) -> None:
        if self._asks:
            self._check_order()
        running = list(self._running)
        seats = self._seats - len(running)
        state = LoopState(self._now, self._waiting.keys(), running, seats, self._room, self)
        plan = self._scheduler.plan(state)
        for job in plan.pause:
            assert self._scheduler.preemptive, f"{job!r} was paused, and preemptive is false"
            assert job in self._running, f"{job!r} was paused, and has no seat"
            self._pause(job)
        for job in plan.admit:
            assert job in self._waiting, f"{job!r} was offered a seat, and does not wait"
            if len(self._running) == self._seats or self._need(job) > self._room:
                break
            self._seat(job)
        else:
            assert not self._waiting or len(self._running) == self._seats, (
                f"a seat is free, and was not offered to {list(self._waiting)}"
            )
        if not self._running and self._waiting:
            self._recompute()

    def _check_order(self) -> None:
        """Check that priorities order the jobs as they did before, but for better runners."""
        now, priority = self._now, self._scheduler.priority
        waiting = {job: priority(job, now) for job in self._waiting}
        queued = sorted(waiting, key=lambda job: (job.rank, job.serial))
        assert queued == sorted(waiting, key=lambda job: (waiting[job], job.serial)), (
            f"asked again at {now} ns, priorities give another order than when the jobs "
            f"queued up, {queued}, and changes_at() had not said so"
        )
        if self._scheduler.preemptive:
            running = {job: priority(job, now) for job in self._running}
            for job, other in self._before:
                if job in running and other in waiting:
                    assert running[job] <= waiting[other], (
                        f"{job!r} went before {other!r} until it had a seat for a while"
                    )
            self._before = {
                (job, other)
                for job, rank in running.items()
                for other, its in waiting.items()
                if rank <= its
            }

    def _need(self, job: Job) -> int:
        return 0 if job in self._held else job.request.prompt + job.request.output

    def _seat(self, job: Job) -> None:
        if job not in self._held:
            self._room -= self._need(job)
            self._held[job] = self._need(job)
            job.computed = self.probe(job.request, self._now)
            if job.admitted is None:
                job.admitted, job.hit = self._now, job.computed
        job.stage = PREFILL if job.prefill_left else DECODE
        if job.stage == DECODE:
            job.join(job.generated)
        del self._waiting[job]
        self._due.pop(job, None)
        self._running[job] = None
        self._scheduler.admitted(job, self._now)

    def _pause(self, job: Job) -> None:
        job.leave()
        job.stage = PAUSED
        job.pauses += 1
        del self._running[job]
        self._queue(job, front=True)
        self._changed = False  # by the plan that is being carried out

    def _recompute(self) -> None:
        """Take the room of the paused job that is last in order."""
        priority = self._scheduler.priority
        order = {job: (priority(job, self._now), job.serial) for job in self._held}
        assert order, f"nobody runs or holds room, and {list(self._waiting)} were not served"
        job = max(order, key=lambda job: order[job])
        self._room += self._held.pop(job)
        job.target, job.computed = job.request.prompt + job.generated, 0
        job.stage = WAITING
        job.recomputes += 1
        del self._waiting[job]
        self._queue(job, front=True)

    def _step(self) -> None:
        self._now += STEP
        self._steps.count += 1
        for job in list(self._running):
            if job.stage == PREFILL:
                job.computed = min(job.computed + CHUNK, job.target)
                if job.prefill_left:
                    continue
                self._cached.update(job.request.keys)
                job.stage = DECODE
                self._changed = True
                if job.request.output:
                    job.join(job.generated + 1)
                    job.first_token = job.first_token or self._now
            if not job.output_left:
                self._finish(job)

    def _finish(self, job: Job) -> None:
        job.leave()
        job.stage = DONE
        del self._running[job]
        self._room += self._held.pop(job)
        self._before = {pair for pair in self._before if job not in pair}
        self._changed = True
        self._scheduler.finished(job, self._now)
