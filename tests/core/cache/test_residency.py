"""Residency: how long blocks stay in the cache before they are hit again or evicted."""

from __future__ import annotations

import pytest
from helpers.caches import BLOCK, Mortal, ask, make, serve, start

from kvcore.cache import Residency
from kvcore.cache.residency import Refaults
from kvcore.histogram import Histogram
from kvcore_plugins.prefix import NoPrefix


class Listed(Histogram):
    """A histogram that also keeps its samples."""

    __slots__ = ("samples",)

    def __init__(self):
        """Start without samples."""
        super().__init__()
        self.samples = []

    def extend(self, values, weights):
        """Add `values`, and keep them as (value, weight)."""
        super().extend(values, weights)
        self.samples += zip(values, weights, strict=True)


def watched(blocks=8, *args, **options):
    """Return a cache with residency statistics, and these statistics."""
    cache = make(blocks, *args, **options)
    cache.tree.residency = seen = Residency(blocks)
    seen.age_at_hit, seen.age_at_eviction = Listed(), Listed()
    seen.lifetime, seen.hits_at_eviction = Listed(), Listed()
    return cache, seen


def hits(seen):
    """Return (age, blocks) of the hits."""
    seen.settle()
    return seen.age_at_hit.samples


def evictions(seen):
    """Return (time since the last access, lifetime, hits, blocks) of each eviction."""
    seen.settle()
    columns = seen.age_at_eviction, seen.lifetime, seen.hits_at_eviction
    rows = zip(*(column.samples for column in columns), strict=True)
    return [(idle, lifetime, hits, blocks) for (idle, blocks), (lifetime, _), (hits, _) in rows]


def test_a_hit_has_the_age_of_the_access_before():
    """The age at a hit is the time since the previous access.

    Two blocks stored at 0 and hit at 10 and at 25 have ages of 10 and 15 ns.
    """
    cache, seen = watched()
    serve(cache, "ab", now=0)
    serve(cache, "abc", now=10)
    serve(cache, "abd", now=25)
    assert hits(seen) == [(10, 2), (15, 2)]


def test_every_span_on_the_path_of_a_hit_is_a_sample():
    """Each span on the path of a hit is a sample of its own."""
    cache, seen = watched()
    serve(cache, "ab", now=0)
    serve(cache, "abcd", now=10)
    serve(cache, "abcde", now=30)
    assert hits(seen)[1:] == [(20, 2), (20, 2)]


def test_a_preempted_request_hits_nothing():
    """A preempted request that finds its own blocks again counts no hits, unlike a new one."""
    cache, seen = watched()
    request = ask("abc")
    cache.close(cache.open(request, now=0))
    serve(cache, "abc", now=5)
    cache.close(cache.open(request, now=9, resumed=True))
    assert hits(seen) == []
    cache.close(cache.open(request, now=12))
    assert [blocks for _, blocks in hits(seen)] == [2]


def test_an_eviction_has_age_lifetime_and_hits():
    """An eviction has the block's idle time, lifetime and hits.

    Of blocks stored at 0, hit at 10 and evicted at 40, the tail was never hit.
    """
    cache, seen = watched(4)
    serve(cache, "abc", now=0)
    cache.close(start(cache, "abx", 9, now=10), 10)
    serve(cache, "uvwx", now=40)
    assert evictions(seen) == [(40, 40, 0, 1), (30, 40, 1, 2)]


def test_part_of_a_span_is_weighted_by_its_blocks():
    """The eviction of one block of a span counts one block."""
    cache, seen = watched(4)
    serve(cache, "abc", now=0)
    serve(cache, "uv", now=7)
    assert evictions(seen) == [(7, 7, 0, 1)]


