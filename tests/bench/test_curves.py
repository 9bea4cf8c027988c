"""LRU at all pool sizes in one pass, compared in hits and time with `kvcache-simulator`.

The peer counts the hits of the second half of the requests, after the first half has filled the
pool. These are the hits of all requests minus the hits of the first half alone. Only pool sizes
at which both agree are compared: small enough to be filled by the first half, and no smaller
than the longest request. Of a request longer than the pool, the peer keeps one block less than
fits: it evicts the block that it has just added, finds the parent of the next block missing,
and stops.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter

import pytest
from bench.harness import KEY_TOKENS, bundled, medians

from kvcore.cache.layout import BlockLayout
from kvcore_lab.curves.mrc import Steps
from kvcore_replay.belady import Belady, Future

pytest.importorskip("numba")
peer = pytest.importorskip("kvcache_sim", reason="run `tox -e bench-curves`")

from kvcache_sim.cpp_backend import ensure_cpp_simulator, run_cpp_sweep  # noqa: E402
from kvcache_sim.plan import build_execution_plan  # noqa: E402
from kvcache_sim.policies import simulate_policy  # noqa: E402
from kvcache_sim.trace import TraceData  # noqa: E402

from kvcore_lab.curves._reuse import Reuse  # noqa: E402

POINTS, TIMES = 30, 50


@pytest.fixture(scope="module")
def requests():
    """Return the bundled trace in memory, as the peer has its trace."""
    return bundled()


@pytest.fixture(scope="module")
def trace(requests):
    """Return the peer's trace of the requests."""
    return peer_trace(requests)


@pytest.fixture(scope="module")
def sizes(requests):
    """Return the pool sizes at which both are compared."""
    return pool_sizes(requests)


def peer_trace(requests):
    """Return the peer's trace: the keys of all requests in order, with one token per block."""
    ids = [key for request in requests for key in request.keys]
    starts = [0]
    for request in requests:
        starts.append(starts[-1] + len(request.keys))
    return TraceData(
        ids=ids,
        tokens=[1] * len(ids),
        request_starts=starts,
        block_size=1,
        request_count=len(requests),
        unique_raw_blocks=len(set(ids)),
        total_input_tokens=len(ids),
        average_input_tokens=len(ids) / len(requests),
        parse_errors=0,
        skipped_records=0,
    )


def pool_sizes(requests):
    """Return 30 pool sizes, from the longest request to the size that the first half fills."""
    longest = max(len(request.keys) for request in requests)
    filled = read(requests[: len(requests) // 2]).distinct_blocks
    ratio = filled / longest
    return [int(longest * ratio ** (step / (POINTS - 1))) for step in range(POINTS)]


def read(requests):
    """Return the reuse in `requests`."""
    return Reuse.read(requests, BlockLayout("keys", KEY_TOKENS, KEY_TOKENS))


def curve(requests):
    """Return the hits of LRU at all pool sizes, from reading `requests` once."""
    return Steps(*read(requests).lru())


def second_half(requests, sizes):
    """Return the hits of the second half of the requests, by size."""
    whole, first = curve(requests), curve(requests[: len(requests) // 2])
    return [whole.at(size) - first.at(size) for size in sizes]


def seconds(work):
    """Return the seconds that `work` takes."""
    start = perf_counter()
    work()
    return perf_counter() - start


def by_peer(trace, sizes):
    """Return the hits of the peer's simulator in Python, by size."""
    plan = build_execution_plan(trace)
    return [simulate_policy(plan, "lru", size).hitTokens for size in sizes]


def by_peer_in_cpp(trace, sizes):
    """Return the hits of the peer's simulator in C++, by size."""
    half = trace.request_count // 2
    found = run_cpp_sweep(trace, capacities=sizes, policies=["lru"], warmup_requests=half)
    return [found.results["lru", size].hitTokens for size in sizes]


def test_all_sizes_are_faster_than_the_peer_in_python(requests, trace, sizes):
    """All sizes take at most 1/50 of the time of 30 in the peer's Python simulator.

    The hits are equal at each of the 30 sizes.
    """
    expected: list[int] = []
    theirs = seconds(lambda: expected.extend(by_peer(trace, sizes)))
    assert second_half(requests, sizes) == expected
    (ours,) = medians(7, lambda: seconds(lambda: curve(requests)))
    print(
        f"\nLRU at all sizes {ours * 1e3:.1f} ms; {POINTS} sizes by kvcache-simulator in "
        f"Python {theirs:.2f} s: {theirs / ours:,.0f} x"
    )
    assert theirs >= TIMES * ours


def test_all_sizes_are_faster_than_the_peer_in_cpp(requests, trace, sizes):
    """All sizes take at most 1/50 of the time of 30 in the peer's C++ simulator.

    The hits are equal at each of the 30 sizes.
    """
    try:
        ensure_cpp_simulator()
    except RuntimeError as error:
        pytest.skip(str(error))
    assert second_half(requests, sizes) == by_peer_in_cpp(trace, sizes)
    ours, theirs = medians(
        7,
        partial(seconds, partial(curve, requests)),
        partial(seconds, partial(by_peer_in_cpp, trace, sizes)),
    )
    print(
        f"\nLRU at all sizes {ours * 1e3:.1f} ms; {POINTS} sizes by kvcache-simulator in "
        f"C++ {theirs:.2f} s: {theirs / ours:,.0f} x"
    )
    assert theirs >= TIMES * ours


def test_print_the_time_of_the_optimum(requests):
    """Print the time of the optimum at one size, compiled and in plain Python."""
    geometry = BlockLayout("keys", KEY_TOKENS, KEY_TOKENS)
    reuse, future = read(requests), Future.read(requests, geometry)
    ours, plain = medians(
        7,
        partial(seconds, lambda: reuse.optimum(5_859, bypass=False)),
        partial(seconds, lambda: Belady().replay(future, 5_859, KEY_TOKENS)),
    )
    print(f"\noptimum, a size: compiled {ours * 1e3:.1f} ms, plain {plain * 1e3:.1f} ms")
