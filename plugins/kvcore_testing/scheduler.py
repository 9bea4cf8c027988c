"""The conformance tests of schedulers."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from random import Random
from typing import Any, ClassVar, TypeAlias

import attrs
import pytest

from kvcore.cache import KVCache
from kvcore.plugins import find_override
from kvcore.plugins.base import has_no_order
from kvcore.request import SLO, Key, Request
from kvcore.serving import (
    Batching,
    DecodeSteps,
    Job,
    LatencyModel,
    LinearPiece,
    LoopState,
    Scheduler,
    StepPlan,
    StepWork,
    simulate,
)
from kvcore.serving.job import DECODE, DONE, PAUSED, PREFILL, WAITING
from kvcore.units import NS_PER_S, PS_PER_NS
from kvcore_testing.harness import Traffic, living, random_requests
from kvcore_testing.plugin import PluginTests, disguise, other_hashes, seeds, unshared

STEP = 9_876_543
"""Nanoseconds a step takes, whatever it computes: some 10 ms, and no multiple of a µs or ms, so
that an order which is turned round with the clock is asked for before and after."""

CHUNK = 16
"""Tokens that a step computes of each prompt that is being prefilled."""

Call: TypeAlias = tuple[str, int, int | str | None]
"""A call of a scheduler: (method, time in ns, id of the request or None)."""


def watched(scheduler: Scheduler) -> list[Call]:
    """Return a list to which every later call of `scheduler` is appended.

    The scheduler gets a class that overrides `queued`, `admitted`, `finished` and `priority`;
    `changes_at` and `plan` only if its own class overrides them.
    """
    calls: list[Call] = []
    cls = type(scheduler)

    def recorded(name: str) -> Callable[..., Any]:
        original = getattr(cls, name)

        def method(self: Scheduler, job: Job, now: int) -> Any:
            calls.append((name, now, job.request.id))
            before = _values(job)
            answer = original(self, job, now)
            _check_unwritten(name, job, before)
            return answer

        return method

    def plan(self: Scheduler, state: LoopState) -> StepPlan:
        calls.append(("plan", state.now, None))
        jobs = [*state.waiting, *state.running]
        before = [_values(job) for job in jobs]
        answer = cls.plan(self, state)
        for job, values in zip(jobs, before, strict=True):
            _check_unwritten("plan", job, values)
        return answer

    methods = {name: recorded(name) for name in ("queued", "admitted", "finished", "priority")}
    if find_override(scheduler, "changes_at") is not None:
        methods["changes_at"] = recorded("changes_at")
    if find_override(scheduler, "plan") is not None:
        methods["plan"] = plan
    disguise(scheduler, scheduler, **methods)
    return calls


_FIELDS = tuple(name for name in Job.__slots__ if name != "data")
_values = attrgetter(*_FIELDS)


def _check_unwritten(method: str, job: Job, before: tuple[Any, ...]) -> None:
    """Check that a call of a scheduler has written to no field of `job` except `data`."""
    if (after := _values(job)) != before:
        fields = zip(_FIELDS, before, after, strict=True)
        changed = ", ".join(name for name, old, new in fields if old != new)
        pytest.fail(
            f"{method}() changed {changed} of {job!r}: a scheduler writes to `data` alone"
        )


@attrs.define(slots=False, eq=False)
class Steady(LatencyModel):
    """Every step takes some 10 ms, and a nanosecond for each token of a prompt."""

    name: ClassVar[str] = "steady"

    def pieces(self, work: StepWork) -> list[LinearPiece]:
        """Return one linear piece with slope 0."""
        return [((STEP + work.prefill) * PS_PER_NS, *(0 for _ in work.context))]


class ToyServer:
    """Serves requests by the plans of a scheduler, and checks each of its answers.

    It has no block pool, no latency model and no event jumps. Every step takes `STEP`, computes
    up to 16 tokens of the prompt of each running job, and generates a token for each job with
    a computed prompt. A job allocates a slot for each token of its prompt and output when it
    is admitted, and keeps them while it is paused. If all jobs with slots are paused and no
    other job fits, the last of them in scheduler order frees its slots. Computed prefixes
    stay cached.

    The scheduler is called at events, not at every step. A wrong answer is an AssertionError
    that quotes it.

    Args:
        scheduler: a new scheduler.
        max_seqs: maximum number of running jobs.
        slots: number of tokens for which there is room.
    """

    def __init__(self, scheduler: Scheduler, max_seqs: int = 3, slots: int = 400) -> None:
        """Attach the scheduler; no request has arrived."""
        self._scheduler = scheduler
        self._asks = find_override(scheduler, "plan") is None
        self._max_seqs, self._free = max_seqs, slots
        self._now = self._arrived = 0
        self._steps = DecodeSteps()
        self._changed = False
        self._waiting: OrderedDict[Job, None] = OrderedDict()
        self._running: dict[Job, None] = {}
        self._held: dict[Job, int] = {}
        self._due: dict[Job, int] = {}
        self._before: set[tuple[Job, Job]] = set()
        self._cached: set[Key] = set()
        scheduler.bind()
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
        """Return the number of cached tokens of the prompt, without its last token."""
        hit = 0
        for key in request.keys[: (request.prompt_tokens - 1) // request.key_tokens]:
            if key not in self._cached:
                break
            hit += request.key_tokens
        return hit

    def prefill_ns(self, tokens: int, context: int) -> int:
        """Return the time (ns) of the steps that compute `tokens` tokens of a prompt."""
        return -(-tokens // CHUNK) * STEP

    def decode_ns(self, tokens: int, context: int, sequences: int) -> int:
        """Return the time (ns) of a step for each token."""
        return tokens * STEP

    def _arrive(self, request: Request) -> None:
        self._arrived += 1
        arrival, target = request.arrival, request.prompt_tokens
        job = Job(request, self._arrived, arrival, self._steps, target, request.slo)
        self._queue(job)

    def _queue(self, job: Job, *, front: bool = False) -> None:
        self._waiting[job] = None
        if front:
            self._waiting.move_to_end(job, last=False)
        self._rank(job)
        self._scheduler.queued(job, self._now)

    def _rank(self, job: Job) -> None:
        """Call `priority` and `changes_at` for a waiting job; store and check the answers."""
        self._changed = True
        self._due.pop(job, None)
        if not self._asks:
            return
        rank = job.rank = self._scheduler.priority(job, self._now)
        assert rank is not None, f"priority({job!r}, {self._now}) is None: is `return` missing?"
        assert not has_no_order(rank), (
            f"priority({job!r}, {self._now}) is {rank}, which has no order"
        )
        due = self._scheduler.changes_at(job, self._now)
        if due is not None:
            assert type(due) is int, f"changes_at({job!r}, {self._now}) is {due!r}: no whole ns"
            assert due > self._now, (
                f"changes_at({job!r}, {self._now}) is {due}: it must be later, or None"
            )
            self._due[job] = due

    def _plan(self) -> None:
        if self._asks:
            self._check_order()
        running = list(self._running)
        free_slots = self._max_seqs - len(running)
        state = LoopState(
            self._now, self._waiting.keys(), running, free_slots, self._free, self
        )
        plan = self._scheduler.plan(state)
        for job in plan.pause:
            assert self._scheduler.preemptive, f"{job!r} was paused, and preemptive is false"
            assert job in self._running, f"{job!r} was paused, and is not running"
            self._pause(job)
        for job in plan.admit:
            assert job in self._waiting, f"{job!r} was admitted, and does not wait"
            if len(self._running) == self._max_seqs or self._need(job) > self._free:
                break
            self._admit(job)
        else:
            assert not self._waiting or len(self._running) == self._max_seqs, (
                f"a slot is free, and was not offered to {list(self._waiting)}"
            )
        if not self._running and self._waiting:
            self._recompute()

    def _check_order(self) -> None:
        """Check that waiting jobs keep their order, and running ones stay ahead."""
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
                        f"{job!r} went before {other!r} until it had run for a while"
                    )
            self._before = {
                (job, other)
                for job, rank in running.items()
                for other, its in waiting.items()
                if rank <= its
            }

    def _need(self, job: Job) -> int:
        return 0 if job in self._held else job.request.prompt_tokens + job.request.output_tokens

    def _admit(self, job: Job) -> None:
        if job not in self._held:
            self._free -= self._need(job)
            self._held[job] = self._need(job)
            job.computed = self.probe(job.request, self._now)
            if job.admitted is None:
                job.admitted, job.hit = self._now, job.computed
        job.stage = PREFILL if job.prefill_left else DECODE
        if job.stage == DECODE:
            job.joined = self._steps.count
        del self._waiting[job]
        self._due.pop(job, None)
        self._running[job] = None
        self._scheduler.admitted(job, self._now)

    def _pause(self, job: Job) -> None:
        job.generated_before, job.joined = job.generated, None
        job.stage = PAUSED
        job.pauses += 1
        del self._running[job]
        self._queue(job, front=True)
        self._changed = False  # a pause by this plan is no reason for another

    def _recompute(self) -> None:
        """Free the blocks of the paused job that is last in scheduler order."""
        priority = self._scheduler.priority
        order = {job: (priority(job, self._now), job.serial) for job in self._held}
        assert order, f"no job runs or holds slots, and {list(self._waiting)} were not served"
        job = max(order, key=lambda job: order[job])
        self._free += self._held.pop(job)
        job.target, job.computed = job.request.prompt_tokens + job.generated, 0
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
                if job.request.output_tokens:
                    job.generated_before += 1
                    job.joined = self._steps.count
                    job.first_token = job.first_token or self._now
            if not job.output_left:
                self._finish(job)

    def _finish(self, job: Job) -> None:
        job.generated_before, job.joined = job.generated, None
        job.stage = DONE
        del self._running[job]
        self._free += self._held.pop(job)
        self._before = {pair for pair in self._before if job not in pair}
        self._changed = True
        self._scheduler.finished(job, self._now)


_KEY, _MAX_SEQS, _AMPLE, _LONG = 4, 3, 10**5, "long"
_OTHERS, _JOBS = 7, 12
_servers = pytest.mark.parametrize("server", ["toy", "loop"])


class SchedulerTests(PluginTests[Scheduler]):
    """Conformance tests of a scheduler; a derived `Test...` class makes the scheduler.

    The attribute `scheduler` is what `make` calls:

        class TestMine(SchedulerTests):
            scheduler = Mine

    The scheduler serves random requests in a toy server, which checks each of its answers,
    and in the serving loop. Steps take some 10 ms in both.

    Attributes:
        starves: whether a job may wait as long as others keep arriving. If False, a long job
            of low priority must end while shorter ones still arrive.
        knows_lengths: whether it may go by the `output_tokens` of requests, which no server
            knows, also where there are predictions.
    """

    base = Scheduler
    scheduler: ClassVar[Callable[[], Scheduler]]
    starves: ClassVar[bool] = False
    knows_lengths: ClassVar[bool] = False

    seed = seeds(4)

    @_servers
    def test_serves_every_request_once(self, seed: int, server: str) -> None:
        """With too little memory for all running jobs, every request ends exactly once."""
        requests = pressing(seed)
        calls = self.serve(server, requests, tokens=64)
        ended = Counter(job for method, _, job in calls if method == "finished")
        assert ended == Counter(request.id for request in requests)

    @_servers
    def test_runs_no_more_jobs_than_it_may(self, seed: int, server: str) -> None:
        """At no time do more jobs run than `max_seqs`, and no job is admitted twice at once."""
        running: set[object] = set()
        for method, now, job in self.serve(server, pressing(seed), tokens=64):
            if method == "admitted":
                assert job not in running, f"{now}: request {job} runs already"
                running.add(job)
                assert len(running) <= _MAX_SEQS, f"{now}: {running}, not {_MAX_SEQS}"
            elif method in {"queued", "finished"}:
                running.discard(job)

    @_servers
    def test_leaves_no_slot_empty(self, seed: int, server: str) -> None:
        """With ample memory, no job waits for more than a step while a slot is free."""
        running: set[object] = set()
        waiting: set[object] = set()
        since = 0
        for method, now, job in self.serve(server, pressing(seed)):
            if method not in {"queued", "admitted", "finished"}:
                continue
            idle = len(running) < _MAX_SEQS and waiting
            assert not idle or now - since <= STEP + _AMPLE, (
                f"from {since} to {now} {waiting} waited while only {running} ran"
            )
            since = now
            running.discard(job)
            waiting.discard(job)
            if method != "finished":
                (waiting if method == "queued" else running).add(job)

    @_servers
    def test_decisions_are_repeatable(self, seed: int, server: str) -> None:
        """Two new schedulers make the same decisions: by no address, chance or `hash`.

        Nor by what another scheduler has served in between.
        """
        requests, scheduler = pressing(seed), self.make()
        with unshared(scheduler):
            once = self.serve(server, requests, tokens=64, scheduler=scheduler)
        self.serve(server, pressing(seed + 1000)[:_OTHERS], tokens=64)
        with other_hashes():
            again = self.serve(server, requests, tokens=64)
        assert once == again, "run again, after another scheduler, it decided otherwise"

    def test_does_not_know_how_long_outputs_get(self, seed: int) -> None:
        """Of jobs that wait from the start, other ones go first for no other outputs alone.

        All have predictions, unless `knows_lengths` is True.
        """
        if self.knows_lengths:
            pytest.skip("declares that it knows the lengths of outputs: knows_lengths = True")
        dice, orders = Random(seed), []  # noqa: S311 - nothing secret
        predicted = [dice.choice((1, 10, 30)) for _ in range(_JOBS)]
        for outputs in (range(1, _JOBS + 1), range(_JOBS, 0, -1)):
            requests = [
                _request(name, output_tokens=output, predicted_output_tokens=expected)
                for name, (output, expected) in enumerate(zip(outputs, predicted, strict=True))
            ]
            orders.append([call for call in self.serve("toy", requests) if not call[1]])
        assert orders[0] == orders[1], (
            "jobs with other output_tokens, and equal predictions, were served in another "
            "order: go by request.predicted_output_tokens"
        )

    def test_is_called_the_same_with_event_jumps(self, seed: int) -> None:
        """With and without event jumps, the loop makes the same calls of the scheduler."""
        requests = pressing(seed)
        at_once = self.serve("loop", requests, tokens=64)
        assert at_once == self.serve("loop", requests, tokens=64, jumps=False), (
            "with event jumps, it was called otherwise than step by step"
        )

    @pytest.mark.parametrize("jumps", [True, False])
    def test_is_asked_only_at_events(self, jumps: bool) -> None:  # noqa: FBT001
        """The number of calls does not depend on the number of generated tokens."""
        calls = {
            tokens: self.serve(
                "loop", [_request(n, output_tokens=tokens) for n in range(3)], jumps=jumps
            )
            for tokens in (30, 3000)
        }
        short, long = ([(call[0], call[2]) for call in these] for these in calls.values())
        assert short == long, "a hundred times as many tokens led to other calls"

    @_servers
    def test_starves_no_job(self, server: str) -> None:
        """A long job of low priority ends while shorter jobs overload the server."""
        if self.starves:
            pytest.skip("declares that jobs may starve: starves = True")
        requests = [
            _request(n, 3 * n * STEP, output_tokens=10 + n % 2, priority=5) for n in range(600)
        ]
        arrival = requests[20].arrival
        long = _request(_LONG, arrival, prompt=40 * _KEY, output_tokens=40, tenant="b")
        requests.insert(20, long)
        calls = self.serve(server, requests)
        (end,) = [now for method, now, job in calls if (method, job) == ("finished", _LONG)]
        arrived, needed, ended = (
            f"{time / NS_PER_S:.3g} s" for time in (arrival, 50 * STEP, end - arrival)
        )
        assert end < requests[300].arrival, (
            f"it starved: a long job came at {arrived}, needed {needed} alone, and ended "
            f"{ended} later, as shorter ones kept coming; let jobs that wait go first in the "
            "end, or, if this is meant, say so in the test class: starves = True"
        )

    @_servers
    def test_forgets_finished_jobs(self, server: str) -> None:
        """When all jobs have finished, the scheduler refers to none of them."""
        scheduler = self.make()
        requests = pressing(0)
        self.serve(server, requests, tokens=64, scheduler=scheduler)
        mine = {id(request) for request in requests}
        jobs = [job for job in living(Job) if id(job.request) in mine]
        assert not jobs, f"it still refers to {sorted(map(repr, jobs))}"

    def serve(
        self,
        server: str,
        requests: Sequence[Request],
        *,
        tokens: int = _AMPLE,
        jumps: bool = True,
        scheduler: Scheduler | None = None,
    ) -> list[Call]:
        """Serve `requests` with 3 running jobs at most; return the calls of the scheduler.

        Args:
            server: `toy` or `loop`.
            requests: the requests in order of arrival.
            tokens: number of tokens, of prompts and outputs, for which there is memory.
            jumps: whether the loop may compute many decode steps at once.
            scheduler: None for a new one.
        """
        scheduler = scheduler or self.make()
        reason = scheduler.unavailable()
        if reason is not None:
            pytest.skip(f"cannot work here: {reason}")
        calls = watched(scheduler)
        if server == "toy":
            ToyServer(scheduler, _MAX_SEQS, tokens).run(requests)
            return calls
        cache = KVCache(tokens // _KEY, _KEY, accounting="tokens", key_tokens=_KEY)
        simulate(
            requests,
            cache=cache,
            scheduler=scheduler,
            latency=Steady(),
            batching=Batching(max_seqs=_MAX_SEQS),
            jumps=jumps,
        )
        cache.check_integrity()
        assert not cache.sequences, f"{cache.sequences} were never closed"
        return calls


def _request(
    name: int | str, arrival: int = 0, *, prompt: int = 4 * _KEY, **fields: Any
) -> Request:
    keys = [f"{name}/{index}" for index in range(prompt // _KEY)]
    return Request(
        id=name, arrival=arrival, prompt_tokens=prompt, keys=keys, key_tokens=_KEY, **fields
    )


def pressing(seed: int, count: int = 60) -> list[Request]:
    """Return requests of all kinds, which arrive faster than three at a time are served."""
    random = Random(seed)  # noqa: S311 - nothing secret
    traffic = Traffic(key_tokens=_KEY, longest_wait=2)
    return [
        attrs.evolve(
            request,
            arrival=request.arrival * STEP // 2,
            output_tokens=random.choice((0, 1, 3, 10, 20)),
            priority=random.randint(-1, 2),
            predicted_output_tokens=random.choice((None, None, 1, 10, 30)),
            slo=random.choice(_SLOS),
        )
        for request in random_requests(seed, count, traffic)
    ]


_SLOS = (
    None,
    SLO(deadline_ns=10 * STEP),
    SLO(deadline_ns=100 * STEP),
    SLO(ttft_ns=20 * STEP),
    SLO(ttft_ns=5 * STEP, tpot_ns=2 * STEP),
    SLO(ttft_ns=5 * STEP, deadline_ns=50 * STEP),
)