def test_blocks_that_leave_one_by_one_are_counted_once():
    """Blocks that leave at times of their own have the age and the lifetime of these times.

    Others that leave in between have theirs, even if they were accessed in that instant.
    """
    cache = make(4)
    start(cache, "abc", now=2)
    (span,) = cache.tree.spans()
    seen = Residency(4)
    seen.on_evict_by_block(span, [5, 9])
    seen.record_evict(span.path_keys, 0, 1, 1, (0, 0, 0), "capacity")
    seen.settle()
    for ages in (seen.age_at_eviction, seen.lifetime):
        assert (ages.weight, ages.at_most([0, 2, 3, 6, 7])) == (3, [1, 1, 2, 2, 3])
    assert seen.evicted_blocks["capacity"] == seen.never_hit_blocks == 3


def test_what_is_not_counted_yet_is_bounded(monkeypatch):
    """Tiers tell of many blocks before numbers are asked for: they are counted in between."""
    monkeypatch.setattr("kvcore.cache.residency.BATCH", 4)
    seen = Residency(4)
    for key in range(5):
        seen.record_store([key], 0, 1, 1)
    assert not seen._stored
    for key in range(5):
        seen.record_evict([key], 0, 1, 1, (0, 0, 0), "capacity")
    assert not seen._gone
    for _ in range(5):
        seen.record_hit(1, 1)
    assert not seen._ages


def test_an_expired_span_counts_as_evicted():
    """An expired span counts as evicted when it is found."""
    cache, seen = watched(eviction=Mortal())
    serve(cache, "ab", now=0)
    serve(cache, "ab", now=50)
    assert (hits(seen), evictions(seen)) == ([], [(50, 50, 0, 2)])


def test_blocks_below_expired_ones_are_refaults_too():
    """Evicted blocks that are stored again count, though the blocks before them expired."""
    seen = Residency(8)
    seen.record_evict([1, 2, 3, 4], 2, 4, 1, (0, 0, 0), "capacity")
    seen.record_evict([1, 2, 3, 4], 0, 2, 1, (0, 0, 0), "expired")
    seen.record_store([1, 2, 3, 4], 0, 4, 1)
    assert seen.restored_blocks == 2


def test_a_prefix_cache_without_spans_has_no_hits_or_evictions():
    """A prefix cache without spans has no hits and no evictions."""
    cache, seen = watched(prefix=NoPrefix())
    serve(cache, "ab", "ab")
    assert (hits(seen), evictions(seen)) == ([], [])


def test_blocks_stored_again_within_a_pool_of_evictions_are_refaults():
    """Blocks stored again within a pool of evictions after their own are refaults."""
    cache, seen = watched(4)
    serve(cache, "ab", "uvwx", "ab")
    seen.settle()
    assert (seen.stored_blocks, seen.restored_blocks) == (8, 2)


def test_paths_that_leave_together_are_remembered_apart():
    """Of two paths that leave before anything is stored, both are known when they return."""
    refaults = Refaults(8)
    paths = [1, 2], [3, 4]
    refaults.record([], [(keys, 0, 2, 1, 0, 0, 0) for keys in paths])
    refaults.record([(0, keys, 0, 2, 1) for keys in paths], [])
    assert refaults.blocks == 4


def test_a_path_that_ends_where_another_begins_is_remembered_apart():
    """Of blocks that leave one after another, those of one path are joined alone."""
    refaults = Refaults(8)
    refaults.record([], [([1, 2, 3, 4], 2, 4, 1, 0, 0, 0), ([5, 6], 0, 2, 1, 0, 0, 0)])
    refaults.record([(0, [5, 6], 0, 2, 1)], [])
    assert refaults.blocks == 2


def test_blocks_stored_again_after_more_evictions_are_no_refaults():
    """Blocks stored again after more than a pool of other evictions are no refaults."""
    cache, seen = watched(4)
    serve(cache, "ab", "uvwx", "mnop", "ij", "ab")
    seen.settle()
    assert (seen.stored_blocks, seen.restored_blocks) == (14, 0)


def test_expired_blocks_that_are_stored_again_are_no_refaults():
    """Expired blocks that are stored again are no refaults."""
    cache, seen = watched(eviction=Mortal())
    serve(cache, "ab", now=0)
    serve(cache, "ab", now=50)
    seen.settle()
    assert (seen.evicted_blocks, seen.restored_blocks) == ({"capacity": 0, "expired": 2}, 0)


