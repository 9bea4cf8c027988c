"""First come, first served."""

from __future__ import annotations

from typing import Any, ClassVar

from kvcore import Job, Scheduler


class FCFS(Scheduler):
    """Serve jobs in the order in which they arrived."""

    name: ClassVar[str] = "fcfs"
    by_arrival: ClassVar[bool] = True

    def priority(self, job: Job, now: int) -> Any:
        """Return the order of arrival."""
        return job.serial
