"""A scheduler: which requests run in the next step."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import Job, Scheduler
from kvcore.units import NS_PER_S


@attrs.define(slots=False, eq=False)
class Example(Scheduler):
    """Serve the job with the shortest prompt first; a job that has waited counts as shorter.

    Options:
        tokens_per_second: tokens by which a prompt counts as shorter for each second.
    """

    name: ClassVar[str] = "example"
    tokens_per_second: int = attrs.field(default=1000, validator=attrs.validators.ge(1))

    def priority(self, job: Job, now: int) -> int:
        """Return the rank of a job, of which the lowest is served first.

        Waiting counts for all jobs, so it is enough to count from the arrival.
        """
        del now
        return job.request.prompt_tokens * NS_PER_S + self.tokens_per_second * job.arrival
