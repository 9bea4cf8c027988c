"""Least slack, among the jobs that can still meet their SLO."""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar

import attrs
from attrs.validators import gt, lt

from kvcore import SLO, Job
from kvcore.serving.job import DECODE, PREFILL
from kvcore.units import NS_PER_S
from kvcore_plugins.bounds import bounded
from kvcore_plugins.scheduler.estimate import Estimating

UNSAID = SLO()


@attrs.define(slots=False, eq=False)
class LeastSlack(Estimating):
    """Serve the job with the earliest latest start first; jobs that are too late go last.

    Slack is deadline - now - remaining time. The time is the same for all waiting jobs, so
    their order is that of deadline - remaining time: the latest start. A job whose latest
    start has passed is hopeless and goes behind all others: otherwise an overloaded server
    would spend its time on jobs that are late in any case. Hopeless jobs may starve while the
    overload lasts.

    Each of these times of the request's SLO, or else of the options, gives a latest start:

    - `deadline` after the arrival, less the remaining time of the whole job;
    - until the first token, `ttft` after the arrival, less the remaining prefill;
    - afterwards, `tpot` for each further expected token after the first one, less the
      remaining time of the whole job.

    The earliest of them counts. The options apply to a request that has neither a `deadline`
    nor a `ttft` (or `tpot`) of its own.

    Options:
        ttft, tpot: seconds expected for a request without an SLO of its own.
        preemptive: whether a running job is paused for one that must be started earlier.
            While it runs it keeps the rank that it waited with: otherwise its remaining time
            would fall, its latest start rise, and two jobs would swap a slot for ever.
        length: `true`, or `predicted`, which is the true length if nothing is predicted, with
            `error`, `seed` and `concurrency` as for all schedulers that estimate.
    """

    name: ClassVar[str] = "slo"

    ttft: float = bounded(30.0, "a positive number of seconds", gt(0), lt(inf))
    tpot: float = bounded(0.1, "a positive number of seconds", gt(0), lt(inf))
    preemptive: bool = attrs.field(default=False)

    def priority(self, job: Job, now: int) -> Any:
        """Return whether `job` is hopeless, and its latest start (ns)."""
        if self.preemptive and job.stage in {PREFILL, DECODE}:
            return job.rank
        start = self.latest_start(job)
        return start < now, start

    def changes_at(self, job: Job, now: int) -> int | None:
        """Return when (ns) `job` becomes hopeless; None: it is already."""
        start = self.latest_start(job)
        return start + 1 if start >= now else None

    def latest_start(self, job: Job) -> int:
        """Return when (ns) `job` must start to meet its SLO, if it is never interrupted."""
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


def _or_option(slo: SLO, option: int | None, seconds: float) -> int | None:
    if option is None and slo.deadline_ns is None:
        return round(seconds * NS_PER_S)
    return option
