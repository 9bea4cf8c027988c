"""Lookup: what a hit splits, pins and counts, and what a resumed request may hit."""

import pytest
from helpers.caches import BLOCK, Recorded, ask, compute, make, pins, serve, spans, start, table

from kvcore import InputError


def test_a_shared_prefix_hits():
    """The blocks of a shared prefix hit, with their own ids."""
    cache = make()
    serve(cache, "abc")
    seq = cache.open(ask("abx"))
    assert (seq.hit_blocks, seq.computed) == (2, 2 * BLOCK)
    assert table(cache, seq) == [0, 1, 3]


def test_divergence_inside_a_span_splits_it():
    """A hit of part of a span splits it, and pins only the upper half."""
    cache = make()
    serve(cache, "abcd")
    cache.open(ask("abxy"))
    assert pins(cache) == {"|ab": 1, "ab|cd": 0}


def test_a_hit_that_ends_by_the_limit_splits():
    """A hit that ends at the limit splits the span before the block to be recomputed."""
    cache = make()
    serve(cache, "abc")
    cache.open(ask("abc"))
    assert pins(cache) == {"|ab": 1, "ab|c": 0}


def test_a_match_goes_down_several_spans():
    """A hit across several spans pins all of them."""
    cache = make(12)
    serve(cache, "ab", "abcd", "abcx", "abcdef")
    seq = cache.open(ask("abcdefg"))
    assert seq.hit_blocks == 6
    assert pins(cache) == {"|ab": 1, "ab|c": 1, "abc|d": 1, "abcd|ef": 1, "abc|x": 0}


def test_a_hit_is_an_access():
    """A hit changes the statistics of the spans that it hits, and of no other."""
    cache = make()
    serve(cache, "abcd", now=1)
    request = ask("abx")
    seq = cache.open(request, now=7)
    upper, lower = spans(cache)["|ab"], spans(cache)["ab|cd"]
    assert (upper.hit_count, upper.last_hit_order, upper.last_request, upper.last_access) == (
        1, seq.id, request.id, 7,
    )  # fmt: skip
    assert (lower.hit_count, lower.last_hit_order, lower.last_access) == (0, 1, 1)


def test_hits_of_a_resumed_request_count_apart():
    """A resumed request counts its hits apart, and refreshes only the last access."""
    cache = make(8, Recorded())
    serve(cache, "abc", now=1)
    cache.eviction.callbacks.clear()
    cache.open(ask("abcd"), now=5, resumed=True)
    span = spans(cache)["|abc"]
    assert (span.hit_count, span.last_hit_order, span.last_access) == (0, 1, 5)
    assert (cache.stats.hit_blocks, cache.stats.self_hit_blocks) == (0, 3)
    assert cache.stats.requests == 1
    assert cache.eviction.callbacks == [("on_pin", "|abc")]


def test_a_resumed_request_hits_no_block_that_its_target_fills():
    """Generated blocks that stay cached are hit below the last token to compute."""
    cache = make()
    seq = start(cache, "ab")
    cache.extend(seq, 3 * BLOCK)
    compute(cache, seq)
    cache.keep_generated(seq, 5 * BLOCK, 0)
    hits = [cache.match(seq.request, 0, target).blocks for target in range(9, 22)]
    assert hits == [2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5]


def test_statistics_of_first_admissions():
    """Statistics count blocks and tokens of lookups and hits, and give three hit ratios."""
    cache = make(12)
    serve(cache, "abc", "abxy", "")
    cache.open(ask("xy", 6))
    stats = cache.stats
    assert (stats.requests, stats.lookup_blocks, stats.hit_blocks) == (4, 8, 2)
    assert (stats.lookup_tokens, stats.hit_tokens) == (34, 8)
    assert stats.ratios() == {"block": 2 / 8, "token": 8 / 34, "request": 0.5 / 3}


def test_without_lookups_every_ratio_is_null():
    """Without lookups every hit ratio is None."""
    cache = make()
    serve(cache, "")
    cache.open(ask("", 9))
    assert cache.stats.ratios() == {"block": None, "token": None, "request": None}


def test_keys_of_another_size_are_refused():
    """Keys of another size raise InputError with both sizes in `probe` and `open`."""
    cache = make(key_tokens=BLOCK)
    wrong = ask("abc", key_tokens=16)
    for call in (cache.probe, cache.open):
        with pytest.raises(InputError, match=r"keys of 16 tokens.*key_tokens=4"):
            call(wrong)
