"""`check_integrity` finds every kind of corruption of a cache."""

from array import array

import pytest
from helpers.caches import BLOCK, Mortal, ask, make, serve, spans, start


def used_cache(**options):
    """Return a cache with shared, private and cached blocks, and two open sequences."""
    cache = make(16, Mortal(), **options)
    serve(cache, "ab", "abcd", "xy")
    start(cache, "abcm", 3 * BLOCK + 2)
    start(cache, "lmn", 2 * BLOCK + 1)
    cache.check_integrity()
    return cache


@pytest.fixture
def cache():
    """Return a sound cache to be damaged."""
    return used_cache()


def assert_found(cache, message):
    """Assert that the check fails with `message`."""
    with pytest.raises(AssertionError, match=message):
        cache.check_integrity()


@pytest.mark.parametrize("ids", [True, False])
def test_a_lost_block(ids):
    """A free block that is missing from the count is found.

    The message has the numbers of free, cached, private and all blocks.
    """
    cache = used_cache(ids=ids)
    cache.pool.free_blocks -= 1
    assert_found(cache, r"5 free \+ 8 cached \+ 2 private blocks are 15, .* 16")


def test_a_surplus_free_block(cache):
    """A count of free blocks that is too high is found."""
    cache.pool.free_blocks += 1
    assert_found(cache, "are 17, but the pool has 16")


def test_a_wrong_count_of_private_blocks(cache):
    """A wrong block count of a sequence is found, with the sequence's id."""
    seq = next(iter(cache.sequences.values()))
    seq.blocks += 1
    assert_found(cache, f"<Sequence {seq.id}: .*should hold 2 private blocks and holds 1")


def test_a_private_block_of_two_sequences(cache):
    """A private block in two tables without a fork is found."""
    one, two = cache.sequences.values()
    two.private[0] = one.private[0]
    assert_found(cache, "blocks with several owners")


def test_more_owners_than_tables(cache):
    """A private block with more owners than tables is found."""
    seq = next(iter(cache.sequences.values()))
    cache.pool.share(seq.private)
    assert_found(cache, "blocks with several owners")


def test_a_block_that_is_free_and_private(cache):
    """A block that is free and private is found, with its id."""
    seq = next(iter(cache.sequences.values()))
    cache.pool._freed.append(seq.private[0])
    assert_found(cache, f"block {seq.private[0]} is in two places: free and private")


def test_a_block_in_two_spans(cache):
    """A block in two spans is found, with its id and both spans."""
    one, two = spans(cache)["|xy"], spans(cache)["|ab"]
    one.ids[0] = two.ids[0]
    assert_found(cache, rf"block {two.ids[0]} is in two places: span \d and span \d")


def test_a_block_that_is_nowhere(cache):
    """A block that was allocated and is nowhere is found."""
    cache.pool.high_water += 1
    assert_found(cache, "blocks have been used, but")


def test_a_span_with_too_few_ids(cache):
    """A span with fewer ids than blocks is found."""
    spans(cache)["|xy"].ids = array("i", [1])
    assert_found(cache, "blocks 0-2.* holds 1 ids")


def test_a_wrong_count_of_cached_blocks(cache):
    """A wrong count of cached blocks is found."""
    cache.tree.cached_blocks += 1
    assert_found(cache, "spans hold 8 blocks, .* counted are 9")


def test_a_wrong_count_of_unpinned_blocks(cache):
    """A wrong count of unpinned blocks is found."""
    cache.tree.unpinned_blocks -= 1
    assert_found(cache, "3 unpinned; counted are 8 and 2")


def test_a_span_without_a_parent(cache):
    """A cached span without a parent is found."""
    spans(cache)["abc|d"].parent = None
    assert_found(cache, "is cached and its parent is not")


def test_a_span_under_the_wrong_key(cache):
    """A child whose parent lists it under a wrong key is found."""
    parent = spans(cache)["|ab"]
    parent.children["abz"] = parent.children.pop("abc")
    assert_found(cache, "does not lead to")


def test_a_span_of_another_prompt(cache):
    """A child whose keys do not continue its parent's is found."""
    lost = spans(cache)["abc|d"]
    lost.path_keys = ["z", "zz", "zzz", *lost.path_keys[3:]]
    assert_found(cache, "does not continue the prompt of")


def test_a_gap_between_spans(cache):
    """A gap between a parent and its child is found."""
    span = spans(cache)["abc|d"]
    span.start += 1
    span.end += 1
    span.path_keys = [*span.path_keys[:3], "?", "abcd"]
    span.parent.children = {"?": span}
    assert_found(cache, "blocks 2-3.* does not lead to .* blocks 4-5")


def test_an_empty_span(cache):
    """A span without blocks is found."""
    span = spans(cache)["|xy"]
    span.end = span.start
    assert_found(cache, "blocks 0-0.* does not continue")


def test_a_child_pinned_more_than_its_parent(cache):
    """A span pinned more often than its parent is found."""
    spans(cache)["abc|d"].ref_count = 9
    assert_found(cache, "its children are pinned")


@pytest.mark.parametrize("pins", [0, 2])
def test_a_pin_without_a_sequence(cache, pins):
    """A pin count that differs from the open sequences on the span is found."""
    span = spans(cache)["|lm"]
    cache.tree.unpinned_blocks += span.blocks * (not pins)
    span.ref_count = pins
    assert_found(cache, "on the paths of 1 open sequences")


def test_a_sequence_on_a_span_that_is_gone(cache):
    """An open sequence whose span is not in the tree is found."""
    span = spans(cache)["|lm"]
    del cache.tree.root.children["l"]
    cache.tree.cached_blocks -= span.blocks
    assert_found(cache, "hold .*which are not cached")


def test_a_child_that_outlives_its_parent(cache):
    """A parent that expires before its child is found."""
    spans(cache)["abc|d"].expires = 10**9
    assert_found(cache, "expires before its children")


def test_a_parent_older_than_its_child(cache):
    """An unpinned parent that is less recent than its child is found."""
    for seq in list(cache.sequences.values()):
        cache.close(seq)
    spans(cache)["ab|c"].released_order = 0
    assert_found(cache, "is less recent than its child")


def test_a_sound_cache_passes(cache):
    """A sound cache passes before and after sequences close and open."""
    for seq in list(cache.sequences.values()):
        cache.close(seq)
        cache.check_integrity()
    cache.open(ask("uvw"))
    cache.check_integrity()
