"""Longest prefix match."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar, Literal

import attrs
from attrs.validators import ge, in_

from kvcore import Job, Scheduler
from kvcore.request import Key
from kvcore.serving import LoopState, StepPlan
from kvcore_plugins.bounds import bounded


@attrs.define(slots=False, eq=False)
class LPM(Scheduler):
    """Serve the job with the longest cached prefix first, the earliest of equal ones.

    Cached blocks are used before they are evicted. A prompt that shares nothing starves while
    prompts that share keep coming. A plan costs at most `sample` probes of the cache.

    Options:
        sample: number of waiting jobs that are probed, from the head of the queue. Later jobs
            follow in the order of the queue.
        beyond: the order of a queue of more than `sample` jobs: with `rest` only its head is
            ordered; with `fcfs` no job is probed, and all go in the order of the queue.
        defer_shared: tokens; a job that hits no more than that, and shares as many with an
            earlier job in the queue that hits no more either, goes last: it hits once the
            other is computed. Shared tokens are counted in whole block keys. 0: no job is
            deferred.

    Source: Zheng et al., "SGLang: efficient execution of structured language model programs",
    NeurIPS 2024, section 3 (cache-aware scheduling). SGLang 0.5 decides with
    `beyond=fcfs,defer_shared=32`.
    """

    name: ClassVar[str] = "lpm"
    later_options = ("beyond", "defer_shared")

    sample: int = bounded(128, "at least 1 job", ge(1))
    beyond: Literal["rest", "fcfs"] = attrs.field(
        default="rest", validator=in_(("rest", "fcfs"))
    )
    defer_shared: int = attrs.field(default=0, validator=ge(0))

    def priority(self, job: Job, now: int) -> Any:
        """Return the order of arrival: the job that came last loses its blocks first."""
        return job.serial

    def plan(self, state: LoopState) -> StepPlan:
        """Admit jobs by how much of their prompts would hit."""
        return StepPlan(self._by_hit(state))

    def _by_hit(self, state: LoopState) -> Iterator[Job]:
        # As a generator: without a free slot no job is probed.
        if self.beyond == "fcfs" and len(state.waiting) > self.sample:
            yield from list(state.waiting)
            return
        sample = list(islice(state.waiting, self.sample))
        hits = {job: state.server.probe(job.request, state.now) for job in sample}
        last = self._deferred(hits) if self.defer_shared else ()
        yield from sorted(
            sample, key=lambda job: (1, job.serial) if job in last else (-hits[job], job.serial)
        )
        # By now the queue may have lost the jobs that were admitted.
        yield from [job for job in state.waiting if job not in hits]

    def _deferred(self, hits: dict[Job, int]) -> set[Job]:
        """Return the jobs that hit little and share more with a job before them."""
        first: set[Key] = set()
        deferred: set[Job] = set()
        for job, hit in hits.items():
            request = job.request
            index = -(-self.defer_shared // request.key_tokens) - 1
            if hit > self.defer_shared or request.prompt_tokens < self.defer_shared:
                continue
            if index < len(request.keys):
                # Keys are chained: equal ones mean that all before them are equal.
                key = request.keys[index]
                if key in first:
                    deferred.add(job)
                first.add(key)
        return deferred
