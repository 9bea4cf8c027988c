"""The conformance tests of schedulers pass right schedulers and fail wrong ones."""

from __future__ import annotations

from functools import partial
from itertools import count
from random import random
from typing import Any, ClassVar

import attrs
import pytest
from helpers.faults import faulty, run_test

from kvcore import PolicyError, Scheduler
from kvcore.serving import StepPlan
from kvcore.testing import SchedulerTests
from kvcore_plugins.scheduler import FCFS, SRPT, LeastSlack


@attrs.define(slots=False, eq=False)
class Mine(Scheduler):
    """A first-come, first-served scheduler as a third party would write it."""

    name = "mine"

    def priority(self, job, _now):
        """Return the serial number of the job."""
        return job.serial


class TestMine(SchedulerTests):
    """A scheduler with a `priority` alone passes."""

    scheduler = Mine


@attrs.define(slots=False, eq=False)
class Turns(Mine):
    """A scheduler whose plan takes the first and the last of the queue in turns."""

    def plan(self, state):
        """Return a plan that admits all waiting jobs."""
        waiting = list(state.waiting)
        return StepPlan([waiting.pop(-1 if index % 2 else 0) for index in range(len(waiting))])


class TestTurns(SchedulerTests):
    """A scheduler with a plan of its own passes."""

    starves = True

    scheduler = Turns


