"""Schedulers that fail, let nobody in, or go round in circles: the error says which and how."""

from typing import ClassVar

import attrs
import pytest
from helpers.schedulers import Planning
from helpers.serving import Even, ask, serve

from kvcore import InputError, PolicyError, Scheduler
from kvcore.serving import StepPlan
from kvcore_plugins.scheduler import FCFS

REQUESTS = [ask(number, number, output=9) for number in range(6)]


@attrs.define(slots=False, eq=False)
class Perverse(FCFS):
    """Whoever queued up last goes before whoever runs."""

    name: ClassVar[str] = "perverse"

    preemptive: bool = True
    queued_up: int = 0

    def priority(self, job, now):
        """Return how many queued up, counted down; of one that has a seat, more."""
        if job.stage in {"prefill", "decode"}:
            return 1
        self.queued_up -= 1
        return self.queued_up


@attrs.define(slots=False, eq=False)
class Closed(FCFS):
    """Admits nobody."""

    name: ClassVar[str] = "closed"

    def plan(self, state):
        """Return an empty plan."""
        return StepPlan()


def test_livelock_by_pauses():
    """Two jobs that take each other's seat forever: the run stops and says what goes on."""
    with pytest.raises(PolicyError) as caught:
        serve(REQUESTS, scheduler=Perverse(), max_seqs=1)
    text = str(caught.value)
    assert text.startswith("livelock at ")
    assert "preemptions without a new token, the last of request" in text
    assert "1000 blocks" in text
    assert "Scheduler 'perverse' orders them differently every time" in text
    assert "a running job's priority may only improve" in text


@pytest.mark.parametrize("scheduler", [FCFS, Planning])
def test_much_preemption_is_no_livelock(scheduler):
    """As long as tokens come, a run may preempt as often as it likes."""
    requests = [ask(number, prompt=3, output=80) for number in range(40)]
    run = serve(requests, blocks=21, scheduler=scheduler())
    assert run.sum("recomputes") > 150


def test_a_scheduler_that_admits_nobody():
    """Nothing runs, nothing will: that is said, with who waits."""
    message = "'closed' leaves 6 requests waiting while nothing runs: the first is <Job 1: req"
    with pytest.raises(PolicyError, match=message):
        serve(REQUESTS, scheduler=Closed())


def test_a_scheduler_that_admits_later():
    """As long as something runs or arrives, a seat may stay empty."""

    class Reluctant(FCFS):
        """Admits one when three wait."""

        def plan(self, state):
            """Return a plan for the crowd."""
            return StepPlan(list(state.waiting) if len(state.waiting) > 2 else ())

    run = serve([ask(number, 100 * number) for number in range(6)], scheduler=Reluctant())
    assert [row["admitted"] for row in run.rows.values()] == [200, 200, 200, 500, 500, 500]


def _failing(method):
    def fails(*_):
        msg = "no luck"
        raise RuntimeError(msg)

    return type("Failing", (FCFS,), {"name": "failing", method: fails})


@pytest.mark.parametrize(
    "method", ["priority", "plan", "queued", "admitted", "finished", "changes_at"]
)
def test_a_scheduler_that_raises(method):
    """The error names the plugin, the method, and what it raised."""
    message = rf"'failing' .* raised RuntimeError in {method}\(\): no luck"
    with pytest.raises(PolicyError, match=message) as caught:
        serve(REQUESTS, scheduler=_failing(method)())
    assert isinstance(caught.value.__cause__, RuntimeError)


def _answering(answer):
    return type("Answering", (Even,), {"name": "answering", "pieces": lambda *_: answer()})()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: 1 // 0, r"raised ZeroDivisionError in pieces\(\): .* division"),
        (list, r"raised ValueError in pieces\(\)"),
        (lambda: [(1e4, 0)], r"'answering': StepWork\(.*\) takes 10000\.0 ps; give whole pico"),
        (lambda: [(10_000, 0.5)], r"'answering': StepWork\(.*\) takes 10000\.0 ps"),
        (lambda: [(10_000, -5)], r"the lines of 1 decoding sequences are \[\(10000, -5\)\]"),
        (lambda: [(-10_000, 5)], r"the lines of 1 decoding sequences are \[\(-10000, 5\)\]"),
    ],
)
def test_a_latency_model_that_gives_no_time(answer, message):
    """The error names the plugin, and what it answered or raised."""
    with pytest.raises(PolicyError, match=message):
        serve(REQUESTS, latency=_answering(answer), max_seqs=1)


