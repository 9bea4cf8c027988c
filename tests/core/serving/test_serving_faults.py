"""Schedulers and latency models that fail or cause livelock: the error names the plugin."""

import re
import sys
from functools import partial
from math import inf
from typing import ClassVar

import attrs
import pytest
from helpers.schedulers import Planning
from helpers.serving import BLOCK, Even, ask, serve

from kvcore import InputError, LatencyModel, PolicyError, Scheduler
from kvcore.cache import KVCache
from kvcore.serving import Batching, StepPlan, simulate
from kvcore_plugins.drafter import Acceptance
from kvcore_plugins.scheduler import FCFS, SRPT

REQUESTS = [ask(index, index, output=9) for index in range(6)]


@attrs.define(slots=False, eq=False)
class Perverse(FCFS):
    """A preemptive scheduler that ranks the job queued last above running jobs."""

    name: ClassVar[str] = "perverse"

    preemptive: bool = True
    queued_up: int = 0

    def priority(self, job, now):
        """Return a number that falls with each job queued, and 1 for running jobs."""
        if job.stage in {"prefill", "decode"}:
            return 1
        self.queued_up -= 1
        return self.queued_up


@attrs.define(slots=False, eq=False)
class Closed(FCFS):
    """A scheduler that admits no job."""

    name: ClassVar[str] = "closed"

    def plan(self, state):
        """Return an empty plan."""
        return StepPlan()


class Bound(SRPT):
    """A scheduler that decides in `attach` whether it preempts."""

    def attach(self, server):
        """Preempt where the server has a limit."""
        super().attach(server)
        self.preemptive = True


def test_a_scheduler_is_read_as_attach_leaves_it():
    """A scheduler that becomes preemptive when it is attached pauses jobs."""
    requests = [ask(0, output=50), ask(1, 1, output=2)]
    run = serve(requests, scheduler=Bound(preemptive=False), max_seqs=1)
    assert run.sum("pauses") == 1


@pytest.mark.parametrize(
    ("prompt", "earlier", "limits", "time"),
    [
        (4, [], {}, 10),
        (400, [], {"max_tokens": 4}, 1510),
        (400, [ask(9, 0, 4, 9)], {"max_tokens": 4}, 2510),
    ],
    ids=["in a plan", "before any token", "after others have ended"],
)
def test_livelock_by_pauses(prompt, earlier, limits, time):
    """Jobs that pause each other forever raise PolicyError that explains the livelock.

    They do in one plan, or in one step after the other, each of which computes a chunk. Those
    that have generated all their tokens before count for nothing.
    """
    start = 1000 * len(earlier)
    requests = [*earlier, *(ask(index, start + index, prompt, 9) for index in range(6))]
    with pytest.raises(PolicyError) as caught:
        serve(requests, scheduler=Perverse(), max_seqs=1, **limits)
    text = str(caught.value)
    assert text.startswith(f"livelock at {time} ns: ")
    # Above 100, and 10 for each of the five that run or wait.
    assert "151 preemptions without a new token, the last of request" in text
    assert "1000 blocks" in text
    assert "Scheduler 'perverse' orders them differently every time" in text
    assert "a running job's priority may only improve" in text


@pytest.mark.parametrize("scheduler", [FCFS, Planning])
def test_much_preemption_is_no_livelock(scheduler):
    """A run with many preemptions is no livelock as long as tokens are generated."""
    requests = [ask(index, prompt=3, output=80) for index in range(40)]
    run = serve(requests, blocks=21, scheduler=scheduler())
    assert run.sum("recomputes") > 150


def test_a_scheduler_that_admits_no_job_is_named():
    """If no job runs and none is admitted, the error names the scheduler and a waiting job."""
    message = "'closed' leaves 6 requests waiting while nothing runs: the first is <Job 1: req"
    with pytest.raises(PolicyError, match=message):
        serve(REQUESTS, scheduler=Closed())


def _failing(method):
    def fails(*_):
        msg = "no luck"
        raise RuntimeError(msg)

    return type("Failing", (FCFS,), {"name": "failing", method: fails})


@pytest.mark.parametrize(
    "method", ["attach", "priority", "plan", "queued", "admitted", "finished", "changes_at"]
)
def test_a_scheduler_that_raises_is_named(method):
    """The error names the plugin, the method and the exception."""
    message = rf"'failing' .* raised RuntimeError in {method}\(\): no luck"
    with pytest.raises(PolicyError, match=message) as caught:
        serve(REQUESTS, scheduler=_failing(method)())
    assert isinstance(caught.value.__cause__, RuntimeError)


