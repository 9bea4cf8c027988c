"""The conformance tests of schedulers: a right scheduler passes, wrong ones do not."""

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
    """First come, first served, as a third party would write it."""

    name = "mine"

    def priority(self, job, _now):
        """Return its place."""
        return job.serial


class TestMine(SchedulerTests):
    """The lines of the docstring are enough."""

    def make(self):
        """Make it."""
        return Mine()


@attrs.define(slots=False, eq=False)
class Turns(Mine):
    """Writes its own plan: whoever is first and last in the queue, in turns."""

    def plan(self, state):
        """Offer the seats."""
        waiting = list(state.waiting)
        return StepPlan([waiting.pop(-1 if place % 2 else 0) for place in range(len(waiting))])


class TestTurns(SchedulerTests):
    """A lawful plan of its own passes as well."""

    starves = True

    def make(self):
        """Make it."""
        return Turns()


class Fickle(Mine):
    """Draws lots."""

    def priority(self, _job, _now):
        """Return anything."""
        return random()


class Drifting(Mine):
    """Counts the time that has passed, in both directions."""

    def priority(self, job, now):
        """Return a distance that shrinks, and grows again."""
        return abs(job.arrival + 10**8 - now)


class Silent(LeastSlack):
    """Does not say when jobs become hopeless."""

    def changes_at(self, job, now):
        """Say nothing."""


class Late(LeastSlack):
    """Says when it was."""

    def changes_at(self, job, now):
        """Name the present."""
        return now


class Swapping(LeastSlack):
    """Ranks who runs anew: as work is done, its latest start moves away."""

    def priority(self, job, now):
        """Forget about the seat."""
        return self.latest_start(job)


class Thieving(Turns):
    """Pauses without saying that it is preemptive."""

    def plan(self, state):
        """Take a seat from whoever has one."""
        return StepPlan(state.waiting, state.running[:1])


class Seated(Turns):
    """Offers seats to those who have one."""

    def plan(self, state):
        """Offer them."""
        return StepPlan([*state.running, *state.waiting])


class Confused(Thieving):
    """Pauses those who have no seat."""

    preemptive = True

    def plan(self, state):
        """Take what is not there."""
        return StepPlan(state.waiting, list(state.waiting)[:1])


class Lazy(Turns):
    """Offers one seat a plan."""

    def plan(self, state):
        """Offer it."""
        return StepPlan(list(state.waiting)[:1])


class Idle(Turns):
    """Offers nothing."""

    def plan(self, state):
        """Offer nothing."""
        return StepPlan()


class Hoarder(Mine):
    """Never forgets a job."""

    def finished(self, job, _now):
        """Keep it."""
        self.__dict__.setdefault("kept", []).append(job)


class Forgetful(Mine):
    """Computes a priority and forgets to return it."""

    def priority(self, job, now):
        """Return nothing."""
        self.last = now - job.arrival


class Vague(LeastSlack):
    """Names no whole nanosecond."""

    def changes_at(self, job, now):
        """Return half of one."""
        return now + 0.5


@attrs.define(slots=False, eq=False)
class Mangled(Mine):
    """Has an option that it does not keep as given."""

    share: float = attrs.field(default=0.5, converter=lambda share: share / 2)


@pytest.mark.parametrize(
    ("scheduler", "test", "message"),
    [
        (Fickle, "serves_everyone_once", "another order"),
        (Drifting, "serves_everyone_once", "another order"),
        (Silent, "serves_everyone_once", "another order"),
        (Late, "serves_everyone_once", "must be later, or None"),
        (Vague, "serves_everyone_once", "no whole ns"),
        (Forgetful, "serves_everyone_once", "is None: is `return` missing"),
        (Swapping, "serves_everyone_once", "went before"),
        (Thieving, "serves_everyone_once", "preemptive is false"),
        (Confused, "serves_everyone_once", "was paused, and is not running"),
        (Seated, "serves_everyone_once", "does not wait"),
        (Lazy, "leaves_no_slot_empty", "a slot is free"),
        (Idle, "serves_everyone_once", "a slot is free"),
        (SRPT, "starves_nobody", "it came at"),
        (Hoarder, "forgets_who_is_done", "it still refers to"),
        (Mangled, "is_built_from_text", "gave other options"),
    ],
)
def test_catches(scheduler, test, message):
    """The test named fails for a scheduler with that fault, on the toy server."""
    with pytest.raises(AssertionError, match=message):
        run(scheduler, test, "toy")


@pytest.mark.parametrize(
    ("scheduler", "test", "error"),
    [
        (Fickle, "decides_alike_when_run_again", AssertionError),
        (Seated, "serves_everyone_once", PolicyError),
        (Confused, "serves_everyone_once", PolicyError),
        (Forgetful, "serves_everyone_once", PolicyError),
        (Idle, "serves_everyone_once", PolicyError),
        (SRPT, "starves_nobody", AssertionError),
        (Hoarder, "forgets_who_is_done", AssertionError),
    ],
)
def test_catches_in_the_loop(scheduler, test, error):
    """Likewise in the serving loop, which refuses some itself."""
    with pytest.raises(error):
        run(scheduler, test, "loop")


def run(scheduler, test, server):
    """Run one test of the kit on `scheduler`."""

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
    """Has an option without a text form, and cannot work."""

    name = "opaque"
    order: Any = attrs.field(factory=list)

    @classmethod
    def unavailable(cls):
        """Say why."""
        return "no such device"


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("is_built_from_text", "options without a text form: order"),
        ("serves_everyone_once", "cannot work here: no such device"),
    ],
)
def test_says_why_it_skips(test, reason):
    """What cannot be tested of a scheduler is skipped, with the reason."""
    with pytest.raises(pytest.skip.Exception, match=reason):
        run(Opaque, test, "toy")
