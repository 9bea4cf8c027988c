"""Priorities of requests, with ageing."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from kvcore import InputError, Job, Scheduler
from kvcore.units import NS_PER_S


@attrs.define(slots=False, eq=False)
class Priority(Scheduler):
    """Serve the job with the highest `request.priority` first, the earliest among equals.

    With ageing a job gains a level for every `ageing` seconds since its arrival, so that none
    starves. All jobs age at the same rate, so the order of two jobs never changes: a level
    counts as an arrival `ageing` seconds earlier.

    Options:
        ageing: seconds for which a job gains one level, in whole ns; 0: no ageing, and low
            priorities starve while higher ones keep coming.
        preemptive: whether a running job is paused for one that goes before it.
    """

    name: ClassVar[str] = "priority"

    ageing: float = attrs.field(default=0.0)
    preemptive: bool = attrs.field(default=False)

    @ageing.validator
    def _is_none_or_whole(self, _: object, value: float) -> None:
        if value != 0 and not 1 <= value * NS_PER_S < float("inf"):
            msg = f"priority: ageing={value} must be 0 or from 1e-9 seconds on"
            raise InputError(msg)

    def priority(self, job: Job, now: int) -> Any:
        """Return the arrival, earlier by its levels; without ageing the negative priority."""
        level = round(self.ageing * NS_PER_S)
        return job.arrival - level * job.request.priority if level else -job.request.priority
