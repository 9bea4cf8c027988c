"""The order in which block ids are allocated; equal runs write equal bytes because of it."""

from helpers.caches import BLOCK, Mortal, ask, compute, make, serve, start, table


def test_close_frees_deepest_first():
    """`close` frees the deepest block first, so that the shallowest is allocated first."""
    cache = make(12)
    cache.close(cache.open(ask("abc")))
    assert list(cache.pool.free_ids()) == [2, 1, 0]
    assert table(cache, cache.open(ask("mnop"))) == [0, 1, 2, 3]


def test_an_admission_allocates_freed_then_unused_then_evicted_blocks():
    """One admission takes freed blocks first, then unused ones, then victims."""
    cache = make(7)
    private = cache.open(ask("m"))
    serve(cache, "abc")
    cache.close(private)
    assert table(cache, cache.open(ask("vwxyz"))) == [0, 4, 5, 6, 3]


def test_victims_are_evicted_from_their_tails():
    """Victims are evicted one after the other, each from its tail."""
    cache = make(6)
    serve(cache, "abc", "xyz")
    assert table(cache, cache.open(ask("mnopq"))) == [2, 1, 0, 5, 4]


def test_a_parent_is_evicted_after_its_children():
    """A parent is evicted only after its children."""
    cache = make(6)
    serve(cache, "ab", "abcd", "abxy")
    assert table(cache, cache.open(ask("mnopqr"))) == [3, 2, 5, 4, 1, 0]


def test_two_allocations_get_the_blocks_of_a_single_one():
    """Blocks taken in several calls are those of one call, even across evictions."""
    tables = []
    for parts in ([6], [1, 2, 3], [4, 2]):
        cache = make(7)
        serve(cache, "abc", "xyz")
        seq = cache.open(ask("mnopqr"), 0)
        for blocks in parts:
            cache.extend(seq, blocks * BLOCK)
        tables.append(table(cache, seq))
    assert tables[0] == tables[1] == tables[2] == [6, 2, 1, 0, 5, 4]


def test_expired_blocks_are_freed_before_an_allocation():
    """Expired spans are freed before an allocation, leaves first, so their root is next."""
    cache = make(8, Mortal())
    serve(cache, "abc", "abcde", now=0)
    assert table(cache, cache.open(ask("abxyz"), now=50)) == [0, 1, 2, 3, 4]


def test_freed_duplicates_are_allocated_shallowest_first():
    """Duplicate blocks that a commit frees are allocated again in the order of the prompt."""
    cache = make(12)
    one, two = cache.open(ask("abc")), cache.open(ask("abc"))
    compute(cache, one)
    compute(cache, two)
    assert table(cache, cache.open(ask("xyz"))) == [3, 4, 5]


def test_rollback_frees_deepest_first():
    """Tokens computed after a rollback get the dropped blocks in their former order."""
    cache = make(12)
    seq = start(cache, "a")
    cache.extend(seq, 3 * BLOCK)
    cache.rollback(seq, 3 * BLOCK)
    cache.extend(seq, 4 * BLOCK)
    assert table(cache, seq) == [0, 1, 2, 3, 4]