def _answering(answer, *, jumps=True):
    names = {"name": "answering", "jumps": jumps, "pieces": lambda *_: answer()}
    return type("Answering", (Even,), names)()


NEGATIVE = r"the lines of 1 decoding sequences are \[\(9, -5\)\]"
"""Error of a model whose times fall with the context; without jumps it names the step."""


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: 1 // 0, r"raised ZeroDivisionError in pieces\(\): .* division"),
        (list, r"raised ValueError in pieces\(\)"),
        (lambda: [(1e4, 0)], r"'answering': StepWork\(.*\) takes 10000\.0 ps; give whole pico"),
        (lambda: [(10_000, 0.5)], r"'answering': StepWork\(.*\) takes 10000\.0 ps"),
        (lambda: [(9, -5)], NEGATIVE),
        (lambda: [(-10_000, 5)], r"'answering': StepWork\(.*\) takes -10000 ps; give whole"),
        (lambda: [(float("nan"), 0)], r"'answering': StepWork\(.*\) takes nan ps"),
        (lambda: [(5, 0), (float("nan"), 0)], r"'answering': StepWork\(.*\) takes nan ps"),
        (lambda: [(5, 0), (5,)], r"'answering' .* raised ValueError in pieces\(\)"),
        (lambda: [(None, 0)], r"'answering' .* raised TypeError in pieces\(\)"),
        (lambda: [(10**40, 0)], r"a step takes 1[.0]*e[+]28 s by latency model 'answering'"),
        (sys.exit, r"'answering' .* raised SystemExit in pieces\(\)"),
    ],
)
@pytest.mark.parametrize("jumps", [True, False])
def test_a_latency_model_without_a_valid_time_is_named(answer, message, jumps):
    """The error for a wrong time names the latency model and its answer or exception."""
    if not jumps:
        message = message.replace(NEGATIVE, r"StepWork\(.*\) takes -16 ps; give whole pico")
    with pytest.raises((PolicyError, InputError), match=message):
        serve(REQUESTS, latency=_answering(answer, jumps=jumps), max_seqs=1)


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (None, r"'timed': seconds\(.*\) returned None \(is a `return` missing\?\); give a fin"),
        ("1 ms", r"'timed': seconds\(.*\) returned '1 ms'; give a finite number of seconds"),
        (-1.0, r"'timed': seconds\(.*\) returned -1.0; give a finite number of seconds"),
        (inf, r"'timed': seconds\(.*\) returned inf; give a finite number of seconds"),
        (1e300, r"'timed': seconds\(.*\) returned 1e\+300; give a finite number of seconds"),
    ],
)
def test_a_wrong_value_of_seconds_is_refused(seconds, message):
    """The error for a wrong `seconds` has the value and hints at a missing `return`."""

    class Timed(LatencyModel):
        """A latency model that returns a wrong time."""

        name: ClassVar[str] = "timed"

        def seconds(self, work):
            """Return the wrong time."""
            return seconds

    with pytest.raises(PolicyError, match=message):
        serve(REQUESTS, latency=Timed(), max_seqs=1)


def test_a_step_may_take_no_time():
    """A latency model may return 0 seconds: a request then ends when it arrives."""

    class Instant(LatencyModel):
        """A latency model of steps that take no time."""

        name: ClassVar[str] = "instant"

        def seconds(self, work):
            """Return no time."""
            return 0.0 * work.prefill

    assert serve([ask("a", 5)], latency=Instant()).rows["a"]["finish"] == 5


@pytest.mark.parametrize("jumps", [True, False])
def test_a_step_that_ends_beyond_the_clock_is_refused(jumps):
    """A step that ends after 2^63 ns raises InputError that names the latency model."""
    with pytest.raises(InputError, match=r"s by latency model 'answering', to .* 2\^63 ns"):
        serve(REQUESTS, latency=_answering(lambda: [(0, 10**40)], jumps=jumps), max_seqs=1)


