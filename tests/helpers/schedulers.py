"""Schedulers for tests of servers: the built-in ones, and some with unusual behaviour."""

from random import Random
from typing import ClassVar

import attrs

from kvcore import Plugins, Scheduler
from kvcore.serving import StepPlan


@attrs.define(slots=False, eq=False)
class Urgent(Scheduler):
    """A preemptive scheduler by the priority of requests, many of which are equal."""

    name: ClassVar[str] = "urgent"

    preemptive: bool = True

    def priority(self, job, now):
        """Return the priority of the request; 0 goes first."""
        del now
        return job.request.priority


@attrs.define(slots=False, eq=False)
class Latest(Scheduler):
    """A preemptive scheduler that runs the latest arrival first."""

    name: ClassVar[str] = "latest"

    preemptive: bool = True

    def priority(self, job, now):
        """Return the order of arrival, reversed."""
        del now
        return -job.serial


@attrs.define(slots=False, eq=False)
class Impatient(Scheduler):
    """A scheduler by output length that puts jobs last once they have waited for 300 ns."""

    name: ClassVar[str] = "impatient"

    def priority(self, job, now):
        """Return whether the job has waited for more than 300 ns, then its output tokens."""
        return now > job.arrival + 300, job.request.output_tokens

    def changes_at(self, job, now):
        """Return the time at which the job will have waited for that long."""
        return job.arrival + 301 if now <= job.arrival + 300 else None


@attrs.define(slots=False, eq=False)
class Planning(Scheduler):
    """A scheduler that overrides `plan`: most hits first; when crowded it pauses a job."""

    name: ClassVar[str] = "planning"

    def priority(self, job, now):
        """Return the order of arrival."""
        del now
        return job.serial

    def plan(self, state):
        """Order waiting jobs by their hits; when crowded pause the last running job."""
        hits = {job: state.server.probe(job.request, state.now) for job in state.waiting}
        crowd = len(hits) > 3 and len(state.running) > 2
        order = sorted(hits, key=lambda job: (-hits[job], job.serial))
        return StepPlan(iter(order), state.running[-1:] if crowd else ())


@attrs.define(slots=False, eq=False)
class Fickle(Planning):
    """A scheduler that pauses and offers jobs at random, by a fixed seed."""

    name: ClassVar[str] = "fickle"

    random: Random = attrs.field(init=False, factory=lambda: Random(1))
    plans: int = 0

    def plan(self, state):
        """Draw the jobs to pause, and the order of all jobs to admit, paused ones included."""
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
    """Return a new scheduler by its name and options."""
    return STAND_INS[spec]() if spec in STAND_INS else _PLUGINS.build("scheduler", spec)
