"""Leaves that leave whole, and splits that renew: SGLang's rules of its radix cache."""

import pytest
from helpers.caches import ask, make, serve, start

from kvcore import InputError
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize(("evict", "evicted"), [("blocks", 2), ("leaf", 4)])
def test_a_leaf_leaves_whole(evict, evicted, ids):
    """Where two blocks are missing a leaf of four leaves with two, or all; the rest is free."""
    cache = make(8, prefix=Radix(evict=evict), ids=ids)
    serve(cache, "abcd", "ef")
    seq = start(cache, "uvwx")
    assert cache.tree.evicted_blocks == evicted
    assert cache.pool.free_blocks == evicted - 2
    cache.close(seq)
    cache.check_integrity()


def test_each_step_of_a_prompt_is_a_leaf():
    """What is computed of a prompt at a time leaves at a time."""
    cache = make(8, prefix=Radix(evict="leaf"))
    seq = cache.open(ask("abcd"))
    cache.commit(seq, 8)
    cache.commit(seq, 8)
    cache.close(seq)
    serve(cache, "uvwxy")
    assert cache.probe(ask("abcde")) == 2


@pytest.mark.parametrize(("renews", "left"), [(False, "uv"), (True, "abcd")])
def test_a_split_renews_what_was_not_hit(renews, left):
    """Who parts inside a span makes the rest of it the most recent, or leaves it as old."""
    cache = make(8, LRU(renew_split=renews))
    serve(cache, "abcd", "uv")
    seq = start(cache, "abx")
    other = start(cache, "yzz"[:3])
    assert cache.probe(ask(f"{left}!")) == len(left)
    cache.close(seq)
    cache.close(other)


def test_there_are_two_ways_to_evict():
    """Any other is refused."""
    with pytest.raises(InputError, match="radix: evict='span' is not known"):
        Radix(evict="span")
