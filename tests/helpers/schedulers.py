"""Schedulers that servers are tried with: the built-in ones, and some that do odd things."""

from random import Random
from typing import ClassVar

import attrs

from kvcore import Plugins, Scheduler
from kvcore.serving import StepPlan


@attrs.define(slots=False, eq=False)
class Urgent(Scheduler):
    """Preemptive, by the priority of requests; many are equal."""

    name: ClassVar[str] = "urgent"

    preemptive: bool = True

    def priority(self, job, now):
        """Return it; 0 goes first."""
        del now
        return job.request.priority


@attrs.define(slots=False, eq=False)
class Latest(Scheduler):
    """Preemptive: who came last goes first."""

    name: ClassVar[str] = "latest"

    preemptive: bool = True

    def priority(self, job, now):
        """Return the order of arrival, backwards."""
        del now
        return -job.serial


@attrs.define(slots=False, eq=False)
class Impatient(Scheduler):
    """Who has waited for 300 ns goes last."""

    name: ClassVar[str] = "impatient"

    def priority(self, job, now):
        """Return whether it has, then its output."""
        return now > job.arrival + 300, job.request.output_tokens

    def changes_at(self, job, now):
        """Return when it has."""
        return job.arrival + 301 if now <= job.arrival + 300 else None


@attrs.define(slots=False, eq=False)
class Planning(Scheduler):
    """Plans for itself: what hits goes first, and in a crowd whoever came last is paused."""

    name: ClassVar[str] = "planning"

    def priority(self, job, now):
        """Return the order of arrival."""
        del now
        return job.serial

    def plan(self, state):
        """Sort by what would hit."""
        hits = {job: state.server.probe(job.request, state.now) for job in state.waiting}
        crowd = len(hits) > 3 and len(state.running) > 2
        order = sorted(hits, key=lambda job: (-hits[job], job.serial))
        return StepPlan(iter(order), state.running[-1:] if crowd else ())


@attrs.define(slots=False, eq=False)
class Fickle(Planning):
    """Pauses and offers at random, the paused ones too; the same in every run."""

    name: ClassVar[str] = "fickle"

    random: Random = attrs.field(init=False, factory=lambda: Random(1))
    plans: int = 0

    def plan(self, state):
        """Draw who is paused, and the order of all that are offered seats."""
        self.plans += 1
        waiting = list(state.waiting)
        pause = [job for job in state.running if waiting and self.random.random() < 0.3]
        pause = pause if self.plans < 400 else []
        offers = waiting + pause
        self.random.shuffle(offers)
        return StepPlan(offers, pause)


STAND_INS = {cls.name: cls for cls in (Urgent, Latest, Impatient, Planning, Fickle)}

SCHEDULERS = (
    "fair",
    "fcfs",
    "lpm:sample=3",
    "priority:preemptive=true",
    "priority:ageing=1e-7,preemptive=true",
    "sjf",
    "slo:ttft=4e-7,tpot=1e-8",
    "slo:ttft=4e-7,tpot=1e-8,preemptive=true",
    "srpt",
    "srpt:length=predicted,error=1",
    "srpt:preemptive=false",
    *STAND_INS,
)
"""Schedulers under test, with options that suit servers whose steps take nanoseconds."""

_PLUGINS = Plugins()


def scheduler_of(spec):
    """Return a new scheduler."""
    return STAND_INS[spec]() if spec in STAND_INS else _PLUGINS.build("scheduler", spec)
