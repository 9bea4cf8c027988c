"""Least slack, among the jobs that can still meet what their clients expect."""

from __future__ import annotations

from math import isfinite
from typing import Any, ClassVar

import attrs

from kvcore import SLO, InputError, Job
from kvcore.serving.job import DECODE, PREFILL
from kvcore.units import NS_PER_S
from kvcore_plugins.scheduler.estimate import Estimating

UNSAID = SLO()


@attrs.define(slots=False, eq=False)
class LeastSlack(Estimating):
    """Serve the job first that must be started first; those that are too late go last.

    Slack is deadline - now - what is still to do. Now passes alike for all who wait, so the
    order is that of deadline - what is still to do: the latest start. A job whose latest start
    has passed is hopeless and goes behind all others: without that rule an overloaded server
    spends itself on jobs that are late all the same. The hopeless may starve while the
    overload lasts.

    A deadline is, of what the request's SLO or else the options say:

    - `deadline`: so long after arrival, with all of the job still to do;
    - `ttft`, until there is a first token: so long after arrival, with the prefill to do;
    - `tpot`, afterwards: so long after the first token for each of the others that are
      expected, with all of the job still to do.

    The earliest of these latest starts counts. The options speak for a request that has
    neither a `deadline` nor a `ttft` (or `tpot`) of its own.

    Options:
        ttft, tpot: seconds that a client without a word on it is taken to expect.
        preemptive: whether a running job is paused for one that must be started earlier.
            While it runs its rank is the one it waited with: its work shrinks, its latest
            start moves away, and two jobs would swap a slot forever.
        length: `true`, or `predicted`, which is the truth where nothing is predicted; this,
            `error`, `seed` and `concurrency` say what is known of a job's length.
    """

    name: ClassVar[str] = "slo"

    ttft: float = attrs.field(default=30.0)
    tpot: float = attrs.field(default=0.1)
    preemptive: bool = attrs.field(default=False)

    @ttft.validator
    @tpot.validator
    def _is_positive(self, attribute: attrs.Attribute[float], value: float) -> None:
        if not (isfinite(value) and value > 0):
            msg = f"slo: {attribute.name}={value} must be a positive number of seconds"
            raise InputError(msg)

    def priority(self, job: Job, now: int) -> Any:
        """Return whether it is hopeless, and when it must be started."""
        if self.preemptive and job.stage in {PREFILL, DECODE}:
            return job.rank
        start = self.latest_start(job)
        return start < now, start

    def changes_at(self, job: Job, now: int) -> int | None:
        """Return when it becomes hopeless."""
        start = self.latest_start(job)
        return start + 1 if start >= now else None

    def latest_start(self, job: Job) -> int:
        """Return when (ns) `job` must start, never to be paused, to meet its deadline."""
        slo = job.slo or UNSAID
        starts = []
        if slo.deadline_ns is not None:
            starts.append(job.arrival + slo.deadline_ns - self.remaining_ns(job))
        if job.first_token is None:
            ttft = _or_option(slo, slo.ttft_ns, self.ttft)
            if ttft is not None:
                starts.append(job.arrival + ttft - self.remaining_prefill_ns(job))
        else:
            tpot = _or_option(slo, slo.tpot_ns, self.tpot)
            if tpot is not None:
                end = job.first_token + tpot * (self.expected(job) - 1)
                starts.append(end - self.remaining_ns(job))
        return min(starts)


def _or_option(slo: SLO, given: int | None, seconds: float) -> int | None:
    if given is None and slo.deadline_ns is None:
        return round(seconds * NS_PER_S)
    return given
