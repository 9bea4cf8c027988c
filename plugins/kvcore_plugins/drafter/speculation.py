"""Speculative decoding in the serving loop: slots for drafts, and rollback of rejected ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvcore.cache import KVCache
from kvcore.errors import InputError
from kvcore.models.cost import attended_pairs
from kvcore.plugins import find_override
from kvcore.serving.batcher import Batcher
from kvcore.serving.decode_batch import DecodeBatch
from kvcore.serving.drafter import Drafter
from kvcore.serving.job import DECODE, Job, admission_of
from kvcore.serving.latency import (
    Executor,
    LatencyModel,
    SimulatedExecutor,
    StepResult,
    StepWork,
    Windows,
)
from kvcore.serving.stats import RunLog
from kvcore_plugins.drafter.stats import DraftStats


class SpeculativeExecutor(Executor, Protocol):
    """An executor whose steps verify the drafts of its drafter."""

    def speculate(
        self,
        work: StepWork,
        chunks: Sequence[tuple[Job, int]],
        decoding: Sequence[Job],
        limits: Sequence[int],
    ) -> StepResult:
        """Run one step, as `run` does, with at most `limits[i]` drafts for `decoding[i]`.

        `verified` of the result has an entry for each decoding job.
        """


class SpeculativeSimulator(SimulatedExecutor):
    """Computes nothing: the drafter gives accepted drafts, the latency model the time."""

    def __init__(self, latency: LatencyModel, drafter: Drafter) -> None:
        super().__init__(latency)
        if find_override(drafter, "accepted") is None:
            msg = (
                f"drafter {drafter.name!r} drafts from tokens, and a simulation has none: take "
                "drafter `acceptance`, with the probabilities that a run on tensors measured"
            )
            raise InputError(msg)
        drafter.check_unused()  # `Speculation` binds it, once nothing refuses the run
        drafter.attach(latency)
        self.drafter: Drafter = drafter
        self.jumps = False
        self.plugins: Any = (latency, drafter)

    def speculate(
        self,
        work: StepWork,
        chunks: Sequence[tuple[Job, int]],
        decoding: Sequence[Job],
        limits: Sequence[int],
    ) -> StepResult:
        """Return the numbers of drafts and of accepted ones by the drafter, and the time."""
        accepted = self.drafter.accepted
        verified = [
            accepted(job.request, job.generated, limit) if limit else (0, 0)
            for job, limit in zip(decoding, limits, strict=True)
        ]
        drafts = [drafted for drafted, _ in verified]
        took_ps = step_ps(self.latency, self.drafter, work, decoding, drafts)
        return StepResult(took_ps, verified=verified)


def step_ps(
    latency: LatencyModel,
    drafter: Drafter,
    work: StepWork,
    decoding: Sequence[Job],
    drafts: Sequence[int],
) -> int:
    """Return the picoseconds of a step that verifies `drafts`, and of drafting them."""
    verified = with_drafts(work, decoding, drafts, latency.windows)
    return latency.duration(verified) + drafter.duration(work, drafts)


def with_drafts(
    work: StepWork, decoding: Iterable[Job], drafts: Sequence[int], windows: Windows
) -> StepWork:
    """Return the work of a step that verifies drafts as well.

    A draft is computed as a prompt token is, after all of its sequence: K/V of the sequence
    is read once, for its newest token, and every draft attends to it.
    """
    total = sum(drafts)
    if not total:
        return work
    drafted = [
        (job.length + 1, count) for job, count in zip(decoding, drafts, strict=True) if count
    ]
    pairs = tuple(
        others + sum(attended_pairs(context, count, window) for context, count in drafted)
        for others, window in zip(work.attended_pairs, windows, strict=True)
    )
    return StepWork(work.prefill + total, pairs, work.decode, work.context)


class Speculation:
    """The part of a serving loop by which decode steps verify drafts.

    A step gives 1 to k + 1 tokens to each decoding sequence. Before it the sequence gets slots
    for its drafts. Their number is at most k, the tokens that it still needs beside the model's
    own one, the rest of `max_tokens` beside prefill, and the room in free or evictable blocks:
    drafts preempt no job. After the step the slots of rejected drafts are rolled back, before
    a block is committed: shared blocks hold only accepted tokens. Steps are run one by one.

    Args:
        drafter: drafts the tokens, or gives the number that is accepted.
        executor: runs the steps.
        cache, batch, batcher, log: those of the loop. The log counts the drafts.
    """

    def __init__(
        self,
        drafter: Drafter,
        executor: SpeculativeExecutor,
        cache: KVCache,
        batch: DecodeBatch,
        batcher: Batcher,
        log: RunLog,
    ) -> None:
        if isinstance(executor, SpeculativeSimulator):  # on tensors the executor binds it
            drafter.bind()
        self._drafter, self._executor = drafter, executor
        self._cache, self._batch, self._batcher, self._log = cache, batch, batcher, log
        self._stats = log.drafts = DraftStats()
        # Of the step that has begun: the decoding jobs, the most drafts of each, those jobs
        # that were extended by slots for drafts, and the work and its result.
        self._jobs: list[Job] = []
        self._limits: list[int] = []
        self._extended: set[Job] = set()
        self._step: tuple[StepWork, StepResult] | None = None

    def compute(
        self,
        work: StepWork,
        chunks: Sequence[tuple[Job, int]],
        decoding: Iterable[Job],
        now: int,
    ) -> StepResult:
        """Run a step that begins at `now` (ns), with slots for the drafts of its jobs."""
        self._jobs = [*decoding]
        self._limits = self._extend(work.prefill, now)
        result = self._executor.speculate(work, chunks, self._jobs, self._limits)
        self._step = work, result
        return result

    def _extend(self, prefill: int, now: int) -> list[int]:
        """Allocate slots for drafts; return the most drafts of each job of the step."""
        cache = self._cache
        most, size = self._drafter.tokens, cache.geometry.block_size
        left = self._batcher.batching.max_tokens - prefill - len(self._jobs)
        limits = []
        for job in self._jobs:
            seq, count = job.seq, min(most, job.output_left - 1, left)
            assert seq is not None
            if count > 0:
                # The slots behind the newest token in its block are allocated already.
                length = job.length + 1
                slots = -length % size
                count = min(count, slots + cache.available_blocks * size)
                if count > slots:
                    cache.settle(seq, length)
                    cache.extend(seq, count, now)
                    self._extended.add(job)
                left -= count
            limits.append(max(count, 0))
        return limits

    def settle(self, took_ps: int, now: int) -> None:
        """Give the jobs of a step, which ended at `now` (ns), their accepted drafts.

        The slots of the other drafts are rolled back. The step took `took_ps` picoseconds.
        """
        assert self._step is not None
        (work, result), self._step = self._step, None
        cache, batch, stats = self._cache, self._batch, self._stats
        extended, gained = self._extended, 0
        for job, limit, (drafted, accepted) in zip(
            self._jobs, self._limits, result.verified, strict=True
        ):
            if job.stage != DECODE:
                continue  # it was aborted while the step ran
            stats.outcomes[drafted, accepted] += 1
            if accepted:
                batch.gain(job, accepted)
                gained += accepted
            if job in extended:
                assert job.seq is not None
                cache.rollback(job.seq, limit - accepted, now)
        extended.clear()
        if gained:
            # Accepted drafts come at the same moment as the token after them: gaps of 0.
            self._log.itl.pending.append((0, 0, 1, gained))
        if work.decode and not work.prefill and self._executor.mode == "model":
            # Without drafts each such step gives a token to each sequence.
            plain_ps = self._executor.latency.duration(work)
            stats.plain_ps += plain_ps * (work.decode + gained) // work.decode
            stats.took_ps += took_ps

    def commit(self, now: int) -> None:
        """Commit the blocks that jobs have filled, which lie anywhere in a step's tokens."""
        size = self._cache.geometry.block_size
        jobs = [job for committing in self._batch.committing.values() for job in committing]
        for job in sorted(jobs, key=admission_of):
            seq = job.seq
            assert seq is not None
            full = job.length - job.length % size
            if full > seq.computed:
                self._cache.settle(seq, job.length)
                self._cache.commit(seq, full - seq.computed, now)
                self._batcher.computed()

    def break_off(self, now: int) -> None:
        """Roll back the slots of drafts of a step that will not end."""
        for job, limit in zip(self._jobs, self._limits, strict=True):
            if job in self._extended:
                assert job.seq is not None
                self._cache.rollback(job.seq, limit, now)