@pytest.mark.parametrize(("at", "took_ps"), [(0, 2**63 - 1), (2**63 - 11, 10_000)])
def test_the_last_time_of_a_step_is_before_the_limit_of_the_clock(at, took_ps):
    """A step may take 2^63 - 1 ps, and end at 2^63 - 1 ns; one more of either is refused."""
    last = serve([ask("a", at, 4, 1)], latency=_answering(lambda: [(took_ps, 0)]))
    assert last.rows["a"]["finish"] == at + took_ps // 1000
    longer, later = (took_ps + 1, at) if at == 0 else (took_ps, at + 1)
    with pytest.raises(InputError, match=r"a step ends within 2\^63 ps \(106 days\)"):
        serve([ask("a", later, 4, 1)], latency=_answering(lambda: [(longer, 0)]))


def test_an_exception_in_the_generator_of_a_plan_names_plan():
    """An exception in a plan's generator raises PolicyError that names `plan`."""

    class Midway(FCFS):
        """A scheduler whose plan yields one job and raises."""

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


@pytest.mark.parametrize(
    "plan",
    [
        *(None, [], StepPlan(admit=5), StepPlan(pause=5)),
        *(StepPlan(admit="job"), StepPlan(pause="job"), StepPlan(admit=[[]])),
        *(StepPlan(admit=[None]), StepPlan(pause=[None])),
    ],
)
def test_a_wrong_plan_is_refused(plan):
    """A plan that is no StepPlan, or has no jobs in it, raises PolicyError."""

    class Odd(FCFS):
        """A scheduler that returns a wrong plan."""

        name: ClassVar[str] = "odd"

        def plan(self, state):
            """Return the wrong plan."""
            return plan

    with pytest.raises(PolicyError, match=r"scheduler plugin 'odd'.* plan\(\)"):
        serve(REQUESTS, scheduler=Odd())


def test_a_plan_that_admits_a_running_job_is_refused():
    """A plan that admits a running job raises PolicyError that names the job."""

    class Twice(FCFS):
        """A scheduler that admits running jobs."""

        name: ClassVar[str] = "twice"

        def plan(self, state):
            """Return a plan that admits all jobs."""
            return StepPlan([*state.running, *state.waiting])

    message = r"'twice': plan\(\) admitted <Job 1: request 0, decode>, which is not waiting"
    with pytest.raises(PolicyError, match=message):
        serve(REQUESTS, scheduler=Twice())


def test_a_plan_that_pauses_a_waiting_job_is_refused():
    """A plan that pauses a waiting job raises PolicyError that names the job."""

    class Wrong(FCFS):
        """A scheduler that pauses waiting jobs."""

        name: ClassVar[str] = "wrong"

        def plan(self, state):
            """Return a plan that pauses all waiting jobs."""
            return StepPlan((), list(state.waiting))

    with pytest.raises(PolicyError, match=r"plan\(\) paused <Job 1: .*>, which is not running"):
        serve(REQUESTS, scheduler=Wrong())


def test_a_scheduler_serves_once():
    """A scheduler that has served a run is refused by a second one."""
    scheduler = FCFS()
    serve(REQUESTS, scheduler=scheduler)
    with pytest.raises(InputError, match="scheduler plugin 'fcfs' is in use already: build"):
        serve(REQUESTS, scheduler=scheduler)


def test_a_drafter_serves_once():
    """A drafter that has served a run is refused by a second one, whose parts stay unused."""
    drafter = Acceptance(tokens=2, probability=0.5)
    serve(REQUESTS, drafter=drafter)
    parts = {"scheduler": FCFS(), "latency": Even()}
    with pytest.raises(InputError, match="drafter plugin 'acceptance' is in use already"):
        serve(REQUESTS, drafter=drafter, **parts)
    serve(REQUESTS, **parts)


REFUSED = {
    "the rate": ({"rate_scale": -1}, "rate_scale=-1"),
    "the drafter's memory": ({"fragmentation": True, "drafter": True}, "leave out the drafter"),
    "the lag": ({"batching": Batching(rules="vllm:lag=1"), "drafter": True}, "lag=1 with"),
    "the limits": ({"batching": 5}, "give a Batching"),
}


