"""What queues do with spans: hands that pass, victims that stay, runs that come back."""

from __future__ import annotations

import pytest
from helpers.caches import make, serve, spans, start

from kvcore_plugins.eviction import ARC, S3FIFO, SIEVE

every_policy = pytest.mark.parametrize("policy", [ARC, S3FIFO, SIEVE])


def cache_of(blocks, policy):
    """Return a cache that counts every block, so that a prompt can hit as a whole."""
    return make(blocks, policy, accounting="keys")


@every_policy
def test_a_trimmed_span_stays_the_victim(policy):
    """What lost its tail loses the rest before anything else is touched."""
    cache = cache_of(9, policy())
    serve(cache, "abc", "def", "ghi")
    for text in "xyz":
        victim = cache.eviction.victim(0)
        assert victim.keys()[0] == "a"
        serve(cache, text)
    assert {"|def", "|ghi", "|x", "|y", "|z"} == set(spans(cache))


def test_the_hand_passes_a_pinned_span_and_leaves_its_bit():
    """A span that was hit and is in use keeps its bit for the next lap."""
    cache = cache_of(3, SIEVE())
    serve(cache, "a", "b", "c")
    seq = start(cache, "a")
    serve(cache, "d")
    assert set(spans(cache)) == {"|a", "|c", "|d"}
    cache.close(seq)
    assert spans(cache)["|a"].data.visited
    serve(cache, "e", "f", "g")
    assert "|a" in spans(cache)


def test_the_hand_stays_where_it_was():
    """What was stored behind the hand waits for the next lap, hit or not."""
    cache = cache_of(3, SIEVE())
    serve(cache, "a", "b", "c", "a", "d")
    assert set(spans(cache)) == {"|a", "|c", "|d"}
    serve(cache, "e")
    assert set(spans(cache)) == {"|a", "|d", "|e"}


def test_a_ghost_comes_back_to_the_main_queue():
    """What the small queue dropped, and is asked for again, outlives what is new."""
    cache = cache_of(3, S3FIFO())
    serve(cache, "a", "b", "c", "d", "a", *"efgh")
    assert "|a" in spans(cache)
    cache = cache_of(3, S3FIFO(ghost=0))
    serve(cache, "a", "b", "c", "d", "a", *"efgh")
    assert "|a" not in spans(cache)


@pytest.mark.parametrize(("text", "main"), [("abX", True), ("aXYZ", False)])
def test_half_of_a_run_decides(text, main):
    """A run goes to the main queue if at least half of its tokens are remembered."""
    cache = cache_of(4, S3FIFO(ghost=2))
    serve(cache, "ab", "cdef", text)
    found = [span for span in spans(cache).values() if span.keys()[-1] == text]
    assert [span.data.in_main for span in found] == [main]


def test_a_scan_does_not_take_what_is_used_again():
    """A long run of new prompts leaves T2 alone."""
    cache = cache_of(4, ARC())
    serve(cache, "a", "b", "a", "b", *map(chr, range(1000, 1020)))
    assert {"|a", "|b"} < set(spans(cache))


def test_arc_learns_from_its_ghosts():
    """Misses on what was used once raise the target; on what was used again lower it."""
    policy = ARC()
    cache = cache_of(4, policy)
    serve(cache, "a", "b", "a", "b", "c", "d", "e")
    assert policy._target == 0
    serve(cache, "c")
    raised = policy._target
    assert raised == 4
    serve(cache, *"cdefghcdefgh")
    assert policy._target > raised
    high = policy._target
    serve(cache, "a")
    assert policy._target < high
