"""Margins between schedulers, with long and short jobs on a loaded server."""

from random import Random
from statistics import mean

import attrs
import pytest
from helpers.serving import ask, serve

from kvcore import SLO
from kvcore_plugins.latency import TokenRate
from kvcore_plugins.scheduler import FCFS, SRPT, LeastSlack

SEATS = 4
RATE = 10
"""Tokens a millisecond, of all running sequences together."""

SECOND = 10**9


@attrs.frozen
class Class:
    """A class of jobs: their output in tokens, their deadline in seconds, their weight."""

    output: int
    deadline: float
    weight: int = 1


LONG, SHORT = 1000, 50
ALONE = LONG * SEATS / RATE / 1000
"""Seconds that a long job takes if `SEATS` sequences run."""

TIGHT_AND_LOOSE = Class(LONG, 2 * ALONE), Class(SHORT, 20)
ALL_ALIKE = Class(LONG, 5 * ALONE), Class(SHORT, 5 * ALONE, weight=4)


def traffic(load, classes, requests=1200):
    """Yield random jobs of `classes` at `load` times the capacity of the server."""
    random, now = Random(0), 0.0
    weights = [cls.weight for cls in classes]
    tokens = sum(cls.weight * cls.output for cls in classes) / sum(weights)
    for index in range(requests):
        now += random.expovariate(load * RATE * 1000 / tokens)
        (job,) = random.choices(classes, weights)
        slo = SLO(deadline_ns=int(job.deadline * SECOND))
        yield ask(index, int(now * SECOND), prompt=10, output=job.output, slo=slo)


def outcome(load, classes, scheduler):
    """Return the share of jobs that meet their deadline, and the mean seconds they take."""
    latency = TokenRate(prefill=10_000, decode=RATE)
    requests = list(traffic(load, classes))
    run = serve(
        requests,
        scheduler=scheduler,
        latency=latency,
        max_seqs=SEATS,
        trace=False,
    )
    took = [run.rows[request.id]["finish"] - request.arrival for request in requests]
    met = [
        time <= request.slo.deadline_ns for time, request in zip(took, requests, strict=True)
    ]
    return mean(met), mean(took) / SECOND


def goodput(load, classes, scheduler):
    """Return the share of jobs that meet their deadline."""
    return outcome(load, classes, scheduler)[0]


@pytest.mark.parametrize("load", [0.9, 1.05])
def test_srpt_beats_fcfs_on_mean_time(load):
    """FCFS takes over 1.6 times as long as SRPT in the mean to the last token."""
    _, fcfs = outcome(load, ALL_ALIKE, FCFS())
    _, srpt = outcome(load, ALL_ALIKE, SRPT())
    assert fcfs > 1.6 * srpt


@pytest.mark.parametrize("load", [1.05, 1.2])
def test_slo_beats_both_if_long_jobs_have_tight_deadlines(load):
    """If long jobs have tight deadlines, `slo` meets over 1.6 times as many as the others.

    It runs long jobs first as long as short ones can wait; the others are FCFS and SRPT.
    """
    others = [goodput(load, TIGHT_AND_LOOSE, other) for other in (FCFS(), SRPT())]
    for preemptive in False, True:
        slo = goodput(load, TIGHT_AND_LOOSE, LeastSlack(preemptive=preemptive))
        assert slo > 0.88
        assert slo > 1.6 * max(others)


def test_srpt_beats_slo_if_all_deadlines_are_equal():
    """With equal deadlines at twice the capacity, SRPT meets 1.4 times as many as `slo`.

    `slo` begins with the long jobs, of which the server can finish fewer, but it still meets
    more than 3 times as many as FCFS.
    """
    slo, srpt, fcfs = (goodput(2, ALL_ALIKE, each) for each in (LeastSlack(), SRPT(), FCFS()))
    assert srpt > 1.4 * slo
    assert slo > 3 * fcfs
