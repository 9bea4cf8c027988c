"""The order in which block ids are allocated; equal runs write equal bytes because of it."""

from helpers.caches import ask, make, serve, table


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
