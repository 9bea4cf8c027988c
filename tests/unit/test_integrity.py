"""`check_integrity` finds every kind of corruption of a cache."""

from array import array

import pytest
from helpers.caches import BLOCK, Mortal, ask, make, serve, spans, start


def lived_in(**options):
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
    return lived_in()


def refuses(cache, message):
    """Assert that the check fails with `message`."""
    with pytest.raises(AssertionError, match=message):
        cache.check_integrity()


@pytest.mark.parametrize("ids", [True, False])
def test_a_lost_block(ids):
    """A free block that is missing from the count is found.

    The message has the numbers of free, cached, private and all blocks.
    """
    cache = lived_in(ids=ids)
    cache.pool.free_blocks -= 1
    refuses(cache, r"5 free \+ 8 cached \+ 2 private blocks are 15, .* 16")


def test_a_block_gained(cache):
    """A count of free blocks that is too high is found."""
    cache.pool.free_blocks += 1
    refuses(cache, "are 17, but the pool has 16")


def test_a_private_block_too_many(cache):
    """A wrong block count of a sequence is found, with the sequence's id."""
    seq = next(iter(cache.sequences.values()))
    seq.blocks += 1
    refuses(cache, f"<Sequence {seq.id}: .*should hold 2 private blocks and holds 1")


def test_a_private_block_of_two_sequences(cache):
    """A private block in two tables without a fork is found."""
    one, two = cache.sequences.values()
    two.private[0] = one.private[0]
    refuses(cache, "blocks with several owners")


def test_an_owner_too_many(cache):
    """A private block with more owners than tables is found."""
    seq = next(iter(cache.sequences.values()))
    cache.pool.share(seq.private)
    refuses(cache, "blocks with several owners")


def test_a_block_that_is_free_and_private(cache):
    """A block that is free and private is found, with its id."""
    seq = next(iter(cache.sequences.values()))
    cache.pool._freed.append(seq.private[0])
    refuses(cache, f"block {seq.private[0]} is in two places: free and private")


def test_a_block_in_two_spans(cache):
    """A block in two spans is found, with its id and both spans."""
    one, two = spans(cache)["|xy"], spans(cache)["|ab"]
    one.ids[0] = two.ids[0]
    refuses(cache, rf"block {two.ids[0]} is in two places: span \d and span \d")


def test_a_block_nowhere(cache):
    """A block that was allocated and is nowhere is found."""
    cache.pool.high_water += 1
    refuses(cache, "blocks have been used, but")


def test_a_span_with_too_few_ids(cache):
    """A span with fewer ids than blocks is found."""
    spans(cache)["|xy"].ids = array("i", [1])
    refuses(cache, "blocks 0-2.* holds 1 ids")


def test_a_wrong_count_of_cached_blocks(cache):
    """A wrong count of cached blocks is found."""
    cache.tree.cached_blocks += 1
    refuses(cache, "spans hold 8 blocks, .* counted are 9")


def test_a_wrong_count_of_unpinned_blocks(cache):
    """A wrong count of unpinned blocks is found."""
    cache.tree.unpinned_blocks -= 1
    refuses(cache, "3 unpinned; counted are 8 and 2")


def test_an_orphan(cache):
    """A cached span without a parent is found."""
    spans(cache)["abc|d"].parent = None
    refuses(cache, "is cached and its parent is not")


def test_a_span_under_the_wrong_key(cache):
    """A child whose parent lists it under a wrong key is found."""
    parent = spans(cache)["|ab"]
    parent.children["abz"] = parent.children.pop("abc")
    refuses(cache, "does not lead to")


def test_a_span_of_another_prompt(cache):
    """A child whose keys do not continue its parent's is found."""
    lost = spans(cache)["abc|d"]
    lost.path_keys = ["z", "zz", "zzz", *lost.path_keys[3:]]
    refuses(cache, "does not continue the prompt of")


def test_a_gap_between_spans(cache):
    """A gap between a parent and its child is found."""
    span = spans(cache)["abc|d"]
    span.start += 1
    span.end += 1
    span.path_keys = [*span.path_keys[:3], "?", "abcd"]
    span.parent.children = {"?": span}
    refuses(cache, "does not continue|does not lead")


def test_an_empty_span(cache):
    """A span without blocks is found."""
    span = spans(cache)["|xy"]
    span.end = span.start
    refuses(cache, "does not continue")


def test_a_child_pinned_more_than_its_parent(cache):
    """A span pinned more often than its parent is found."""
    spans(cache)["abc|d"].ref_count = 9
    refuses(cache, "its children are pinned")


@pytest.mark.parametrize("pins", [0, 2])
def test_a_pin_without_a_sequence(cache, pins):
    """A pin count that differs from the open sequences on the span is found."""
    span = spans(cache)["|lm"]
    cache.tree.unpinned_blocks += span.blocks * (not pins)
    span.ref_count = pins
    refuses(cache, "on the paths of 1 open sequences")


def test_a_sequence_on_a_span_that_is_gone(cache):
    """An open sequence whose span is not in the tree is found."""
    span = spans(cache)["|lm"]
    del cache.tree.root.children["l"]
    cache.tree.cached_blocks -= span.blocks
    refuses(cache, "hold .*which are not cached")


def test_a_child_that_outlives_its_parent(cache):
    """A parent that expires before its child is found."""
    spans(cache)["abc|d"].expires = 10**9
    refuses(cache, "expires before its children")


def test_a_parent_older_than_its_child(cache):
    """An unpinned parent that is less recent than its child is found."""
    for seq in list(cache.sequences.values()):
        cache.close(seq)
    spans(cache)["ab|c"].released_order = 0
    refuses(cache, "is less recent than its child")


def test_a_sound_cache_passes(cache):
    """A sound cache passes before and after sequences close and open."""
    for seq in list(cache.sequences.values()):
        cache.close(seq)
        cache.check_integrity()
    cache.open(ask("uvw"))
    cache.check_integrity()
