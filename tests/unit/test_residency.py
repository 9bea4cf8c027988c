"""How long blocks rest before they are used again, or evicted."""

from __future__ import annotations

from caches import BLOCK, Mortal, ask, make, serve, start

from kvcore.cache import Residency
from kvcore_plugins.prefix import NoPrefix


def watched(*args, **options):
    """Return a cache whose blocks are watched, and who watches."""
    cache = make(*args, **options)
    cache.prefix.residency = Residency()
    return cache, cache.prefix.residency


def hits(seen):
    """Return (age, blocks) of the hits."""
    return list(zip(seen.hit_age, seen.hit_blocks, strict=True))


def evictions(seen):
    """Return (time since the last access, lifetime, hits, blocks) of what was evicted."""
    columns = seen.idle, seen.lifetime, seen.hits, seen.evicted_blocks
    return list(zip(*columns, strict=True))


def test_nobody_is_told_unless_asked_for():
    """A cache has no observer of its own."""
    assert make().prefix.residency is None


def test_a_hit_has_the_age_of_the_access_before():
    """Stored at 0 and hit at 10 and at 25: two blocks rested for 10 ns, then for 15."""
    cache, seen = watched()
    serve(cache, "ab", now=0)
    serve(cache, "abc", now=10)
    serve(cache, "abd", now=25)
    assert hits(seen) == [(10, 2), (15, 2)]


def test_every_span_on_the_path_is_a_row():
    """The end of the path was used later than its beginning was stored."""
    cache, seen = watched()
    serve(cache, "ab", now=0)
    serve(cache, "abcd", now=10)
    serve(cache, "abcde", now=30)
    assert hits(seen)[1:] == [(20, 2), (20, 2)]


def test_a_preempted_request_hits_nothing():
    """Finding one's own blocks again is no reuse."""
    cache, seen = watched()
    request = ask("abc")
    cache.close(cache.open(request, now=0))
    serve(cache, "abc", now=5)
    cache.close(cache.open(request, now=9, again=True))
    assert hits(seen) == []


def test_an_eviction_has_age_lifetime_and_hits():
    """Stored at 0, hit at 10, evicted at 40, tail first; the tail was never hit."""
    cache, seen = watched(4)
    serve(cache, "abc", now=0)
    cache.close(start(cache, "abx", 9, now=10), 10)
    serve(cache, "uvwx", now=40)
    assert evictions(seen) == [(40, 40, 0, 1), (30, 40, 1, 2)]


def test_part_of_a_span_is_weighted_by_its_blocks():
    """One block leaves the tail of three."""
    cache, seen = watched(4)
    serve(cache, "abc", now=0)
    serve(cache, "uv", now=7)
    assert evictions(seen) == [(7, 7, 0, 1)]


def test_what_expires_is_evicted():
    """A span whose time is over leaves when it is met."""
    cache, seen = watched(eviction=Mortal())
    serve(cache, "ab", now=0)
    serve(cache, "ab", now=50)
    assert (hits(seen), evictions(seen)) == ([], [(50, 50, 0, 2)])


def test_a_prefix_cache_that_shares_nothing_tells_nothing():
    """There are no rows without spans."""
    cache, seen = watched(prefix=NoPrefix())
    serve(cache, "ab", "ab")
    assert (hits(seen), evictions(seen)) == ([], [])


def test_tokens_lost_to_block_granularity():
    """Of 11 tokens two blocks of 4 hit; but for the last, which is computed, 2 are lost."""
    cache = make()
    start(cache, "abc")
    start(cache, "abc", 11)
    assert cache.stats.lost_tokens == 2


def test_nothing_is_lost_where_more_blocks_could_have_hit():
    """What misses is lost to the cache, not to the size of its blocks."""
    cache = make()
    start(cache, "abc")
    start(cache, "abx", 12)
    start(cache, "abcd", 4 * BLOCK + 3)
    assert cache.stats.lost_tokens == 3


def test_nothing_is_lost_of_what_has_no_keys():
    """A prompt that goes on without keys could not have hit there."""
    cache = make()
    start(cache, "ab")
    start(cache, "ab", 14)
    assert cache.stats.lost_tokens == 0