def test_a_loop_longer_than_the_pool_thrashes():
    """Under LRU a loop longer than the pool evicts each block before its use, and thrashes."""
    cache, seen = watched(4)
    serve(cache, *["ab", "uv", "xy"] * 5)
    seen.settle()
    assert (seen.age_at_hit.weight, seen.restored_blocks) == (0, 24)
    assert seen.thrashing


def test_evictions_of_blocks_not_requested_again_are_no_thrashing():
    """Evictions of blocks that are never requested again are no thrashing."""
    cache, seen = watched(4)
    serve(cache, *"abcdefghijklmnopqrs")
    seen.settle()
    assert sum(seen.evicted_blocks.values()) == 15
    assert not seen.thrashing


def test_evictions_of_which_half_had_hit_are_no_thrashing():
    """A loop that evicts blocks it needs again does not thrash if half of them had hit."""
    cache, seen = watched(3)
    serve(cache, *["ab", "ab", "uv", "uv"] * 8)
    assert 2 * seen.never_hit_blocks == seen.evicted_blocks["capacity"] == 30
    assert seen.restored_blocks > seen.age_at_hit.weight
    assert not seen.thrashing


def test_less_than_a_pool_of_evictions_is_no_thrashing():
    """Fewer evictions than the pool has blocks are no thrashing."""
    cache, seen = watched(4)
    serve(cache, "ab", "uvw", "ab")
    assert seen.restored_blocks == 1
    assert not seen.thrashing


@pytest.mark.parametrize(("hits", "thrashes"), [(24, True), (25, False)])
def test_a_cache_with_more_hits_than_refaults_does_not_thrash(hits, thrashes):
    """A cache thrashes with as many refaults as hit blocks, and not with more hit blocks."""
    cache, seen = watched(4)
    serve(cache, *["ab", "uv", "xy"] * 5, *["xy"] * hits)
    seen.settle()
    assert (seen.restored_blocks, seen.age_at_hit.weight) == (24, hits)
    assert seen.thrashing == thrashes


def test_json_has_the_counts_and_the_histograms():
    """The document has counts and histograms by tier in seconds, or is None without samples."""
    cache, seen = watched(4)
    assert seen.by_tier() is None
    serve(cache, "ab", now=0)
    serve(cache, "ab", "uvw", now=3 * 10**6)
    rested = seen.by_tier()["gpu"]
    assert list(rested) == [
        *("age_at_hit_s", "age_at_eviction_s", "lifetime_s", "hits_at_eviction"),
        *("stored_blocks", "restored_blocks", "evicted_blocks", "never_hit_blocks"),
        "thrashing",
    ]
    age = rested["age_at_hit_s"]
    assert (age["blocks"], age["sum"], age["mean"], age["p50"]) == (1, 0.003, 0.003, 0.003)
    assert (age["buckets"]["0.002"], age["buckets"]["0.005"]) == (0, 1)
    hits_ = rested["hits_at_eviction"]["buckets"]
    assert rested["never_hit_blocks"] == hits_["0"] == 1
    assert list(map(float, hits_)) == [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]


@pytest.mark.parametrize(
    ("prompts", "lost"),
    [
        # Of 11 tokens two blocks of 4 hit; the last token is computed in any case.
        ([("abc", None), ("abc", 11)], 2),
        # Tokens of a block that misses are not lost.
        ([("abc", None), ("abx", 12), ("abcd", 4 * BLOCK + 3)], 3),
        # Tokens after the last key are not lost.
        ([("ab", None), ("ab", 14)], 0),
    ],
)
def test_tokens_lost_to_block_granularity(prompts, lost):
    """Lost tokens are those of a partial block that could have hit."""
    cache = make()
    for text, tokens in prompts:
        start(cache, text, tokens)
    assert cache.stats.lost_tokens == lost
