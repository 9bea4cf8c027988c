"""The jobs that generate: what k steps of them need, without touching any of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import TypeAlias

from kvcore.serving.latency import Windows
from kvcore.serving.scheduler import DecodeSteps, Job

End: TypeAlias = tuple[int, int, int, Job]
"""(step at which a job finishes, its admission, its residue class, the job)."""


def _admission(job: Job) -> int:
    assert job.seq is not None
    return job.seq.admission


class Decoders:
    """Jobs that generate a token with every decode step, and nothing done per token.

    Lengths are one step counter away from what they were when a job joined. Finishing is a
    heap of step numbers. Growing is counted by residue class: a job with L tokens that joins
    at step d needs a block at every step s with s = d - L modulo the block size.

    Attributes:
        steps: the step counter.
        jobs: how many there are.
        context: what the next step attends to, by attention window: without one, the
            lengths of all jobs, the new token included.
        growth: by how much a step makes it longer.
        grown: the first step whose growth has not been allocated.
        fresh: those that joined after the last step.
        committing: those that commit every block they fill, by residue class: because they
            share what they generate, or may forget it.
        decoded_at: when (ps) the last step ended.
    """

    def __init__(
        self,
        steps: DecodeSteps,
        block_size: int,
        windows: Windows,
        *,
        forgetting: bool = False,
    ) -> None:
        """Start without jobs; `forgetting` says that they may forget what they generate."""
        self.steps = steps
        self.jobs = 0
        self.context = [0 for _ in windows]
        self.growth = [0 for _ in windows]
        self.grown = 0
        self.fresh: list[Job] = []
        self.decoded_at = 0
        self._size = block_size
        self._windows = windows
        self._plain = windows == (None,)
        self._forgetting = forgetting
        self._classes: dict[int, list[Job]] = {}
        self._residues: list[int] = []
        self.committing: dict[int, list[Job]] = {}
        self._finish: list[End] = []
        self._ends: dict[Job, End] = {}
        self._full: list[tuple[int, int, int, Job]] = []
        self._full_at: dict[tuple[Job, int], int] = {}

    def __iter__(self) -> Iterator[Job]:
        """Yield the jobs in the order in which they joined."""
        return iter(self._ends)

    def add(self, job: Job, generated: int) -> None:
        """Let `job`, with `generated` tokens so far, generate from the next step on."""
        request, seq, count = job.request, job.seq, self.steps.count
        assert seq is not None
        job.join(generated)
        length = request.prompt_tokens + generated - 1
        residue = (count - length) % self._size
        end = (count + request.output_tokens - generated, seq.admission, residue, job)
        self._ends[job] = end
        heappush(self._finish, end)
        self.jobs += 1
        self.fresh.append(job)
        insort(self._residues, residue)
        _put(self._classes, residue, job, seq.admission)
        if request.publishes or self._forgetting:
            _put(self.committing, residue, job, seq.admission)
        attended = length + 1 - seq.dropped * self._size
        if self._plain:
            self.context[0] += attended
            self.growth[0] += 1
        else:
            self._attend(job, attended, seq.admission)

    def remove(self, job: Job) -> None:
        """Let `job` generate no more. O(jobs of its residue class)."""
        self.jobs -= 1
        if job in self.fresh:
            self.fresh.remove(job)
        else:
            job.last_token = self.decoded_at
        residue = self._ends.pop(job)[2]
        del self._residues[bisect_left(self._residues, residue)]
        _drop(self._classes, residue, job)
        if job.request.publishes or self._forgetting:
            _drop(self.committing, residue, job)
        assert job.seq is not None
        attended = job.request.prompt_tokens + job.leave() - job.seq.dropped * self._size
        if self._plain:
            self.context[0] -= attended
            self.growth[0] -= 1
        else:
            self._forget(job, attended)

    def forgot(self, job: Job, tokens: int) -> None:
        """Learn that `job` has just forgotten `tokens` tokens."""
        assert job.seq is not None
        if self._plain:
            self.context[0] -= tokens
        else:
            attended = job.length + 1 - job.seq.dropped * self._size
            self._forget(job, attended + tokens)
            self._attend(job, attended, job.seq.admission)

    def end(self, job: Job) -> None:
        """Let `job` finish with the step that runs."""
        _, admission, residue, _ = self._ends[job]
        end = self._ends[job] = (self.steps.count + 1, admission, residue, job)
        heappush(self._finish, end)

    def in_step(self, start: int) -> bool:
        """Say whether the newest token of every job came at `start` (ps)."""
        fresh = self.fresh
        if not fresh:
            return start == self.decoded_at
        if start != self.decoded_at and len(fresh) < self.jobs:
            return False
        for job in fresh:  # noqa: SIM110 - a generator costs more than most of these lists
            if job.last_token != start:
                return False
        return True

    def advance(self, steps: int, now: int) -> None:
        """Count `steps` steps, the last of which ends at `now` (ps)."""
        self.steps.count = count = self.steps.count + steps
        self.fresh.clear()
        self.decoded_at = now
        self.context[0] += self.growth[0] * steps
        if self._plain:
            return
        for place in range(1, len(self.growth)):
            self.context[place] += self.growth[place] * steps
        full = self._full
        while full and full[0][0] <= count:
            at, _, place, job = heappop(full)
            if self._full_at.get((job, place)) == at:
                del self._full_at[job, place]
                self.growth[place] -= 1

    def until_change(self) -> int:
        """Return after how many steps one finishes, fills a window, or commits a block."""
        finish, ends = self._finish, self._ends
        while ends.get(finish[0][3]) is not finish[0]:
            heappop(finish)
        count = self.steps.count
        steps = finish[0][0] - count
        if self._full:
            steps = min(steps, max(self._full[0][0] - count, 1))
        for residue in self.committing:
            steps = min(steps, (residue - count - 1) % self._size + 1)
        return steps

    def finished(self) -> list[Job]:
        """Return the jobs that have generated all they should."""
        finish, count = self._finish, self.steps.count
        done: list[Job] = []
        while finish and finish[0][0] <= count:
            end = heappop(finish)
            if self._ends.get(end[3]) is end:
                done.append(end[3])
        return done

    def committers(self) -> list[Job]:
        """Return the jobs that commit every block they fill and have just filled one."""
        return self.committing.get(self.steps.count % self._size, [])

    def growing(self, step: int) -> list[Job] | None:
        """Return the jobs that need a block at `step`, in order of admission, if any do."""
        return self._classes.get(step % self._size)

    def growth_between(self, first: int, end: int) -> int:
        """Count the blocks needed at the steps `[first, end)`. O(log jobs)."""
        turns, rest = divmod(end - first, self._size)
        residues = self._residues
        low = first % self._size
        high = low + rest
        count = bisect_left(residues, high) - bisect_left(residues, low)
        if high > self._size:
            count += bisect_left(residues, high - self._size)
        return turns * self.jobs + count

    def growing_between(self, first: int, end: int) -> Iterator[int]:
        """Yield the steps in `[first, end)` at which jobs need blocks."""
        size, classes = self._size, self._classes
        if end - first < len(classes):
            yield from (step for step in range(first, end) if step % size in classes)
            return
        offsets = sorted((residue - first) % size for residue in classes)
        for turn in range(first, end, size):
            for offset in offsets:
                if turn + offset >= end:
                    return
                yield turn + offset

    def _attend(self, job: Job, pairs: int, admission: int) -> None:
        """Count what `job` attends to next, in each window: it grows until that is full."""
        for place, window in enumerate(self._windows):
            if window is None or pairs < window:
                self.context[place] += pairs
                self.growth[place] += 1
                if window is not None:
                    full = self._full_at[job, place] = self.steps.count + window - pairs
                    heappush(self._full, (full, admission, place, job))
            else:
                self.context[place] += window

    def _forget(self, job: Job, pairs: int) -> None:
        for place, window in enumerate(self._windows):
            if window is None or pairs < window:
                self.context[place] -= pairs
                self.growth[place] -= 1
                self._full_at.pop((job, place), None)
            else:
                self.context[place] -= window


def _put(classes: dict[int, list[Job]], residue: int, job: Job, admission: int) -> None:
    jobs = classes.get(residue)
    if jobs is None:
        classes[residue] = [job]
    elif _admission(jobs[-1]) < admission:
        jobs.append(job)
    else:
        insort(jobs, job, key=_admission)


def _drop(classes: dict[int, list[Job]], residue: int, job: Job) -> None:
    jobs = classes[residue]
    jobs.remove(job)
    if not jobs:
        del classes[residue]