def test_a_plan_that_raises_midway():
    """A plan may be lazy; what it raises when it is asked for the next job counts as well."""

    class Midway(FCFS):
        """Yields one job and breaks."""

        name: ClassVar[str] = "midway"

        def plan(self, state):
            """Return a generator."""

            def offers():
                yield next(iter(state.waiting))
                msg = "no luck"
                raise RuntimeError(msg)

            return StepPlan(offers())

    with pytest.raises(PolicyError, match=r"'midway' .* raised RuntimeError in plan\(\): no"):
        serve(REQUESTS, scheduler=Midway())


@pytest.mark.parametrize("plan", [None, [], StepPlan(admit=5), StepPlan(pause=5)])
def test_a_plan_that_is_none(plan):
    """What is no plan, or holds no jobs, is the plugin's fault."""

    class Odd(FCFS):
        """Answers with something else."""

        name: ClassVar[str] = "odd"

        def plan(self, state):
            """Return it."""
            return plan

    with pytest.raises(PolicyError, match=r"scheduler plugin 'odd'.* plan\(\)"):
        serve(REQUESTS, scheduler=Odd())


def test_a_plan_that_admits_who_has_a_seat():
    """A job cannot have two seats."""

    class Twice(FCFS):
        """Offers seats to all there are."""

        name: ClassVar[str] = "twice"

        def plan(self, state):
            """Return them."""
            return StepPlan([*state.running, *state.waiting])

    message = r"'twice': plan\(\) admitted <Job 1: request 0, decode>, which is not waiting"
    with pytest.raises(PolicyError, match=message):
        serve(REQUESTS, scheduler=Twice())


def test_a_plan_that_pauses_who_has_no_seat():
    """Only who runs can be paused."""

    class Wrong(FCFS):
        """Pauses those that wait."""

        name: ClassVar[str] = "wrong"

        def plan(self, state):
            """Return them."""
            return StepPlan((), list(state.waiting))

    with pytest.raises(PolicyError, match=r"plan\(\) paused <Job 1: .*>, which is not running"):
        serve(REQUESTS, scheduler=Wrong())


def test_a_scheduler_serves_once():
    """Schedulers keep counts: a second run needs a new one."""
    scheduler = FCFS()
    serve(REQUESTS, scheduler=scheduler)
    with pytest.raises(InputError, match="fcfs"):
        serve(REQUESTS, scheduler=scheduler)


def test_priority_is_all_a_scheduler_needs():
    """The easy tier: one method."""

    @attrs.define(slots=False, eq=False)
    class Shortest(Scheduler):
        """Shortest output first."""

        name: ClassVar[str] = "shortest"

        def priority(self, job, now):
            """Return the output."""
            return job.request.output_tokens

    requests = [ask(number, output=9 - number) for number in range(5)]
    assert list(serve(requests, scheduler=Shortest(), max_seqs=1).rows) == [4, 3, 2, 1, 0]


@attrs.define(slots=False, eq=False)
class Undecided(FCFS):
    """Gives every second job no priority."""

    name: ClassVar[str] = "undecided"

    def priority(self, job, now):
        """Return what cannot be compared."""
        return None if job.serial % 2 else job.serial


def test_priorities_that_have_no_order():
    """Priorities that cannot be compared are the scheduler's fault, and the error says so."""
    with pytest.raises(PolicyError, match=r"'undecided' .* raised TypeError in priority\(\)"):
        serve([ask(number, 0, output=9) for number in range(6)], scheduler=Undecided())
