"""The counts and histograms of a server that never ends."""

import pytest
from helpers.jobs import job
from helpers.serving import ask
from hypothesis import given
from hypothesis import strategies as st

from kvcore_online.tally import CANCELLED, FINISHED, REJECTED, TIMES, BucketCounts, Tally

NS = 10**9


@given(st.lists(st.tuples(st.integers(0, 5 * NS), st.integers(1, 4)), max_size=20))
def test_buckets_count_the_times_up_to_their_bounds(times):
    """A bucket has all times up to its bound, the last one all; the sum is exact."""
    counts = BucketCounts((0.5, 2.0, 4.0))
    for time, many in [*times, (2 * NS, 1)]:  # a time at a bound is in its bucket
        counts.add(time, many)
    times = [time for time, many in [*times, (2 * NS, 1)] for _ in range(many)]
    assert counts.samples('a="b"') == {
        **{
            f'_bucket{{a="b",le="{bound}"}}': sum(time <= bound * NS for time in times)
            for bound in (0.5, 2.0, 4.0)
        },
        '_bucket{a="b",le="+Inf"}': len(times),
        '_sum{a="b"}': sum(times) / NS,
        '_count{a="b"}': len(times),
    }


def totals(tally):
    """Return count and sum (s) of each histogram, by its first words."""
    samples = {name: times.samples("") for name, times in tally.times.items()}
    return {
        name.partition("_seconds")[0]: (kept["_count{}"], kept["_sum{}"])
        for name, kept in samples.items()
    }


def test_times_of_finished_requests_are_those_of_their_jobs():
    """A request is in the histograms of its queue, its prefill, its decoding and all of it."""
    tally, served = Tally(8), job(ask("a", 1 * NS, 5, 3))
    served.admitted, served.first_token = 3 * NS, 7 * NS
    tally.got_first_token(served, served.first_token)
    tally.itl.pending += [(2_500_000_000_000, 0, 1, 1), (500_000_000_000, 0, 2, 3)]
    tally.later_tokens()
    assert not tally.itl.pending
    tally.ended(served, 15 * NS)
    assert totals(tally) == {
        "time_to_first_token": (1, 6),
        "inter_token_latency": (7, 5.5),
        "e2e_request_latency": (1, 14),
        "request_queue_time": (1, 2),
        "request_prefill_time": (1, 4),
        "request_decode_time": (1, 8),
    }
    assert list(tally.times) == list(TIMES)
    assert (tally.prompt_tokens, tally.output_tokens) == (5, 3)


@pytest.mark.parametrize("known", ["admitted", "first_token"])
def test_a_request_without_a_token_has_no_parts_of_its_time(known):
    """A request that ends without an output token counts, with its whole time alone."""
    tally, served = Tally(8), job(ask("a", 0, 5, 0))
    setattr(served, known, 2 * NS)
    tally.ended(served, 3 * NS)
    assert totals(tally)["e2e_request_latency"] == (1, 3)
    assert totals(tally)["request_queue_time"] == (0, 0)


def test_requests_are_counted_by_their_ends():
    """Each request has one end; one whose client has gone is neither finished nor rejected."""
    tally = Tally(8)
    tally.ended(job(ask("a")), 5)
    for name in "bd":
        tally.rejected(job(ask(name)), "its prompt is empty")
    assert tally.why == "its prompt is empty"
    tally.cancelled = "c"
    tally.ended(job(ask("c", 0, 100, 100)), 5)
    tally.rejected(job(ask("c")), "its client has gone")
    assert tally.requests == {FINISHED: 1, REJECTED: 2, CANCELLED: 2}
    assert (tally.prompt_tokens, tally.output_tokens) == (4, 1)
    assert len(tally.ids) == 0
