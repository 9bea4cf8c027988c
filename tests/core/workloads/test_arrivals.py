"""Arrivals: recorded times, drawn gaps, sessions with think times, and invalid workloads."""

from __future__ import annotations

from math import exp
from random import Random

import pytest
from helpers.serving import STEP, ask, serve

from kvcore import InputError, Request
from kvcore.request import Hints
from kvcore.workloads import exponential
from kvcore.workloads.arrivals import NEVER, Arrivals


def turn(name, at=0, *, after=None, think_time=0, session="s", **fields):
    """Return a request of a session."""
    return ask(name, at, after=after, think_time=think_time, session=session, **fields)


def arrived(arrivals, now=NEVER - 1):
    """Return (time, id) of each request that arrives up to `now`."""
    taken = []
    while arrivals.next_at <= now:
        at, request = arrivals.take()
        taken.append((at, request.id))
    return taken


def test_requests_come_in_order():
    """Requests that arrive at the same time keep the order of the workload."""
    arrivals = Arrivals([ask("b", 5), ask("a", 5), ask("c", 7)])
    assert arrivals.next_at == 5
    assert arrived(arrivals, 4) == []
    assert arrived(arrivals, 6) == [(5, "b"), (5, "a")]
    assert (arrivals.next_at, arrived(arrivals), arrivals.next_at) == (7, [(7, "c")], NEVER)


def test_the_last_time_of_an_arrival_is_before_that_of_none():
    """A request may arrive at the last nanosecond of the clock, and not after it."""
    assert Arrivals([ask("a", NEVER - 1)]).next_at == NEVER - 1
    with pytest.raises(InputError, match="'a' arrives 2"):
        Arrivals([ask("a", NEVER)])


def test_a_streamed_workload_is_read_one_request_ahead():
    """A streamed workload is read one request ahead."""
    read = []

    def streamed():
        for index in range(9):
            read.append(index)
            yield ask(index, 10 * index)

    arrivals = Arrivals(streamed())
    assert len(read) == 1
    arrived(arrivals, 35)
    assert len(read) == 5


def test_arrivals_read_ahead_by_the_longest_prefetch_hint():
    """`Arrivals` reads ahead by the longest `prefetch` hint so far, and else by one request."""
    requests = [
        ask(index, 100 * index, hints=Hints(prefetch=250 if index > 2 else None))
        for index in range(8)
    ]
    arrivals, known = Arrivals(requests, prefetches=True), []
    for request in requests:
        assert arrivals.take() == (request.arrival, request)
        known.append(len(arrivals._due))
    assert known == [1, 1, 4, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("enters", [True, False])
def test_arrivals_go_on_where_the_core_stopped(enters):
    """Of a request that the core in C has read ahead, and of those after it, none is lost."""
    requests = [ask(0, 5), ask(1, 7), ask(2, 9)]
    arrivals = Arrivals(requests)
    given = arrivals.restart()
    assert [next(given), next(given)] == requests[:2]
    if enters:
        arrivals.resume(requests[1], 7, came=2, last=7, first=0, following=2)
    else:
        arrivals.resume(requests[1], -1, came=1, last=5, first=0, following=1)
    assert arrived(arrivals) == [(7, 1), (9, 2)]


def test_a_later_turn_arrives_its_think_time_after_an_end():
    """A later turn arrives `think_time` after the end of the one before, not when recorded."""
    arrivals = Arrivals([turn("a", 5), turn("b", 6, after="a", think_time=30)])
    assert arrived(arrivals) == [(5, "a")]
    arrivals.ended(turn("a"), 100)
    assert arrived(arrivals) == [(130, "b")]


def test_later_turns_and_recorded_arrivals_are_merged():
    """Turns of a delayed session and recorded arrivals are merged in the order of time."""
    first = turn("a", 0)
    arrivals = Arrivals(
        [first, turn("b", 1, after="a", think_time=50), ask("c", 70), ask("d", 90)]
    )
    assert arrived(arrivals, 0) == [(0, "a")]
    arrivals.ended(first, 30)
    assert arrived(arrivals) == [(70, "c"), (80, "b"), (90, "d")]


def test_conversations_begin_up_to_the_last_request_that_follows_none():
    """The last start is that of the last conversation; in an open loop there is none."""
    first, second = turn("a", 5), turn("c", 9)
    later = turn("b", 6, after="a"), turn("d", 12, after="c")
    assert Arrivals([first, later[0], second, later[1]]).last_start == 9
    assert Arrivals([first, second]).last_start is None


def test_a_session_in_the_serving_loop():
    """In the serving loop, a turn arrives its think time after the end of the one before."""
    requests = [
        turn("a", 3, output=2),
        turn("b", 4, after="a", think_time=100, output=1),
        turn("c", 5, after="b", output=1),
    ]
    run = serve(requests)
    assert run.rows["a"]["finish"] == 3 + 2 * STEP
    assert run.rows["b"]["arrival"] == run.rows["a"]["finish"] + 100
    assert run.rows["c"]["arrival"] == run.rows["b"]["finish"]


def test_the_turn_after_a_rejected_one_arrives_after_its_think_time():
    """A turn whose predecessor is rejected arrives after its think time."""
    requests = [turn("a", 3, prompt=999), turn("b", 4, after="a", think_time=7)]
    run = serve(requests, blocks=5)
    assert list(run.rejected) == ["a"]
    assert run.rows["b"]["arrival"] == 10


@pytest.mark.parametrize(("scale", "times"), [(2, [0, 5, 10]), (0.1, [0, 100, 200])])
def test_rate_scale_divides_the_times_of_arrival(scale, times):
    """Twice the rate halves the times of arrival."""
    arrivals = Arrivals([ask(index, 10 * index) for index in range(3)], scale)
    assert [at for at, _ in arrived(arrivals)] == times


@pytest.mark.parametrize("scale", [0, -1, float("inf"), float("nan"), True, "2"])
def test_a_rate_scale_is_a_finite_number_above_0(scale):
    """Requests cannot come infinitely fast, nor never."""
    with pytest.raises(InputError, match="a finite number above 0"):
        Arrivals([ask("a")], scale)


def test_rate_scale_is_exact():
    """A decimal rate is exact, not its binary neighbour, and times are rounded down."""
    arrivals = Arrivals([ask("a", 3), ask("b", 10**18 + 1)], 0.3)
    assert [at for at, _ in arrived(arrivals)] == [10, (10**18 + 1) * 10 // 3]


def test_an_arrival_beyond_the_clock_is_refused():
    """The error for an arrival at or after 2^63 ns names the request."""
    with pytest.raises(InputError, match=r"request 'b' arrives 2\^63 ns .* or more"):
        arrived(Arrivals([ask("a"), ask("b", 1)], 1e-320))


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([ask("a", -1)], r"request 'a' \(number 1\) arrives at -1 ns, before 0 ns"),
        ([ask("a", 5), ask("b", 4)], r"'b' \(number 2\) arrives at 4 ns, before 5 ns"),
        ([ask("a"), ask("b", 1), ask("a", 2)], "'a': an earlier request has the same id"),
        ([ask(0), ask(0)], "0: an earlier request has the same id"),
        ([ask(0), ask("x"), ask(1), ask(1)], "1: an earlier request has the same id"),
        (
            [ask("a"), ask("b", after="a")],
            "'b' comes after request 'a' and has no session: give both the same session",
        ),
        (
            [turn("a", session="x"), turn("b", session="y", after="a")],
            "'b' of session 'y' comes after request 'a' of session 'x'",
        ),
        (
            [turn("b", session="y", after="a"), turn("a", session="x")],
            "'b' of session 'y' comes after request 'a' of session 'x'",
        ),
        (
            [turn("b", session="y", after="a"), ask("a")],
            "'b' of session 'y' comes after request 'a' of session None",
        ),
        ([turn("a"), turn("b", after="z")], "'b' comes after request 'z', which is not in"),
        ([turn("a", after="a")], "'a' comes after request 'a', which in the end waits for it"),
        (
            [turn("a", after="b"), turn("b", after="a")],
            "comes after request '.', which in the end waits for it",
        ),
    ],
)
def test_invalid_workloads_are_refused(requests, message):
    """Arrivals out of order, repeated ids and broken sessions raise InputError."""
    with pytest.raises(InputError, match=message):
        serve(requests)


