"""Lookup: how far a prompt hits, under both countings, and what a hit does and counts."""

import pytest
from helpers.caches import BLOCK, Recorded, ask, make, pins, serve, spans, table

from kvcore import InputError
from kvcore.testing.harness import snapshot


def test_an_empty_cache_hits_nothing():
    """Nothing is looked up in vain, everything is private."""
    cache = make()
    seq = cache.open(ask("abc"))
    assert (seq.hit_blocks, seq.tokens, seq.computed, seq.private_blocks) == (0, 12, 0, 3)
    cache.check_integrity()


def test_a_shared_prefix_hits():
    """The blocks of an equal prefix are used again, under their own ids."""
    cache = make()
    serve(cache, "abc")
    seq = cache.open(ask("abx"))
    assert (seq.hit_blocks, seq.computed) == (2, 2 * BLOCK)
    assert table(cache, seq) == [0, 1, 3]


def test_the_last_token_is_always_computed():
    """Of a cached prompt with full blocks only, the last block does not hit."""
    cache = make()
    serve(cache, "abc")
    assert cache.probe(ask("abc")) == 2
    assert cache.probe(ask("abc", 3 * BLOCK + 1)) == 3


def test_keys_counting_hits_the_whole_prompt():
    """A full match is a full hit."""
    cache = make(accounting="keys")
    serve(cache, "abc")
    seq = cache.open(ask("abc", 1))
    assert (seq.hit_blocks, seq.private_blocks) == (3, 0)


def test_hits_end_at_the_first_miss():
    """What is cached below a missing block does not count."""
    cache = make()
    serve(cache, "abcd")
    assert cache.probe(ask("axcde")) == 1


def test_divergence_inside_a_span_splits_it():
    """The common part becomes a span of its own, pinned by the hit alone."""
    cache = make()
    serve(cache, "abcd")
    cache.open(ask("abxy"))
    assert pins(cache) == {"|ab": 1, "ab|cd": 0}


@pytest.mark.parametrize("stop", range(1, 9))
def test_divergence_is_found_wherever_it_is(stop):
    """A run of nine blocks is left after each of its blocks in turn."""
    cache = make(20)
    serve(cache, "abcdefghi")
    assert cache.probe(ask("abcdefghi"[:stop] + "xyz")) == stop


def test_a_hit_that_ends_by_the_limit_splits():
    """The block to be computed again is left out of the pinned span."""
    cache = make()
    serve(cache, "abc")
    cache.open(ask("abc"))
    assert pins(cache) == {"|ab": 1, "ab|c": 0}


def test_a_match_goes_down_several_spans():
    """One comparison a span: the whole path is pinned."""
    cache = make(12)
    serve(cache, "ab", "abcd", "abcx", "abcdef")
    seq = cache.open(ask("abcdefg"))
    assert seq.hit_blocks == 6
    assert pins(cache) == {"|ab": 1, "ab|c": 1, "abc|d": 1, "abcd|ef": 1, "abc|x": 0}


def test_probe_is_pure():
    """Asking how much would hit changes nothing, neither order nor statistics."""
    cache = make(4)
    serve(cache, "abc", "x")
    before = snapshot(cache)
    assert cache.probe(ask("abxy"), now=99) == 2
    assert snapshot(cache) == before


def test_a_hit_is_an_access():
    """Statistics change of every span hit, and of no other."""
    cache = make()
    serve(cache, "abcd", now=1)
    request = ask("abx")
    seq = cache.open(request, now=7)
    upper, lower = spans(cache)["|ab"], spans(cache)["ab|cd"]
    assert (upper.hit_count, upper.last_hit_order, upper.last_request, upper.last_access) == (
        1, seq.id, request.id, 7,
    )  # fmt: skip
    assert (lower.hit_count, lower.last_hit_order, lower.last_access) == (0, 1, 1)


def test_a_preempted_request_finds_its_own_blocks_without_reuse():
    """It counts apart: no hit, no access, but its time of last access is refreshed."""
    cache = make(8, Recorded())
    serve(cache, "abc", now=1)
    cache.eviction.told.clear()
    cache.open(ask("abcd"), now=5, resumed=True)
    span = spans(cache)["|abc"]
    assert (span.hit_count, span.last_hit_order, span.last_access) == (0, 1, 5)
    assert (cache.stats.hit_blocks, cache.stats.self_hit_blocks) == (0, 3)
    assert cache.stats.requests == 1
    assert cache.eviction.told == [("on_pin", "|abc")]


def test_statistics_of_first_admissions():
    """Lookup and hit blocks and tokens, and the three ratios."""
    cache = make(12)
    serve(cache, "abc", "abxy", "")
    cache.open(ask("xy", 6))
    stats = cache.stats
    assert (stats.requests, stats.lookup_blocks, stats.hit_blocks) == (4, 8, 2)
    assert (stats.lookup_tokens, stats.hit_tokens) == (34, 8)
    assert stats.ratios() == {"block": 2 / 8, "token": 8 / 34, "request": 0.5 / 3}


def test_without_lookups_every_ratio_is_null():
    """No keys, nothing to look up: there is no ratio, not a ratio of 0."""
    cache = make()
    serve(cache, "")
    cache.open(ask("", 9))
    assert cache.stats.ratios() == {"block": None, "token": None, "request": None}


def test_coarse_keys_hit_by_the_block():
    """Keys of 3 blocks: a hit may end inside a key, and diverges only at its borders."""
    cache = make(20, key_tokens=3 * BLOCK)
    serve(cache, "abc", key_tokens=3 * BLOCK)
    longer = ask("abc", 7 * BLOCK + 1, key_tokens=3 * BLOCK)
    seq = cache.open(longer)
    assert (seq.hit_blocks, seq.private_blocks) == (7, 1)
    assert cache.probe(ask("abx", key_tokens=3 * BLOCK)) == 6
    cache.check_integrity()


def test_a_span_that_ends_inside_a_key_is_continued():
    """A trimmed run is found, and what follows it is found by the same key."""
    cache = make(6, key_tokens=3 * BLOCK)
    serve(cache, "ab", key_tokens=3 * BLOCK)
    serve(cache, "x", tokens=2 * BLOCK, key_tokens=3 * BLOCK)
    assert cache.probe(ask("abc", key_tokens=3 * BLOCK)) == 4
    serve(cache, "ab", key_tokens=3 * BLOCK)
    cache.check_integrity()
    assert cache.probe(ask("abc", key_tokens=3 * BLOCK)) == 6
    assert cache.probe(ask("axy", key_tokens=3 * BLOCK)) == 3


def test_blocks_of_several_keys():
    """With two keys a block, the second of each pair decides."""
    cache = make(8, key_tokens=BLOCK // 2)
    serve(cache, "abcdef", key_tokens=BLOCK // 2)
    assert cache.probe(ask("abcdxy", key_tokens=BLOCK // 2)) == 2
    assert cache.probe(ask("abcxyz", key_tokens=BLOCK // 2)) == 1


def test_keys_of_another_size_are_refused():
    """Neither probe nor open guess: the error names both sizes."""
    cache = make(key_tokens=BLOCK)
    wrong = ask("abc", key_tokens=16)
    for call in (cache.probe, cache.open):
        with pytest.raises(InputError, match=r"keys of 16 tokens.*key_tokens=4"):
            call(wrong)
