"""The conformance tests of schedulers pass right schedulers and fail wrong ones."""

from __future__ import annotations

from random import random
from typing import Any

import attrs
import pytest

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

    def make(self):
        """Return a scheduler."""
        return Mine()


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

    def make(self):
        """Return a scheduler."""
        return Turns()


class Fickle(Mine):
    """A scheduler with random priorities."""

    def priority(self, _job, _now):
        """Return a random number."""
        return random()


class Drifting(Mine):
    """A scheduler whose priorities depend on the clock."""

    def priority(self, job, now):
        """Return a distance in time that shrinks, and then grows."""
        return abs(job.arrival + 10**8 - now)


class Silent(LeastSlack):
    """A scheduler that does not report when jobs become hopeless."""

    def changes_at(self, job, now):
        """Return None."""


class Late(LeastSlack):
    """A scheduler that reports the present as the time of the next change."""

    def changes_at(self, job, now):
        """Return `now`."""
        return now


class Swapping(LeastSlack):
    """A scheduler that ranks running jobs by a latest start that moves with their work."""

    def priority(self, job, now):
        """Return the latest start, whether the job runs or not."""
        return self.latest_start(job)


class PausesUndeclared(Turns):
    """A scheduler that pauses jobs without declaring itself preemptive."""

    def plan(self, state):
        """Return a plan that pauses a running job."""
        return StepPlan(state.waiting, state.running[:1])


class AdmitsRunning(Turns):
    """A scheduler that admits running jobs."""

    def plan(self, state):
        """Return a plan that admits all jobs."""
        return StepPlan([*state.running, *state.waiting])


class PausesWaiting(PausesUndeclared):
    """A scheduler that pauses waiting jobs."""

    preemptive = True

    def plan(self, state):
        """Return a plan that pauses a waiting job."""
        return StepPlan(state.waiting, list(state.waiting)[:1])


class Lazy(Turns):
    """A scheduler that admits one job per plan."""

    def plan(self, state):
        """Return a plan that admits the first waiting job."""
        return StepPlan(list(state.waiting)[:1])


class Idle(Turns):
    """A scheduler that admits no job."""

    def plan(self, state):
        """Return an empty plan."""
        return StepPlan()


class Hoarder(Mine):
    """A scheduler that keeps a reference to every job."""

    def finished(self, job, _now):
        """Keep the job."""
        self.__dict__.setdefault("kept", []).append(job)


class Forgetful(Mine):
    """A scheduler whose `priority` returns nothing."""

    def priority(self, job, now):
        """Compute a priority without returning it."""
        self.last = now - job.arrival


class Unordered(Mine):
    """A scheduler whose priorities have NaN beside a number."""

    def priority(self, job, now):
        """Return the serial of a job, and no number."""
        return job.serial, float("nan")


class Vague(LeastSlack):
    """A scheduler that reports a fraction of a nanosecond."""

    def changes_at(self, job, now):
        """Return half a nanosecond after `now`."""
        return now + 0.5


@attrs.define(slots=False, eq=False)
class Mangled(Mine):
    """A scheduler with an option that it changes."""

    share: float = attrs.field(default=0.5, converter=lambda share: share / 2)


@pytest.mark.parametrize(
    ("scheduler", "test", "message"),
    [
        (Fickle, "serves_every_request_once", "another order"),
        (Drifting, "serves_every_request_once", "another order"),
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
        (SRPT, "starves_no_job", "it came at"),
        (Hoarder, "forgets_finished_jobs", "it still refers to"),
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
        (Fickle, "decisions_are_repeatable", AssertionError, "it decided otherwise"),
        (AdmitsRunning, "serves_every_request_once", PolicyError, "which is not waiting"),
        (PausesWaiting, "serves_every_request_once", PolicyError, "which is not running"),
        (Forgetful, "serves_every_request_once", PolicyError, "is a `return` missing"),
        (Idle, "serves_every_request_once", PolicyError, "leaves 60 requests waiting"),
        (SRPT, "starves_no_job", AssertionError, "it came at"),
        (Hoarder, "forgets_finished_jobs", AssertionError, "it still refers to"),
    ],
)
def test_a_fault_fails_in_the_serving_loop(scheduler, test, error, message):
    """A faulty scheduler fails in the serving loop, which raises some of the errors itself."""
    with pytest.raises(error, match=message):
        run(scheduler, test, "loop")


def run(scheduler, test, server):
    """Run one conformance test on `scheduler`."""

    class Kit(SchedulerTests):
        def make(self):
            if issubclass(scheduler, LeastSlack):
                return scheduler(preemptive=scheduler is Swapping, ttft=0.05)
            return scheduler()

    method = getattr(Kit(), f"test_{test}")
    values = {"seed": 0, "server": server}
    return method(**{name: values[name] for name in method.__annotations__ if name in values})


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