def test_the_error_for_a_late_arrival_out_of_order_has_its_number():
    """The error for a late arrival out of order has its number in the workload."""
    requests = [*(ask(index, index) for index in range(1000)), ask("late", 7)]
    with pytest.raises(InputError, match=r"'late' \(number 1001\) arrives at 7 ns, before 999"):
        serve(requests)


@pytest.mark.parametrize("field", ["think_time", "predicted_output_tokens"])
@pytest.mark.parametrize("value", [-1, 2.5])
def test_think_times_and_outputs_are_whole_and_not_negative(field, value):
    """Think times and predicted outputs must be whole numbers of 0 or more."""
    with pytest.raises(InputError, match=rf"request 'b': {field}={value} must be .*0 or more"):
        ask("b", **{field: value})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"arrival": 1.5}, r"arrival \(ns\).* are whole numbers.*arrival=1\.5"),
        ({"key_tokens": 2**63}, "key_tokens=9223372036854775808"),
        ({"slo": "ttft=1"}, "slo='ttft=1' and hints=Hints.*: give an SLO or None, and Hints"),
        ({"hints": None}, "slo=None and hints=None: give an SLO or None, and Hints"),
    ],
)
def test_what_a_request_cannot_have_is_refused_when_it_is_made(fields, problem):
    """A wrong value raises InputError at once, and nothing else when it is served."""
    with pytest.raises(InputError, match=problem):
        Request(**{"id": "a", "prompt_tokens": 1, "key_tokens": 1} | fields)


def test_a_turn_may_arrive_before_requests_recorded_earlier():
    """A turn recorded long after other requests arrives at its think time, before them."""
    requests = [
        ask("turn", 0, session="s"),
        ask("alone", 1000),
        ask("apart", 2000),
        ask("next", 3000, session="s", after="turn", think_time=5),
    ]
    assert serve(requests).of("FINISH")[1] == (25, "next")


@pytest.mark.parametrize(
    ("draws", "gap"),
    [
        ([0.25, 0.5], 0.25),
        ([0.75, 0.5, 0.25, 0.5], 0.75),
        ([0.75, 0.5, 0.625, 0.125, 0.25], 1.125),
        ([0.5, 0.5], 0.5),
    ],
    ids=["one", "three", "two, then one", "a tie ends it"],
)
def test_a_gap_is_the_first_draw_of_a_descent_of_odd_length(draws, gap):
    """A gap is the first draw of a descent of odd length.

    Each descent of even length before it adds 1.
    """
    left = iter(draws)
    assert exponential(left.__next__) == gap
    assert list(left) == []


def test_gaps_are_exponentially_distributed():
    """The distribution of 50,000 gaps lies within 1% of 1 - exp(-x)."""
    draw = Random(1).random
    gaps = sorted(exponential(draw) for _ in range(50_000))
    apart = (abs(rank / len(gaps) - (1 - exp(-gap))) for rank, gap in enumerate(gaps))
    assert max(apart) < 0.01
