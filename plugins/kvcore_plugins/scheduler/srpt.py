"""Shortest remaining processing time."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import attrs

from kvcore import Job
from kvcore_plugins.bounds import one_of
from kvcore_plugins.scheduler.estimate import Estimating


@attrs.define(slots=False, eq=False)
class SRPT(Estimating):
    """Serve the job with the shortest remaining time first, for the least mean response time.

    With true lengths, one job at a time and preemption it is optimal. Long jobs starve while
    short ones keep coming.

    Options:
        preemptive: whether a running job is paused for a shorter one, and waits with
            its blocks kept.
        length: `true`, a bound that no server reaches, or `predicted`, with `error`, `seed`
            and `concurrency` as for all schedulers that estimate.

    Source: Schrage, "A proof of the optimality of the shortest remaining processing time
    discipline", Operations Research 16(3), 1968.
    """

    name: ClassVar[str] = "srpt"

    preemptive: bool = attrs.field(default=True)
    length: Literal["true", "predicted"] = one_of("true", "predicted")

    def priority(self, job: Job, now: int) -> Any:
        """Return the remaining time of `job` (ns)."""
        return self.remaining_ns(job)
