"""The simulator against queueing theory: one sequence at a time, a token a microsecond.

Arrivals are Poisson, a job's output is its service time, and its prompt a single token. The
tolerance depends on the run (`helpers.queueing.check`).
"""

from math import fsum

import pytest
from helpers.queueing import (
    EXPONENTIAL,
    FIXED,
    LOAD,
    REQUESTS,
    SERVICE,
    UNIFORM,
    arrivals,
    check,
)
from helpers.serving import serve

from kvcore_plugins.latency import TokenRate
from kvcore_plugins.scheduler import SRPT


def run(requests, **options):
    """Serve requests one at a time; return the rows in order of arrival.

    Preemptions happen between steps.
    """
    latency = TokenRate(prefill=1000, decode=1000)
    room = {"blocks": REQUESTS, "block_size": 1 << 20, "key_tokens": 1 << 20}
    done = serve(requests, latency=latency, max_seqs=1, trace=False, **room, **options)
    return [done.rows[index] for index in range(REQUESTS)]


def waits(rows):
    """Return the times in the queue, in service times."""
    return [(row["admitted"] - row["arrival"]) / SERVICE for row in rows]


def test_waiting_of_m_d_1():
    """Constant service has half the mean wait of exponential service, load / (1 - load)."""
    check(waits(run(arrivals(FIXED))), LOAD / (1 - LOAD) / 2)


def test_response_of_m_g_1_srpt():
    """`srpt`, preempting by pause, has the mean response of the formula for M/G/1."""
    rows = run(arrivals(UNIFORM), scheduler=SRPT())
    assert sum(row["pauses"] for row in rows) > REQUESTS / 10
    assert sum(row["recomputes"] for row in rows) == 0
    responses = [(row["finish"] - row["arrival"]) / SERVICE for row in rows]
    check(responses, mean_response_of_srpt(UNIFORM, LOAD))


def test_waits_follow_lindleys_recursion():
    """Under FCFS each wait follows from the one before, to the nanosecond.

    Source: Lindley, "The theory of queues with a single server", 1952.
    """
    requests = list(arrivals(EXPONENTIAL))
    rows = run(requests)
    free_at = 0
    for request, row in zip(requests, rows, strict=True):
        begin = max(request.arrival, free_at)
        free_at = begin + 1000 * request.output_tokens
        assert (row["admitted"], row["finish"]) == (begin, free_at)


@pytest.mark.parametrize(("load", "expected"), [(0.5, 1.425), (0.8, 2.353), (0.9, 3.552)])
def test_the_formula_of_srpt(load, expected):
    """`mean_response_of_srpt` gives the known means of M/M/1 under SRPT."""
    assert mean_response_of_srpt(EXPONENTIAL, load) == pytest.approx(expected, abs=1e-3)


def mean_response_of_srpt(service, load, parts=20_000):
    """Return the mean response of M/G/1 under SRPT in service times, by the midpoint rule.

    The wait of a job of size x until it is served for the first time is
    (integral of t² dF up to x + x² (1 - F(x))) · load / 2 / (1 - load(x))², and then it takes
    the integral of dt / (1 - load(t)) up to x.

    Source: Schrage and Miller, "The queue M/G/1 with the shortest remaining processing time
    discipline", Operations Research 14(4), 1966.
    """
    width = service.longest / parts
    share = work = square = residence = 0.0
    terms = []
    for part in range(parts):
        x = (part + 0.5) * width
        mass = service.density(x) * width
        # Half of this part lies below its middle.
        share, work, square = share + mass / 2, work + x * mass / 2, square + x * x * mass / 2
        free = 1 - load * work
        wait = load * (square + x * x * (1 - share)) / (2 * free * free)
        terms.append(mass * (wait + residence + width / 2 / free))
        residence += width / free
        share, work, square = share + mass / 2, work + x * mass / 2, square + x * x * mass / 2
    return fsum(terms)
