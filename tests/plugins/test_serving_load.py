"""Saturation: a queue that grows until the last arrival, as opposed to one that drains."""

from __future__ import annotations

from fractions import Fraction
from heapq import heapify, heappop, heappush
from itertools import accumulate, repeat
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvcore
from kvcore.serving import Batching, StepWork
from kvcore.serving.stats import Column, RunLog
from kvcore.units import PS_PER_S
from kvcore_plugins.latency import Roofline
from kvcore_plugins.load import MIN_REQUESTS, _time, offered_by, saturation_of

SERVICE = 1000
"""Nanoseconds that a request takes on a server that serves them one by one."""


def poisson(load, requests, seed=0):
    """Return Poisson arrivals at `load` times the rate that the server can serve."""
    draw = Random(seed).expovariate
    gaps = (round(draw(load) * SERVICE) for _ in range(requests))
    return list(accumulate(gaps))


def queue(arrivals, **columns):
    """Return the log of a server that takes requests one by one, each for `SERVICE` ns."""
    log, free = RunLog(1), 0
    for at in arrivals:
        log.arrival.append(at)
        log.admitted.append(max(at, free))
        free = log.admitted[-1] + SERVICE
        log.finish.append(free)
    for name, values in columns.items():
        column = Column("q")
        column.extend(values)
        setattr(log, name, column)
    return log


def conversations(starts, turns, think):
    """Return the log of that server in a closed loop: each turn comes after the one before it.

    `think` ns lie between the end of a turn and the next one.
    """
    log, free = RunLog(1), 0
    log.last_start = starts[-1]
    due = [(at, turns) for at in starts]
    heapify(due)
    while due:
        at, left = heappop(due)
        log.arrival.append(at)
        log.admitted.append(max(at, free))
        free = log.admitted[-1] + SERVICE
        log.finish.append(free)
        if left > 1:
            heappush(due, (free + think, left - 1))
    return log


def found(arrivals, load=None):
    """Return whether the queue of `arrivals` is found to grow; None if that is unknown."""
    figures = saturation_of(queue(arrivals), 1, load)
    return figures and figures.saturated


