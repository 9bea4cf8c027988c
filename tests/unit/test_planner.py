"""Planners: their formulas, by hand, and what they refuse."""

from collections import deque

import pytest

from kvcore import SLO, InputError
from kvcore.cluster.planner import (
    Demand,
    LoadPlanner,
    Profile,
    ThroughputPlanner,
    parse_planner,
    regression,
)
from kvcore_plugins.latency import TokenRate

SECOND = 10**9
SERVER = Profile(TokenRate(prefill=1, decode=0.01), tokens=100_000, max_seqs=64)
"""A prompt of 1,000 tokens takes a second, and so do 10 tokens of output, of any batch."""


def wanted(planner, demand, *, replicas=3, phase="both", **slo):
    """Return how many replicas `planner` wants, with an SLO in seconds."""
    expected = SLO(**{f"{name}_ns": int(each * SECOND) for name, each in slo.items()})
    return planner.wanted(demand, replicas, SERVER, expected, phase)


def test_a_replica_prefills_as_fast_as_its_queue_allows():
    """The rate R at which D + R D^2 / (2 (1 - R D)) is the TTFT that is expected."""
    rate = SERVER.prefill_rps(1000, ttft_s=2.0)
    took = SERVER.prefill_s(1000)
    assert took == pytest.approx(1.0)
    assert took + rate * took**2 / (2 * (1 - rate * took)) == pytest.approx(2.0)


@pytest.mark.parametrize("ttft", [None, 0.5])
def test_a_prefill_that_is_too_long_by_itself_keeps_it_busy(ttft):
    """No TTFT, or one that waiting less does not reach: the rate of a busy replica."""
    assert SERVER.prefill_rps(1000, ttft) == pytest.approx(1.0)


def test_the_largest_batch_that_is_fast_enough_decodes():
    """A step of n sequences takes n / 10 s: within 0.5 s that is 5, for 20 steps each."""
    assert SERVER.decode_rps(100, 20, 120, 0.5) == pytest.approx(5 / (20 * 0.5))


def test_the_pool_bounds_the_batch():
    """With 50,000 tokens a sequence, 2 fit."""
    assert SERVER.decode_rps(100, 20, 50_000, None) == pytest.approx(2 / (20 * 0.2))


def test_prefill_replicas():
    """3 requests a second of 2,000 tokens, half of which hit, at 1 a second for each."""
    demand = Demand(seconds=10, requests=30, prompt_tokens=2000, output_tokens=10, hit=0.5)
    assert wanted(ThroughputPlanner(), demand, phase="prefill") == 3
    assert wanted(ThroughputPlanner(headroom=1.2), demand, phase="prefill") == 4


def test_prefill_replicas_are_at_least_ttft_over_slo():
    """A prefill of a second with a TTFT of 0.3 s wants 4, however few come."""
    demand = Demand(seconds=100, requests=1, prompt_tokens=1000)
    assert wanted(ThroughputPlanner(), demand, phase="prefill", ttft=0.3) == 4


def test_decode_replicas():
    """4 requests a second of 10 tokens, of which one replica decodes one a second."""
    demand = Demand(seconds=10, requests=40, prompt_tokens=100, output_tokens=10)
    assert wanted(ThroughputPlanner(), demand, phase="decode") == 4


def test_replicas_that_do_both_need_the_sum():
    """The time for prefill and the time for decode add up."""
    demand = Demand(seconds=10, requests=40, prompt_tokens=500, output_tokens=10)
    assert wanted(ThroughputPlanner(), demand) == 2 + 4


def test_nothing_came():
    """The least number of replicas is kept where nothing comes."""
    assert wanted(ThroughputPlanner(least=2), Demand(seconds=10, requests=0)) == 2


def test_load_adds_a_replica_where_latency_is_too_long():
    """A TTFT above the SLO wants one more; one that is far below, one less."""
    slow = Demand(seconds=10, requests=5, load=1000, latency=3.0)
    assert wanted(LoadPlanner(), slow, ttft=2) == 4
    fast = Demand(seconds=10, requests=5, load=1000, latency=0.1)
    assert wanted(LoadPlanner(), fast, ttft=2) == 2


def test_load_keeps_what_fewer_could_not_serve():
    """At 3 replicas 1.2 s, in proportion 1.8 s at 2: above 0.8 of the SLO, so 3 stay."""
    demand = Demand(seconds=10, requests=5, load=1000, latency=1.2)
    assert wanted(LoadPlanner(), demand, ttft=2) == 3


def test_the_regression_is_that_of_least_squares():
    """Three points, by hand; and one load, in proportion to it."""
    assert regression(deque([(0, 1), (1, 2), (2, 6)])) == pytest.approx((0.5, 2.5))
    assert regression(deque([(2, 4)])) == pytest.approx((0, 2))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("thruput", "there are: throughput, load"),
        ("load:least=0", "least of 1 or more"),
        ("load:most=2,least=3", "least <= start <= most"),
        ("throughput:interval=0", "interval above 0"),
        ("throughput:interval=1e-10", "interval above 0"),
        ("throughput:interval=inf", "none of 292 years"),
        ("load:start_up=1e10", "none of 292 years"),
        ("load:cool_down=-1", "no negative times"),
        ("throughput:headroom=0", "headroom=0.0: give a factor above 0"),
        ("throughput:headroom=inf", "headroom=inf: give a factor above 0"),
        ("load:memory=0", "memory=0: give 1 interval"),
        ("throughput:windows=3", "has no option 'windows'"),
        ("load,throughput", "is no planner"),
    ],
)
def test_no_such_planner(text, what):
    """A text that names no planner, or options that leave no replica, are refused."""
    with pytest.raises(InputError, match=what):
        parse_planner(text)
