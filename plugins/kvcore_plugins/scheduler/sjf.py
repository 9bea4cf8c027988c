"""Shortest job first."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from kvcore import Job
from kvcore_plugins.scheduler.estimate import Estimating


@attrs.define(slots=False, eq=False)
class SJF(Estimating):
    """Serve the job first that takes the shortest time in all; who runs is left running.

    Long jobs starve while short ones keep coming. The options say what is known of a job's
    length; by default its prediction, and the truth where the workload predicts nothing.
    """

    name: ClassVar[str] = "sjf"

    def priority(self, job: Job, now: int) -> Any:
        """Return the time it takes in all."""
        del now
        return self.total_ns(job)