@pytest.mark.parametrize("load", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("requests", [MIN_REQUESTS, 100, 1000, 10_000])
def test_a_server_that_is_fast_enough_is_not_saturated(load, requests):
    """M/D/1 below a load of 1 is not saturated, however few the requests are."""
    assert not any(found(poisson(load, requests, seed)) for seed in range(10))


@pytest.mark.parametrize(
    ("load", "requests"), [(3, 60), (1.5, 200), (1.2, 1000), (1.1, 3000), (1.05, 10_000)]
)
def test_a_server_that_is_too_slow_is_saturated(load, requests):
    """M/D/1 above a load of 1 is saturated, given enough requests for that load."""
    assert all(found(poisson(load, requests, seed)) for seed in range(10))


@pytest.mark.parametrize("think", [0, 5 * SERVICE, 50 * SERVICE])
@pytest.mark.parametrize(
    ("load", "saturated"), [(0.5, False), (0.8, False), (1.5, True), (4, True)]
)
def test_a_closed_loop_is_judged_while_conversations_begin(load, saturated, think):
    """Conversations whose turns ask for more than can be done saturate, though turns wait.

    In a closed loop the queue drains once no more conversations begin, and as many requests
    come a second as are served.
    """
    for seed in range(5):
        log = conversations(poisson(load / 4, 500, seed), 4, think)
        figures = saturation_of(log, 1, 0.9)
        assert (figures.closed, figures.saturated) == (True, saturated)
        assert "conversations begin" in figures.why


def test_conversations_that_begin_in_a_burst_are_no_saturation():
    """A burst of conversations whose later turns are served at once is no saturation."""
    log = conversations(range(0, 100 * SERVICE, SERVICE // 2), 20, 2000 * SERVICE)
    assert not saturation_of(log, 1, 0.1).saturated


def test_bursts_that_drain_are_no_saturation():
    """Ten bursts of 100 requests that drain before the next one are no saturation."""
    bursts = [index * 150 * SERVICE for index in range(10) for _ in range(100)]
    assert found(bursts) is False


def test_an_overload_in_the_second_half_is_saturation():
    """An overload that starts in the second half of the run is saturation."""
    calm = poisson(0.3, 300)
    busy = [calm[-1] + at for at in poisson(1.6, 1600)]
    assert found(calm + busy) is True


@pytest.mark.parametrize(
    "arrivals", [[], [5] * 1000, poisson(5, MIN_REQUESTS - 1)], ids=["none", "at once", "a few"]
)
def test_saturation_of_a_batch_or_of_few_requests_is_unknown(arrivals):
    """Saturation is unknown for requests that arrive at once, or for too few, at any load."""
    assert found(arrivals, load=9.0) is None


@pytest.mark.parametrize(("load", "saturated"), [(0.9, False), (1.1, True)])
def test_requests_that_arrive_during_one_step_saturate_above_a_load_of_one(load, saturated):
    """A queue that grows within one step is saturation at an offered load above 1 alone."""
    figures = saturation_of(queue(range(100), admitted=repeat(200, 100)), 256, load)
    assert figures.saturated == saturated


def test_paused_jobs_count_as_waiting():
    """Paused jobs count as waiting, even if they were admitted at once."""
    log = queue(poisson(1.5, 400))
    log.admitted = log.arrival
    figures = saturation_of(log, 1, None)
    assert figures is not None
    assert figures.saturated


def test_rejected_requests_do_not_wait():
    """Rejected requests change no figure of saturation."""
    log = queue(poisson(1.5, 400))
    plain = saturation_of(log, 1, None)
    log.reasons = {400: "too long"}
    for column in (log.admitted, log.finish):
        column.append(-1)
    log.arrival.append(log.arrival[-1] * 2)
    assert saturation_of(log, 1, None) == plain


@pytest.mark.parametrize("load", [0.9, 2])
@pytest.mark.parametrize("first", [0, 7])
def test_a_queue_is_the_mean_of_eight_moments(load, first):
    """The queue at half time and at the end are means of the last 8 of 32, and of 64, moments.

    Those wait that came before a moment and were not admitted by then, whatever the order of
    the rows.
    """
    log = queue([first + at for at in poisson(load, 300)])
    rows = list(zip(log.arrival, log.admitted, log.finish, strict=True))
    Random(1).shuffle(rows)
    came, admitted, finished = zip(*rows, strict=True)
    begin, end = min(came), max(came)

    def waiting(moment):
        now = begin + (end - begin) * moment // 64
        return sum(at < now for at in came) - sum(at <= now for at in admitted)

    shuffled = queue([], arrival=came, admitted=admitted, finish=finished)
    figures = saturation_of(shuffled, 1, None)
    assert figures.waiting_half == sum(map(waiting, range(25, 33))) / 8
    assert figures.waiting_end == sum(map(waiting, range(57, 65))) / 8


LATE = 10**6
"""A time after all others at which requests are admitted that have waited to the end."""


@pytest.mark.parametrize("waiting", [20, 21])
def test_a_queue_as_long_as_chance_makes_it_has_not_grown(waiting):
    """A queue of 100 requests has grown if more wait at the end than twice their root, 20."""
    served = range(100 - waiting)
    came = [*served, *repeat(60, waiting)]
    admitted = [*(at + 1 for at in served), *repeat(LATE, waiting)]
    log = queue([], arrival=came, admitted=admitted, finish=repeat(LATE, 100))
    assert saturation_of(log, 100, 2).saturated == (waiting > 20)


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_queue_that_was_empty_in_the_last_quarter_has_not_grown(waiting):
    """A queue that grew to the end is saturation unless it was empty at one of 16 moments.

    A request comes every 10 ns. Of those before the 49th of 64 moments none waits there, or
    one; all later ones wait to the end.
    """
    came = range(0, 6401, 10)
    served = 490 - waiting
    log = queue(came, admitted=[*came[:served], *repeat(LATE, len(came) - served)])
    assert saturation_of(log, 10**6, 0.9).saturated == (waiting > 0)


@pytest.mark.parametrize("times", [9, 10])
def test_jobs_that_are_admitted_at_few_times_do_not_show_a_queue(times):
    """A queue is that of long steps if its jobs are admitted at fewer than 10 later times.

    That in the middle of the arrivals is not later.
    """
    came = range(0, 6401, 10)
    served = 320 + times
    later = [*came[:321], *range(3201, 3200 + times)]
    log = queue(came, admitted=[*later, *repeat(LATE, len(came) - served)])
    assert saturation_of(log, 10**6, 0.9).saturated == (times == 10)


def test_the_figures_are_rates_and_waiting_requests():
    """The figures are the rates of arrivals and completions, and the waiting requests.

    Two requests arrive per us and one is served.
    """
    figures = saturation_of(queue(range(0, 640 * SERVICE, SERVICE // 2)), 1, None)
    assert figures is not None
    assert figures.arrivals_per_s == pytest.approx(2e6)
    assert figures.served_per_s == pytest.approx(1e6)
    assert figures.waiting_half == pytest.approx(640 * 7 / 16, rel=0.02)
    assert figures.waiting_end == pytest.approx(640 * 15 / 16, rel=0.02)
    assert figures.why.startswith("2,000,000 requests/s come and 1,000,000/s are served; ")


@pytest.mark.parametrize("steps", [Fraction(1), Fraction(5, 2), Fraction(7, 3), Fraction(40)])
def test_work_in_steps_takes_its_whole_time_where_time_is_linear(steps):
    """Tokens, pairs and contexts of layers take as long in any number of equal steps."""

    def duration(work):
        pairs, context = work.attended_pairs, work.context
        return 2 * work.prefill + 3 * work.decode + sum(
            rate * part for rate, part in zip((5, 7, 11, 13), (*pairs, *context), strict=True)
        )  # fmt: skip

    expected = 2 * 17 + 3 * 19 + 5 * 23 + 7 * 29 + 11 * 31 + 13 * 37
    assert _time(duration, 17, [23, 29], 19, [31, 37], steps) == expected


MIXTURES = {
    **dict.fromkeys(("qwen3-30b-a3b", "gpt-oss-20b"), 1),
    **dict.fromkeys(("mixtral-8x7b", "gpt-oss-120b"), 2),
    **dict.fromkeys(("qwen3-235b-a22b", "llama-3.1-8b"), 8),
}
"""Models, all but the last mixtures of experts, and the GPUs of each."""


@st.composite
def steps_of_a_mixture(draw):
    """Draw a mixture, the limits of steps, and prefill and decode tokens of some steps."""
    model = draw(st.sampled_from(sorted(MIXTURES)))
    sequences = draw(st.integers(1, 64))
    tokens = draw(st.integers(sequences, 1024))
    decode = st.integers(0, sequences)
    step = decode.flatmap(lambda d: st.tuples(st.integers(0, tokens - d), st.just(d)))
    return model, tokens, sequences, draw(st.lists(step, min_size=1, max_size=8))


@settings(max_examples=100)
@given(steps_of_a_mixture())
@example(("qwen3-30b-a3b", 1024, 8, [(1000, 0), *[(0, 8)] * 7]))
@example(("qwen3-30b-a3b", 64, 64, [(0, 64), (0, 0)]))
def test_equal_steps_of_a_mixture_take_no_longer_than_others_with_the_same_work(drawn):
    """The bound of a step is at most its time, and that of the mean step at most their mean."""
    model, tokens, sequences, steps = drawn
    latency = Roofline(model=model, tensor_parallel=MIXTURES[model])
    none = (0,) * len(latency.windows)

    def bound(work):
        return latency.convex_duration(work, tokens, sequences)

    works = [StepWork(prefill, none, decode, none) for prefill, decode in steps]
    took = [latency.duration(work) for work in works]
    assert all(bound(work) <= time for work, time in zip(works, took, strict=True))
    prefill, decode = map(sum, zip(*steps, strict=True))
    least = _time(bound, prefill, [*none], decode, [*none], Fraction(len(steps)))
    # Dense products bend once, where the mean of whole steps around one is above it.
    assert least <= sum(took) * (1 + 1e-3)


@pytest.mark.parametrize("model", sorted(MIXTURES))
@settings(max_examples=12)
@given(
    st.sampled_from([1, 4, 8, 64]),
    st.sampled_from([64, 512, 4096]),
    st.sampled_from(["mixed", "prefill-first"]),
    st.integers(1, 120),
    st.integers(1, 1000),
)
@example(8, 8192, "mixed", 100, 600)
def test_no_run_is_faster_than_its_least_time(model, seqs, tokens, steps, output, suffix):
    """Requests that never wait for an arrival take at least the least time of their work.

    So no load is above 1 where the queue does not grow.
    """
    result = kvcore.simulate(
        f"zipf:requests=60,rate=1000,prefixes=5,prefix_tokens=256,suffix_tokens={suffix},"
        f"output_tokens={output}",
        model=model,
        tensor_parallel=MIXTURES[model],
        batching=Batching(max_tokens=tokens, max_seqs=seqs, steps=steps),
    )
    # The clock of a result counts nanoseconds.
    assert offered_by(result).work <= (result.simulated_s + 1e-9) * PS_PER_S
