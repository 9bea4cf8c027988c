"""Longest prefix match."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

import attrs

from kvcore import InputError, Job, Scheduler
from kvcore.serving import LoopState, StepPlan


@attrs.define(slots=False, eq=False)
class LPM(Scheduler):
    """Serve the job first whose prompt has the longest cached prefix, the earliest if equal.

    What is cached is used before it is evicted. A prompt that shares nothing starves while
    others that share keep coming. A plan costs at most `sample` probes of the cache.

    Options:
        sample: how many waiting jobs are probed, from the head of the queue. Those behind
            them follow in their order.

    Source: Zheng et al., "SGLang: efficient execution of structured language model programs",
    NeurIPS 2024, section 3 (cache-aware scheduling).
    """

    name: ClassVar[str] = "lpm"

    sample: int = attrs.field(default=128)

    @sample.validator
    def _is_positive(self, _: object, value: int) -> None:
        if value < 1:
            msg = f"lpm: sample={value} must be at least 1 job"
            raise InputError(msg)

    def priority(self, job: Job, now: int) -> Any:
        """Return the order of arrival: who came last is the first to lose its blocks."""
        del now
        return job.serial

    def plan(self, state: LoopState) -> StepPlan:
        """Admit jobs by how much of their prompts would hit."""
        return StepPlan(self._by_hit(state))

    def _by_hit(self, state: LoopState) -> Iterator[Job]:
        # Lazily: without a free slot no job is probed.
        sample = list(islice(state.waiting, self.sample))
        hits = {job: state.server.probe(job.request, state.now) for job in sample}
        yield from sorted(sample, key=lambda job: (-hits[job], job.serial))
        # By now the queue may have lost the jobs that were admitted.
        yield from [job for job in state.waiting if job not in hits]