Fickle = faulty("A scheduler with random priorities.", Mine, priority=lambda *_: random())
Hashed = faulty(
    "A scheduler whose priorities are hashes of text.",
    Mine,
    priority=lambda _, job, __: hash(f"{job.request.id}"),
)
Drifting = faulty(
    "A scheduler whose priorities depend on the clock.",
    Mine,
    priority=lambda _, job, now: abs(job.arrival + 10**8 - now),
)
Flipping = faulty(
    "A scheduler whose order is turned round each microsecond.",
    Mine,
    priority=lambda _, job, now: (-1) ** (now // 1000) * job.request.prompt_tokens,
)
Blinking = faulty(
    "A scheduler whose order is turned round each millisecond.",
    Mine,
    priority=lambda _, job, now: (-1) ** (now // 10**6) * job.request.prompt_tokens,
)
Silent = faulty(
    "A scheduler that does not report when jobs become hopeless.",
    LeastSlack,
    changes_at=lambda *_: None,
)
Late = faulty(
    "A scheduler that reports the present as the time of the next change.",
    LeastSlack,
    changes_at=lambda _, __, now: now,
)
Swapping = faulty(
    "A scheduler that ranks running jobs by a latest start that moves with their work.",
    LeastSlack,
    priority=lambda self, job, *_: self.latest_start(job),
)
PausesUndeclared = faulty(
    "A scheduler that pauses jobs without declaring itself preemptive.",
    Turns,
    plan=lambda _, state: StepPlan(state.waiting, state.running[:1]),
)
AdmitsRunning = faulty(
    "A scheduler that admits running jobs.",
    Turns,
    plan=lambda _, state: StepPlan([*state.running, *state.waiting]),
)
PausesWaiting = faulty(
    "A scheduler that pauses waiting jobs.",
    PausesUndeclared,
    preemptive=True,
    plan=lambda _, state: StepPlan(state.waiting, list(state.waiting)[:1]),
)
Lazy = faulty(
    "A scheduler that admits one job per plan.",
    Turns,
    plan=lambda _, state: StepPlan(list(state.waiting)[:1]),
)
Idle = faulty("A scheduler that admits no job.", Turns, plan=lambda *_: StepPlan())
Hoarder = faulty(
    "A scheduler that keeps a reference to every job.",
    Mine,
    finished=lambda self, job, *_: self.__dict__.setdefault("kept", []).append(job),
)

Oracle = faulty(
    "A scheduler that goes by how long outputs get.",
    Mine,
    priority=lambda _, job, *__: (job.request.predicted_output_tokens, job.output_tokens),
)


class Writing(Mine):
    """A scheduler that writes to a field of a job."""

    def priority(self, job, _now):
        """Move the arrival of the job."""
        job.arrival = 0
        return job.serial


class Common(Mine):
    """A scheduler whose class counts the finished jobs."""

    counts: ClassVar[dict[str, int]] = {}

    def finished(self, job, _now):
        """Count the job."""
        self.counts[job.request.id] = self.counts.get(job.request.id, 0) + 1


TURNS = count()

InTurns = faulty(
    "A scheduler whose order depends on a counter of its module.",
    Mine,
    attach=lambda self, _: vars(self).update(turn=next(TURNS)),
    priority=lambda self, job, *__: (-1) ** (self.turn // 2) * job.serial,
)


class Forgetful(Mine):
    """A scheduler whose `priority` returns nothing."""

    def priority(self, job, now):
        """Compute a priority without returning it."""
        self.last = now - job.arrival


Unordered = faulty(
    "A scheduler whose priorities have NaN beside a number.",
    Mine,
    priority=lambda _, job, *__: (job.serial, float("nan")),
)
Vague = faulty(
    "A scheduler that reports a fraction of a nanosecond.",
    LeastSlack,
    changes_at=lambda _, __, now: now + 0.5,
)


@attrs.define(slots=False, eq=False)
class Mangled(Mine):
    """A scheduler with an option that it changes."""

    share: float = attrs.field(default=0.5, converter=lambda share: share / 2)


@pytest.mark.parametrize(
    ("scheduler", "test", "message"),
    [
        (Fickle, "serves_every_request_once", "another order"),
        (Drifting, "serves_every_request_once", "another order"),
        (Flipping, "serves_every_request_once", "another order"),
        (Blinking, "serves_every_request_once", "another order"),
        (Silent, "serves_every_request_once", "another order"),
        (Late, "serves_every_request_once", "must be later, or None"),
        (Vague, "serves_every_request_once", "no whole ns"),
        (Unordered, "serves_every_request_once", "has no order"),
        (Forgetful, "serves_every_request_once", "is None: is `return` missing"),
        (Swapping, "serves_every_request_once", "went before"),
        (PausesUndeclared, "serves_every_request_once", "preemptive is false"),
        (PausesWaiting, "serves_every_request_once", "was paused, and is not running"),
        (AdmitsRunning, "serves_every_request_once", "does not wait"),
        (Lazy, "leaves_no_slot_empty", "a slot is free"),
        (Idle, "serves_every_request_once", "a slot is free"),
        (SRPT, "starves_no_job", "it starved: .* at 0.593 s, .* starves = True"),
        (Hoarder, "forgets_finished_jobs", "it still refers to"),
        (Oracle, "does_not_know_how_long_outputs_get", "with other output_tokens"),
        (
            Common,
            "decisions_are_repeatable",
            "changed counts of its class, which all instances",
        ),
        (InTurns, "decisions_are_repeatable", "after another scheduler, it decided otherwise"),
        (Mangled, "is_built_from_text", "gave other options"),
    ],
)
def test_a_fault_fails_its_conformance_test(scheduler, test, message):
    """The conformance test named fails for a scheduler with that fault on the toy server."""
    with pytest.raises(AssertionError, match=message):
        run(scheduler, test, "toy")


@pytest.mark.parametrize(
    ("scheduler", "test", "error", "message"),
    [
        (Hashed, "decisions_are_repeatable", AssertionError, "it decided otherwise"),
        (Fickle, "decisions_are_repeatable", AssertionError, "it decided otherwise"),
        (AdmitsRunning, "serves_every_request_once", PolicyError, "which is not waiting"),
        (PausesWaiting, "serves_every_request_once", PolicyError, "which is not running"),
        (Forgetful, "serves_every_request_once", PolicyError, "is a `return` missing"),
        (Idle, "serves_every_request_once", PolicyError, "leaves 60 requests waiting"),
        (SRPT, "starves_no_job", AssertionError, "it starved"),
        (Hoarder, "forgets_finished_jobs", AssertionError, "it still refers to"),
    ],
)
def test_a_fault_fails_in_the_serving_loop(scheduler, test, error, message):
    """A faulty scheduler fails in the serving loop, which raises some of the errors itself."""
    with pytest.raises(error, match=message):
        run(scheduler, test, "loop")


@pytest.mark.parametrize("server", ["toy", "loop"])
def test_a_scheduler_that_writes_to_a_job_fails(server):
    """A scheduler that writes to a field of a job other than `data` fails, with its name."""
    with pytest.raises(pytest.fail.Exception, match=r"priority\(\) changed arrival of <Job 1"):
        run(Writing, "serves_every_request_once", server)


def run(scheduler, test, server):
    """Run one conformance test on `scheduler`."""
    options = {}
    if issubclass(scheduler, LeastSlack):
        options = {"preemptive": scheduler is Swapping, "ttft": 0.05}
    make = partial(scheduler, **options)
    return run_test(SchedulerTests, make, test, seed=0, server=server)


@attrs.define(slots=False, eq=False)
class Opaque(FCFS):
    """A scheduler that is unavailable and has an option without a text form."""

    name = "opaque"
    order: Any = attrs.field(factory=list)

    @classmethod
    def unavailable(cls):
        """Return the reason."""
        return "no such device"


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("is_built_from_text", "options without a text form: order"),
        ("serves_every_request_once", "cannot work here: no such device"),
    ],
)
def test_a_skipped_conformance_test_has_a_reason(test, reason):
    """A conformance test that cannot run for a scheduler is skipped with the reason."""
    with pytest.raises(pytest.skip.Exception, match=reason):
        run(Opaque, test, "toy")
