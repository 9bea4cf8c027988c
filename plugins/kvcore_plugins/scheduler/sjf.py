"""Shortest job first."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from kvcore import Job
from kvcore_plugins.scheduler.estimate import Estimating


@attrs.define(slots=False, eq=False)
class SJF(Estimating):
    """Serve the job with the shortest total time first; running jobs are not paused.

    Long jobs starve while short ones keep coming. By default a job's length is its
    prediction, or the true one if the workload has no predictions.
    """

    name: ClassVar[str] = "sjf"

    def priority(self, job: Job, now: int) -> Any:
        """Return the total time of `job` (ns)."""
        return self.total_ns(job)
