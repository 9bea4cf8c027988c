"""The workload `bench`, which sends requests as the client of a benchmark does."""

import pytest

import kvcore
from kvcore.errors import InputError
from kvcore_plugins.workload import Bench


def lengths(**options):
    """Return the pairs of prompt and output lengths of the requests."""
    return [(each.prompt_tokens, each.output_tokens) for each in Bench(**options)]


def test_a_request_arrives_as_the_one_before_finishes():
    """In a closed loop of four, request n arrives as request n - 4 finishes."""
    result = kvcore.simulate(
        "bench:requests=40,concurrency=4,input_tokens=100,output_tokens=20,spread=0.5"
    )
    rows = result.requests
    arrival, finish = (
        dict(zip(rows["id"], rows[f"{when}_s"], strict=True)) for when in ("arrival", "finish")
    )
    assert [arrival[n] for n in range(4)] == [0] * 4
    assert [arrival[n] for n in range(4, 40)] == [finish[n] for n in range(36)]


def test_an_open_loop_arrives_at_its_rate():
    """Of 2,000 Poisson arrivals at 10/s the mean gap is 0.1 s within 10 %, without sessions."""
    requests = list(Bench(requests=2_000, rate=10))
    assert requests[-1].arrival / 1999 == pytest.approx(1e8, rel=0.1)
    assert {request.session for request in requests} == {None}


def test_lengths_vary_by_the_spread():
    """With spread=0.2, lengths are 80 to 100 % of the given ones; without it they are equal."""
    drawn = lengths(requests=3_000, input_tokens=100, output_tokens=10, spread=0.2)
    assert {prompt for prompt, _ in drawn} == set(range(80, 101))
    assert {output for _, output in drawn} == {8, 9, 10}
    assert set(lengths(requests=9, input_tokens=100, output_tokens=10)) == {(100, 10)}


def test_concurrency_with_a_rate_is_refused():
    """Concurrency and rate exclude one another, and the error names both."""
    with pytest.raises(InputError, match=r"concurrency=4 and rate=2\.0"):
        Bench(concurrency=4, rate=2)
