"""What a run leaves to be counted: a few numbers an event, nothing a token."""

from __future__ import annotations

from array import array

from kvcore.policy import Job
from kvcore.request import SLO
from kvcore.serving.decoding import Decoders
from kvcore.serving.quantiles import Progressions
from kvcore.serving.steps import StepTimes
from kvcore.serving.timeline import PoolTimeline
from kvcore.units import PICOSECONDS

UNJUDGED, MISSED, MET = -1, 0, 1
"""How a request fared by its SLO: it has none, it has not met it, it has."""


class RunLog:
    """Columns of a run, one row a request, in the order in which these ended.

    Attributes:
        slo: what is expected for requests that bring no SLO of their own.
        ids, tenants: of the requests.
        arrival, admitted, first_token, finish: their times, ns; -1 where there is none.
        prompt, output, hit, pauses, recomputes: their numbers.
        verdict: how they fared by their SLO.
        reasons: why the request of a row was rejected; the others have finished.
        itl: picoseconds between two tokens of a request.
        pool: the pool's blocks over time.
        steps, busy: steps run, and the picoseconds they took.
        own_slos: requests that brought an SLO of their own.
    """

    def __init__(self, blocks: int, slo: SLO | None = None) -> None:
        """Start empty, for a pool and the SLO of most requests."""
        self.slo = slo
        self.ids: list[int | str] = []
        self.tenants: list[str | None] = []
        self.arrival, self.admitted = array("q"), array("q")
        self.first_token, self.finish = array("q"), array("q")
        self.prompt, self.output, self.hit = array("q"), array("q"), array("q")
        self.pauses, self.recomputes, self.verdict = array("i"), array("i"), array("b")
        self.reasons: dict[int, str] = {}
        self.itl = Progressions()
        self.pool = PoolTimeline(blocks)
        self.steps = self.busy = self.own_slos = 0

    def ended(self, job: Job, now: int) -> None:
        """Take in a request that has finished."""
        request = job.request
        self.own_slos += request.slo is not None
        self.verdict.append(UNJUDGED if job.slo is None else _verdict(job, job.slo, now))
        self.ids.append(request.id)
        self.tenants.append(request.tenant)
        self.arrival.append(job.arrival)
        self.admitted.append(-1 if job.admitted is None else job.admitted)
        self.first_token.append(-1 if job.first_token is None else job.first_token)
        self.finish.append(now)
        self.prompt.append(request.prompt)
        self.output.append(request.output)
        self.hit.append(job.hit)
        self.pauses.append(job.pauses)
        self.recomputes.append(job.recomputes)

    def rejected(self, job: Job, why: str) -> None:
        """Take in a request that was rejected."""
        self.reasons[len(self.ids)] = why
        self.ended(job, -1)
        if self.verdict[-1] != UNJUDGED:
            self.verdict[-1] = MISSED

    def tpot(self) -> list[int]:
        """Return the mean picoseconds of the tokens after the first by row; -1 for none."""
        columns = self.first_token, self.finish, self.output
        return [
            (finish - first) * PICOSECONDS // (output - 1) if finish >= 0 and output > 1 else -1
            for first, finish, output in zip(*columns, strict=True)
        ]

    def gap(self, time: int) -> None:
        """Take in the picoseconds between two tokens of a request, where they are no step."""
        self.itl.add(time, 0, 1, 1)

    def step(self, decoders: Decoders, start: int, took: int) -> None:
        """Take in the tokens of a decode step that begins at `start` (ps)."""
        if (not decoders.fresh and start == decoders.decoded_at) or decoders.in_step(start):
            self.itl.add(took, 0, 1, decoders.jobs)
            return
        fresh = decoders.fresh
        for job in fresh:
            self.itl.add(start + took - job.last_token, 0, 1, 1)
        if len(fresh) < decoders.jobs:
            gap = start + took - decoders.decoded_at
            self.itl.add(gap, 0, 1, decoders.jobs - len(fresh))

    def jump(self, decoders: Decoders, start: int, times: StepTimes, steps: int) -> None:
        """Take in the tokens of `steps` decode steps, the first of which begins at `start`."""
        even = decoders.in_step(start)
        if not even:
            self.step(decoders, start, times.total(1))
        for first, slope, count in times.segments(steps):
            if even:
                self.itl.add(first, slope, count, decoders.jobs)
            elif count > 1:
                self.itl.add(first + slope, slope, count - 1, decoders.jobs)
            even = True


def _verdict(job: Job, slo: SLO, now: int) -> int:
    """Judge a job that finished at `now`. What it has no sample of, it cannot miss."""
    arrival, first, output = job.arrival, job.first_token, job.request.output
    met = slo.deadline is None or now - arrival <= slo.deadline
    if first is not None:
        met &= slo.ttft is None or first - arrival <= slo.ttft
        met &= slo.tpot is None or now - first <= slo.tpot * (output - 1)
    return MET if met else MISSED
