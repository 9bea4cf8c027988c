"""`check_integrity` finds every kind of corruption of a cache."""

from array import array

import pytest
from helpers.caches import BLOCK, Mortal, ask, compute, make, serve, spans, start

from kvcore.cache import integrity
from kvcore.request import Hints


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


@pytest.mark.parametrize(
    ("owner", "field", "change", "message"),
    [
        ("pool", "free_blocks", 1, "are 17, but the pool has 16"),
        ("pool", "high_water", 1, "blocks have been used, but"),
        ("tree", "cached_blocks", 1, "spans hold 8 blocks, .* counted are 9"),
        ("tree", "unpinned_blocks", -1, "3 unpinned; counted are 8 and 2"),
    ],
)
def test_a_wrong_count_of_blocks(cache, owner, field, change, message):
    """A wrong count of free, used, cached or unpinned blocks is found."""
    counts = getattr(cache, owner)
    setattr(counts, field, getattr(counts, field) + change)
    assert_found(cache, message)


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("|xy", {"ids": array("i", [1])}, "blocks 0-2.* holds 1 ids"),
        ("|xy", {"end": 0}, "blocks 0-0.* does not continue"),
        ("abc|d", {"parent": None}, "is cached and its parent is not"),
        ("abc|d", {"path_keys": ["z", "zz", "zzz", "abcd"]}, "not continue the prompt of"),
        ("abc|d", {"ref_count": 9}, "its children are pinned"),
        ("|lm", {"ref_count": 2}, "on the paths of 1 open sequences"),
        ("abc|d", {"expires": 10**9}, "expires before its children"),
    ],
)
def test_a_wrong_span(cache, text, fields, message):
    """A span of wrong blocks, keys, pins or expiry, or without a parent, is found."""
    span = spans(cache)[text]
    for name, value in fields.items():
        setattr(span, name, value)
    assert_found(cache, message)


def test_a_wrong_count_of_private_blocks(cache):
    """A wrong block count of a sequence is found, with the sequence's id."""
    seq = next(iter(cache.sequences.values()))
    seq.blocks += 1
    assert_found(cache, f"<Sequence {seq.id}: .*should hold 2 private blocks and holds 1")


def test_a_private_block_of_too_many_owners(cache):
    """A private block in two tables, or with more owners than tables, is found."""
    one, two = cache.sequences.values()
    cache.pool.share(one.private)
    assert_found(cache, "blocks with several owners")
    cache.pool.unshare(one.private[0])
    two.private[0] = one.private[0]
    assert_found(cache, "blocks with several owners")


def test_a_block_in_two_places(cache):
    """A block in two spans, or free and private, is found, with its id and both places."""
    seq = next(iter(cache.sequences.values()))
    cache.pool._freed.append(seq.private[0])
    assert_found(cache, f"block {seq.private[0]} is in two places: free and private")
    cache.pool._freed.pop()
    one, two = spans(cache)["|xy"], spans(cache)["|ab"]
    one.ids[0] = two.ids[0]
    assert_found(cache, rf"block {two.ids[0]} is in two places: span \d and span \d")


def test_a_span_under_the_wrong_key(cache):
    """A child whose parent lists it under a wrong key is found."""
    parent = spans(cache)["|ab"]
    parent.children["abz"] = parent.children.pop("abc")
    assert_found(cache, "does not lead to")


def test_a_gap_between_spans(cache):
    """A gap between a parent and its child is found."""
    span = spans(cache)["abc|d"]
    span.start += 1
    span.end += 1
    span.path_keys = [*span.path_keys[:3], "?", "abcd"]
    span.parent.children = {"?": span}
    assert_found(cache, "blocks 2-3.* does not lead to .* blocks 4-5")


def test_a_sequence_without_its_pin(cache):
    """An open sequence that does not pin its span, or whose span is gone, is found."""
    span = spans(cache)["|lm"]
    cache.tree.unpinned_blocks += span.blocks
    span.ref_count = 0
    assert_found(cache, "on the paths of 1 open sequences")
    cache.tree.unpinned_blocks -= span.blocks
    del cache.tree.root.children["l"]
    cache.tree.cached_blocks -= span.blocks
    assert_found(cache, "hold .*which are not cached")


def test_a_parent_older_than_its_child(cache):
    """An unpinned parent that is less recent than its child is found."""
    for seq in list(cache.sequences.values()):
        cache.close(seq)
    spans(cache)["ab|c"].released_order = 0
    assert_found(cache, "is less recent than its child")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pins, _: pins.held.clear(), "clients pin {<Span .*>: 1}; counted are {}"),
        (lambda pins, _: setattr(pins, "blocks", 3), "they hold 2, not 3"),
        (
            lambda _, patch: patch.setattr(integrity, "PIN_SHARE", 1 / 16),
            r"pins hold 2 blocks, of 1\.0 that they may",
        ),
    ],
    ids=["spans", "blocks", "share"],
)
def test_a_wrong_count_of_client_pins(monkeypatch, damage, message):
    """A pin that is not counted, a wrong count of pinned blocks, and too many are found."""
    cache = make(16)
    serve(cache, "ab", hints=Hints(pin=1))
    damage(cache.pins, monkeypatch)
    assert_found(cache, message)


def test_a_compacted_sequence_that_shares(cache):
    """A compacted sequence that may share blocks, or shares some, is found."""
    seq = compute(cache, cache.open(ask("rs")))
    cache.compact(seq, BLOCK)
    cache.check_integrity()
    seq.cacheable = 1
    assert_found(cache, "was compacted, and shares blocks")


def test_a_sound_cache_passes(cache):
    """A sound cache passes before and after sequences close and open."""
    for seq in list(cache.sequences.values()):
        cache.close(seq)
        cache.check_integrity()
    cache.open(ask("uvw"))
    cache.check_integrity()


def test_the_check_of_a_cache_is_that_of_its_tiers_too(cache):
    """A fault of the tiers below a cache is a fault of the cache."""

    class Broken:
        def check_integrity(self):
            msg = "a level is broken"
            raise AssertionError(msg)

    cache.tiers = Broken()
    assert_found(cache, "a level is broken")
