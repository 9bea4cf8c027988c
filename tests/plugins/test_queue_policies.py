"""Queue-based eviction policies on spans: hands that skip spans, partial victims, ghosts."""

from __future__ import annotations

import pytest
from helpers.caches import make, serve, spans, start

from kvcore import Plugins
from kvcore_plugins.eviction import ARC, S3FIFO, SIEVE
from kvcore_plugins.eviction.queues import QueuePolicy

CLASSES = Plugins().classes("eviction").values()

every_policy = pytest.mark.parametrize(
    "policy", [policy for policy in CLASSES if issubclass(policy, QueuePolicy)]
)


def cache_of(blocks, policy):
    """Return a cache with `keys` accounting, in which a whole prompt can hit."""
    return make(blocks, policy, accounting="keys")


@every_policy
def test_a_trimmed_span_stays_the_victim(policy):
    """A span that has lost its tail is evicted entirely before any other span."""
    cache = cache_of(9, policy())
    serve(cache, "abc", "def", "ghi")
    for text in "xyz":
        victim = cache.eviction.victim(0)
        assert victim.keys()[0] == "a"
        serve(cache, text)
    assert {"|def", "|ghi", "|x", "|y", "|z"} == set(spans(cache))


def test_the_hand_skips_a_pinned_span_and_leaves_its_visited_bit():
    """In `sieve`, a pinned span that was hit keeps its visited bit for the next lap."""
    cache = cache_of(3, SIEVE())
    serve(cache, "a", "b", "c")
    seq = start(cache, "a")
    serve(cache, "d")
    assert set(spans(cache)) == {"|a", "|c", "|d"}
    cache.close(seq)
    assert spans(cache)["|a"].data.visited
    serve(cache, "e", "f", "g")
    assert "|a" in spans(cache)


def test_spans_behind_the_hand_wait_for_the_next_lap():
    """In `sieve`, spans behind the hand are examined in the next lap only, hit or not."""
    cache = cache_of(3, SIEVE())
    serve(cache, "a", "b", "c", "a", "d")
    assert set(spans(cache)) == {"|a", "|c", "|d"}
    serve(cache, "e")
    assert set(spans(cache)) == {"|a", "|d", "|e"}


def test_a_ghost_comes_back_to_the_main_queue():
    """In `s3fifo`, a span that is requested again after its eviction outlives new spans."""
    cache = cache_of(3, S3FIFO())
    serve(cache, "a", "b", "c", "d", "a", *"efgh")
    assert "|a" in spans(cache)
    cache = cache_of(3, S3FIFO(ghost=0))
    serve(cache, "a", "b", "c", "d", "a", *"efgh")
    assert "|a" not in spans(cache)


@pytest.mark.parametrize(("text", "main"), [("abX", True), ("aXYZ", False)])
def test_a_run_with_half_of_its_tokens_in_the_ghost_queue_enters_main(text, main):
    """A run enters the main queue if at least half of its tokens are in the ghost queue."""
    cache = cache_of(4, S3FIFO(ghost=2))
    serve(cache, "ab", "cdef", text)
    found = [span for span in spans(cache).values() if span.keys()[-1] == text]
    assert [span.data.in_main for span in found] == [main]


def test_a_scan_does_not_evict_spans_of_t2():
    """In `arc`, a long run of new prompts does not evict spans of T2."""
    cache = cache_of(4, ARC())
    serve(cache, "a", "b", "a", "b", *map(chr, range(1000, 1020)))
    assert {"|a", "|b"} < set(spans(cache))


def test_arc_adapts_to_hits_in_its_ghost_lists():
    """In `arc`, hits in the ghost list B1 raise the target of T1, and hits in B2 lower it."""
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
