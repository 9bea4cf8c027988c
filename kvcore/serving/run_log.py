"""What a run records of its requests: columns with one row a request."""

from __future__ import annotations

from array import array

from kvcore.request import SLO
from kvcore.serving.scheduler import Job
from kvcore.serving.stats import PoolTimeline, TokenGaps
from kvcore.units import PS_PER_NS

UNJUDGED, MISSED, MET = -1, 0, 1
"""How a request fared by its SLO: nothing can be judged, it has missed it, it has met it."""


class RunLog:
    """Columns of a run, one row a request, in the order in which these ended.

    Attributes:
        slo: what is expected for requests that bring no SLO of their own.
        ids, tenants: of the requests.
        arrival, admitted, first_token, finish: their times, ns; -1 where there is none.
        prompt, output, hit, pauses, recomputes: their numbers.
        verdict: how they fared by their SLO.
        reasons: why the request of a row was rejected; the others have finished.
        itl: times between two tokens of a request.
        pool: the pool's blocks over time.
        steps, busy_ps: steps run, and the picoseconds they took.
        own_slos: requests that brought an SLO of their own.
    """

    def __init__(self, blocks: int, slo: SLO | None = None) -> None:
        self.slo = slo
        self.ids: list[int | str] = []
        self.tenants: list[str | None] = []
        self.arrival, self.admitted = array("q"), array("q")
        self.first_token, self.finish = array("q"), array("q")
        self.prompt, self.output, self.hit = array("q"), array("q"), array("q")
        self.pauses, self.recomputes, self.verdict = array("i"), array("i"), array("b")
        self.reasons: dict[int, str] = {}
        self.itl = TokenGaps()
        self.pool = PoolTimeline(blocks)
        self.steps = self.busy_ps = self.own_slos = 0

    def ended(self, job: Job, now: int) -> None:
        """Record a finished request."""
        request = job.request
        self.own_slos += request.slo is not None
        self.verdict.append(UNJUDGED if job.slo is None else _verdict(job, job.slo, now))
        self.ids.append(request.id)
        self.tenants.append(request.tenant)
        self.arrival.append(job.arrival)
        self.admitted.append(-1 if job.admitted is None else job.admitted)
        self.first_token.append(-1 if job.first_token is None else job.first_token)
        self.finish.append(now)
        self.prompt.append(request.prompt_tokens)
        self.output.append(job.output_tokens)
        self.hit.append(job.hit)
        self.pauses.append(job.pauses)
        self.recomputes.append(job.recomputes)

    def rejected(self, job: Job, why: str) -> None:
        """Record a rejected request."""
        self.reasons[len(self.ids)] = why
        self.ended(job, -1)
        if job.slo is not None and job.slo != SLO():
            self.verdict[-1] = MISSED

    def tpot(self) -> list[int]:
        """Return the mean picoseconds of the tokens after the first by row; -1 for none."""
        columns = self.first_token, self.finish, self.output
        return [
            (finish - first) * PS_PER_NS // (output - 1) if finish >= 0 and output > 1 else -1
            for first, finish, output in zip(*columns, strict=True)
        ]


def _verdict(job: Job, slo: SLO, now: int) -> int:
    """Judge a job that finished at `now` by what it has samples of."""
    arrival, first, output = job.arrival, job.first_token, job.output_tokens
    verdict = UNJUDGED
    if slo.deadline_ns is not None:
        verdict = MET if now - arrival <= slo.deadline_ns else MISSED
    if first is not None and verdict != MISSED:
        if slo.ttft_ns is not None:
            verdict = MET if first - arrival <= slo.ttft_ns else MISSED
        if slo.tpot_ns is not None and output > 1 and verdict != MISSED:
            verdict = MET if now - first <= slo.tpot_ns * (output - 1) else MISSED
    return verdict
