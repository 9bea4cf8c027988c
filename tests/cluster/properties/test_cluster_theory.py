"""Clusters against queueing theory: replicas of one sequence, a token a microsecond."""

from itertools import islice
from math import factorial
from typing import ClassVar

import attrs
import pytest
from helpers.clusters import RandomRouter, serve_cluster
from helpers.queueing import EXPONENTIAL, LOAD, REQUESTS, SERVICE, arrivals, check

from kvcore import Router
from kvcore_cluster.router import LeastRequests
from kvcore_plugins.latency import TokenRate


@attrs.define(eq=False)
class LeastWork(Router):
    """A router to the replica with the least work, which knows the duration of each request."""

    name: ClassVar[str] = "least-work"
    uses_hits: ClassVar[bool] = False
    _free_at: dict[int, int] = attrs.field(factory=dict, init=False)

    def route(self, request, replicas, now):
        """Return the replica that finishes its assigned requests first."""
        chosen = min(replicas, key=lambda each: self._free_at.get(each.number, 0))
        begin = max(now, self._free_at.get(chosen.number, 0))
        self._free_at[chosen.number] = begin + 1000 * request.output_tokens
        return chosen


@attrs.define(eq=False)
class InFlight(LeastRequests):
    """A `least-requests` router that integrates the requests in flight over time."""

    name: ClassVar[str] = "in-flight"
    _since: dict[int, tuple[int, int]] = attrs.field(factory=dict, init=False)
    area: dict[int, int] = attrs.field(factory=dict, init=False)

    def on_routed(self, request, replica, now):
        """Count the time before the arrival of this request."""
        self._add(replica, now)

    def on_ended(self, request, replica, now):
        """Count the time before the end of this request."""
        self._add(replica, now)

    def _add(self, replica, now):
        before, requests = self._since.get(replica.number, (0, 0))
        self.area[replica.number] = self.area.get(replica.number, 0) + requests * (now - before)
        self._since[replica.number] = now, replica.requests


def run(servers, router, requests=REQUESTS):
    """Serve exponential work at a load of 0.7; return the result, and rows by arrival."""
    done = serve_cluster(
        islice(arrivals(EXPONENTIAL, servers=servers), requests),
        servers,
        router=router,
        latency=lambda: TokenRate(prefill=1000, decode=1000),
        blocks=5000,
        block_size=1 << 20,
        max_seqs=1,
        trace=False,
    )
    columns = done.result.requests
    order = sorted(range(len(columns["id"])), key=columns["id"].__getitem__)
    return done.result, {name: [columns[name][i] for i in order] for name in columns}


def responses(rows):
    """Return the times from arrival to finish, in service times."""
    times = zip(rows["arrival_s"], rows["finish_s"], strict=True)
    return [(finish - arrival) * 1e9 / SERVICE for arrival, finish in times]


def test_random_routing_makes_m_m_1():
    """Each of three replicas chosen at random has the mean response 1 / (1 - load) of M/M/1."""
    _, rows = run(3, RandomRouter())
    check(responses(rows), 1 / (1 - LOAD))


def test_least_work_left_makes_m_m_c():
    """Requests routed to the least work left wait as in one queue for all servers, M/M/c.

    Source of the waiting time: Erlang, 1917; of the equivalence: Harchol-Balter, Crovella and
    Murta, "On choosing a task assignment policy for a distributed server system", 1999.
    """
    servers = 4
    _, rows = run(servers, LeastWork())
    work = LOAD * servers
    last = work**servers / factorial(servers) / (1 - LOAD)
    waits = last / (sum(work**k / factorial(k) for k in range(servers)) + last)
    check(responses(rows), 1 + waits / (servers * (1 - LOAD)))


def test_least_requests_joins_the_shortest_queue():
    """Two replicas under `least-requests` have the mean response of the shortest queue."""
    _, rows = run(2, LeastRequests())
    check(responses(rows), response_of_shortest_queue(LOAD))


@pytest.mark.parametrize(("load", "expected"), [(0.5, 1.42632), (0.7, 2.10820)])
def test_the_formula_of_the_shortest_queue(load, expected):
    """`response_of_shortest_queue` gives the means of solving its equations by elimination."""
    assert response_of_shortest_queue(load) == pytest.approx(expected, abs=2e-4)


def test_littles_law():
    """On each replica, the integral of requests in flight is the sum of their times."""
    router = InFlight()
    result, rows = run(3, router, requests=2000)
    for replica in range(3):
        spent = sum(
            round((finish - arrival) * 1e9)
            for arrival, finish, at in zip(
                rows["arrival_s"], rows["finish_s"], rows["replica"], strict=True
            )
            if at == replica
        )
        assert router.area[replica] == pytest.approx(spent, rel=1e-9)
    assert sum(result.served) == len(rows["id"])


def response_of_shortest_queue(load, most=24):
    """Return the mean response of two exponential servers, in service times.

    It solves the balance equations of the chain (shorter, longer queue), cut off at `most`, by
    Gauss-Seidel sweeps. Source of the chain: Adan, Wessels and Zijm, "Analysis of the symmetric
    shortest queue problem", Stochastic Models 6, 1990.
    """
    rate = 2 * load
    states = [(m, n) for n in range(most + 1) for m in range(n + 1)]
    into = {state: [] for state in states}
    leaving = dict.fromkeys(states, 0.0)
    for m, n in states:
        moves = [((m + 1, n), rate)] if m < most else []
        moves += [((m - 1, n), 1)] if m else []
        moves += [((m, n - 1), 1)] if n else []
        for after, speed in moves:
            into[min(after), max(after)].append(((m, n), speed))
            leaving[m, n] += speed
    share = dict.fromkeys(states, 1.0)
    for _ in range(400):
        for state in states:
            flow = sum(share[before] * speed for before, speed in into[state])
            share[state] = flow / leaving[state]
        total = sum(share.values())
        share = {state: each / total for state, each in share.items()}
    return sum((m + n) * each for (m, n), each in share.items()) / rate
