"""What a run leaves to be counted: a few numbers an event, nothing a token."""

from __future__ import annotations

from array import array

from kvcore.policy import Job
from kvcore.request import SLO
from kvcore.serving.decoding import Decoders
from kvcore.serving.steps import StepTimes


class RunLog:
    """Columns of a run, one row a request, a stretch of steps, or an event.

    Attributes:
        ids, tenants: of the requests that ended, in the order in which they did.
        arrival, admitted, first_token, finish: their times, ns; -1 where there is none.
        prompt, output, hit, pauses, recomputes: their numbers.
        rejected: ids of those that were rejected, with the reasons.
        segments: stretches of steps after which every job had its next token: time of the
            first step, what each next one takes more (ps), steps, jobs.
        gaps: picoseconds between two tokens of one job, where that is not one step.
        times, free, evictable: the pool's blocks after each event, and when (ns).
        steps, busy: steps run, and the picoseconds they took.
        prefill, pairs, decode, context: what they computed, summed over all `Batch`es.
    """

    def __init__(self, windows: int, slo: SLO | None = None) -> None:
        """Start empty, for a number of attention windows and the SLO of most requests."""
        self.slo = slo
        self.ids: list[int | str] = []
        self.rejected: dict[int | str, str] = {}
        self.arrival, self.admitted = array("q"), array("q")
        self.first_token, self.finish = array("q"), array("q")
        self.prompt, self.output, self.hit = array("q"), array("q"), array("q")
        self.pauses, self.recomputes = array("q"), array("q")
        self.times, self.free, self.evictable = array("q"), array("i"), array("i")
        self.segments = tuple(array("q") for _ in range(4))
        self.gaps = array("q")
        self.steps = self.busy = 0
        self.prefill = self.decode = 0
        self.pairs, self.context = [0] * windows, [0] * windows

    def ended(self, job: Job, now: int) -> None:
        """Take in a request that has finished."""
        request = job.request
        self.ids.append(request.id)
        self.arrival.append(job.arrival)
        self.admitted.append(-1 if job.admitted is None else job.admitted)
        self.first_token.append(-1 if job.first_token is None else job.first_token)
        self.finish.append(now)
        self.prompt.append(request.prompt)
        self.output.append(request.output)
        self.hit.append(job.hit)
        self.pauses.append(job.pauses)
        self.recomputes.append(job.recomputes)

    def pool(self, now: int, free: int, evictable: int) -> None:
        """Take in the state of the pool at `now` (ns)."""
        self.times.append(now)
        self.free.append(free)
        self.evictable.append(evictable)

    def tokens(self, decoders: Decoders, start: int, times: StepTimes, steps: int) -> None:
        """Take in the tokens of `steps` decode steps that begin at `start` (ps)."""
        jobs, fresh = decoders.jobs, decoders.fresh
        stall = 0 if len(fresh) == jobs else start - decoders.decoded_at
        skip = 0
        if stall or any(job.last_token != start for job in fresh):
            skip = 1
            first = times.total(1)
            self.gaps.extend([start + first - job.last_token for job in fresh])
            self.gaps.extend([stall + first] * (jobs - len(fresh)))
        firsts, slopes, counts, widths = self.segments
        for first, slope, count in times.segments(steps):
            if count > skip:
                firsts.append(first + slope * skip)
                slopes.append(slope)
                counts.append(count - skip)
                widths.append(jobs)
            skip = 0
