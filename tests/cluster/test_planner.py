"""Planners of clusters: their formulas by hand, and their errors."""

from collections import deque
from math import nan

import attrs
import pytest

from kvcore import SLO, InputError
from kvcore_cluster.planner import (
    Demand,
    LoadPlanner,
    Profile,
    ThroughputPlanner,
    regression,
)
from kvcore_plugins.latency import TokenRate

SECOND = 10**9
SERVER = Profile(TokenRate(prefill=1, decode=0.01), tokens=100_000, max_seqs=64)
"""A prompt of 1,000 tokens takes 1 s; a batch of any size decodes 10 tokens per second."""


def wanted(planner, demand, *, replicas=3, phase="both", **slo):
    """Return the number of replicas that `planner` wants, with an SLO in seconds."""
    expected = SLO(**{f"{name}_ns": int(each * SECOND) for name, each in slo.items()})
    return planner.wanted(demand, replicas, SERVER, expected, phase)


def test_a_replica_prefills_as_fast_as_its_queue_allows():
    """The prefill rate R satisfies TTFT = D + R D^2 / (2 (1 - R D)) for a prefill time D."""
    rate = SERVER.prefill_rps(1000, ttft_s=2.0)
    took = SERVER.prefill_s(1000)
    assert took == pytest.approx(1.0)
    assert took + rate * took**2 / (2 * (1 - rate * took)) == pytest.approx(2.0)


def test_the_largest_batch_that_is_fast_enough_decodes():
    """Decoding uses the largest batch whose step is within the limit, here 5 in 0.5 s."""
    assert SERVER.decode_rps(100, 20, 120, 0.5) == pytest.approx(5 / (20 * 0.5))


def test_the_pool_bounds_the_batch():
    """The batch is at most as many sequences as the pool holds."""
    assert SERVER.decode_rps(100, 20, 50_000, None) == pytest.approx(2 / (20 * 0.2))


def test_prefill_replicas_follow_from_the_rate_of_tokens():
    """Prefill replicas are the rate of uncached tokens over that of one replica.

    They are at most as many as a cluster may have, also where the rate is infinite.
    """
    demand = Demand(seconds=10, requests=30, prompt_tokens=2000, output_tokens=10, hit=0.5)
    assert wanted(ThroughputPlanner(), demand, phase="prefill") == 3
    assert wanted(ThroughputPlanner(headroom=1.2), demand, phase="prefill") == 4
    assert wanted(ThroughputPlanner(headroom=1e308), demand, phase="prefill") == 10_000


def test_decode_replicas_follow_from_the_rate_of_requests():
    """Decode replicas are the request rate over that of one replica."""
    demand = Demand(seconds=10, requests=40, prompt_tokens=100, output_tokens=10)
    assert wanted(ThroughputPlanner(), demand, phase="decode") == 4


def test_replicas_of_both_phases_are_the_sum():
    """Replicas of both phases are the sum of the prefill and decode replicas."""
    demand = Demand(seconds=10, requests=40, prompt_tokens=500, output_tokens=10)
    assert wanted(ThroughputPlanner(), demand) == 2 + 4


def test_decode_replicas_stay_where_no_output_is_known():
    """Where no request has ended none is removed that decodes: its work is not known."""
    demand = Demand(seconds=10, requests=1, prompt_tokens=100)
    found = [
        wanted(ThroughputPlanner(), demand, phase=p) for p in ("prefill", "decode", "both")
    ]
    assert found == [1, 3, 3]
    ended = attrs.evolve(demand, latency=0.1)
    assert wanted(ThroughputPlanner(), ended, phase="both") == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"least": 2, "start": 1}, "least <= start <= most"),
        ({"start_up": nan}, "an interval above 0 s"),
        ({"margin": -0.5}, "margin=-0.5: give a share above 0, up to 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, why):
    """Bounds that exclude the start, a time that is none, and no share are refused."""
    with pytest.raises(InputError, match=why):
        LoadPlanner(**options)


def test_load_adds_a_replica_above_the_slo():
    """Above the SLO `load` adds a replica; far below it, it removes one."""
    slow = Demand(seconds=10, requests=5, load=1000, latency=3.0)
    assert wanted(LoadPlanner(), slow, ttft=2) == 4
    fast = Demand(seconds=10, requests=5, load=1000, latency=0.1)
    assert wanted(LoadPlanner(), fast, ttft=2) == 2


def test_load_keeps_replicas_that_the_others_cannot_replace():
    """`load` removes no replica if the others would exceed 0.8 of the SLO."""
    demand = Demand(seconds=10, requests=5, load=1000, latency=1.2)
    assert wanted(LoadPlanner(), demand, ttft=2) == 3


def test_the_regression_is_that_of_least_squares():
    """The regression is the line of least squares, or proportional for a single load."""
    assert regression(deque([(0, 1), (1, 2), (2, 6)])) == pytest.approx((0.5, 2.5))
    assert regression(deque([(2, 4)])) == pytest.approx((0, 2))