@pytest.mark.parametrize(("options", "fault"), REFUSED.values(), ids=REFUSED)
def test_a_refused_run_leaves_its_plugins_unused(options, fault):
    """The parts of a call that was refused serve the call that mends it."""
    parts = {"scheduler": FCFS(), "latency": Even()}
    drafter = Acceptance(tokens=2, probability=0.5)
    wrong = options | ({"drafter": drafter} if "drafter" in options else {})

    def run(**more):
        cache = KVCache(100, BLOCK, key_tokens=BLOCK, accounting="tokens")
        return simulate(REQUESTS, cache=cache, **parts, **more)

    with pytest.raises(InputError, match=fault):
        run(**wrong)
    run(drafter=drafter)
    with pytest.raises(InputError, match="in use already"):
        run(drafter=drafter)


@attrs.define(slots=False, eq=False)
class Undecided(FCFS):
    """A scheduler whose priorities cannot be compared."""

    name: ClassVar[str] = "undecided"
    preemptive: bool = False
    nearly: bool = False

    def priority(self, job, now):
        """Return a priority whose type depends on the job, or on whether it runs."""
        if self.preemptive:
            return -job.serial if job.stage == "waiting" else (job.serial,)
        if self.nearly:  # two are compared only once the first has left
            return (job.serial + 1) // 2, None if job.serial == 3 else 0
        return "first" if job.serial % 2 else job.serial


class Later(FCFS):
    """A scheduler whose priorities cannot be compared with those of another time."""

    name = "undecided"

    def priority(self, job, now):
        """Return a number, and from 20 ns on a text."""
        return job.serial if now < 20 else "late"

    def changes_at(self, job, now):
        """Return when the type changes."""
        return 20 if now < 20 else None


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(
    "make",
    [Undecided, partial(Undecided, preemptive=True), partial(Undecided, nearly=True), Later],
)
def test_priorities_that_cannot_be_compared_are_refused(make, trace):
    """Priorities that cannot be compared raise PolicyError that names `priority`.

    Without a trace and pauses the core in C compares them.
    """
    options = {"scheduler": make(), "max_seqs": 2, "trace": trace}
    with pytest.raises(PolicyError, match=r"'undecided' .* raised TypeError in priority\(\)"):
        serve([ask(n, n, output=9) for n in range(6)], **options)


def _giving(**answers):
    methods = {name: lambda *_, answer=answer: answer for name, answer in answers.items()}
    return type("Giving", (FCFS,), {"name": "giving"} | methods)()


@pytest.mark.parametrize(
    ("priority", "hint"),
    [(None, r": is a `return` missing\?"), (float("nan"), ""), ((0, float("nan")), "")],
)
def test_a_priority_of_none_or_nan_is_refused(priority, hint):
    """A priority of None, or with NaN in it, raises PolicyError that names the job."""
    why = f"{re.escape(str(priority))}, which has no place in an order{hint}$"
    message = rf"'giving' .* answered priority\(\) of <Job 1: .* with {why}"
    with pytest.raises(PolicyError, match=message):
        serve(REQUESTS, scheduler=_giving(priority=priority))


@pytest.mark.parametrize("due", ["soon", 0, -1, 0.5, float("inf"), float("nan"), True])
def test_a_wrong_time_of_changes_at_is_refused(due):
    """A `changes_at` that is no whole number, or not in the future, raises PolicyError."""
    message = (
        rf"'giving' .* answered changes_at\(\) of <Job 1: .* with {due!r} at 0 ns: give wh"
    )
    with pytest.raises(PolicyError, match=message):
        serve(REQUESTS, scheduler=_giving(changes_at=due))


def test_a_latency_model_that_fails_a_scheduler_is_named():
    """An exception of the latency model in a scheduler's call names the latency model."""
    latency = _answering(lambda: 1 // 0)
    with pytest.raises(PolicyError, match=r"^latency plugin 'answering' .* in pieces\(\)"):
        serve(REQUESTS, scheduler=SRPT(), latency=latency)


@pytest.mark.parametrize("whole", [False, True])
def test_a_wrong_plan_is_named_in_a_few_words(whole):
    """The error about a wrong plan does not print a whole prompt."""
    requests = [ask(0, keys=[10**15 + n for n in range(9)], prompt=9 * BLOCK)]

    class Wrong(Scheduler):
        name = "wrong"

        def priority(self, job, now):
            return job.serial

        def plan(self, state):
            found = [job.request for job in state.waiting]
            return found if whole else StepPlan(found)

    with pytest.raises(PolicyError, match=r"plan\(\) .*\.\.\., which is no ") as caught:
        serve(requests, scheduler=Wrong())
    assert len(str(caught.value)) < 200
