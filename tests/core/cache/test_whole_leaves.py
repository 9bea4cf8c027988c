"""Eviction of whole leaves, and splits that renew spans: rules of SGLang's radix cache."""

import pytest
from helpers.caches import BLOCK, Lines, ask, compute, make, serve, spans, start

from kvcore import InputError, KVCache
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize(("evict", "evicted"), [("blocks", 2), ("leaf", 4)])
def test_a_whole_leaf_is_evicted(evict, evicted, ids):
    """With evict="leaf" a whole leaf is evicted even if two blocks are enough."""
    cache = make(8, prefix=Radix(evict=evict), ids=ids)
    serve(cache, "abcd", "ef")
    seq = start(cache, "uvwx")
    assert cache.tree.evicted_blocks == evicted
    assert cache.pool.free_blocks == evicted - 2
    cache.close(seq)
    cache.check_integrity()


def test_sequences_that_grow_together_evict_whole_leaves():
    """`grow` evicts for sequences as `extend` does, for the first too if no block is free."""

    def grown(grow):
        cache = make(7, prefix=Radix(evict="leaf"), trace=Lines())
        serve(cache, "abc")
        order = [(5, start(cache, "uv")), (6, start(cache, "xy"))]
        grow(cache, order)
        cache.check_integrity()
        blocks = [(event, list(fields["runs"])) for event, fields in cache.trace.lines[-3:]]
        return blocks, [list(seq.private) for _, seq in order]

    def extend(cache, order):
        for now, seq in order:
            cache.extend(seq, 1, now)

    assert grown(KVCache.grow) == grown(extend)


def test_each_step_of_a_prompt_is_a_leaf():
    """With evict="leaf" the blocks of each prefill step are a leaf of their own."""
    cache = make(8, prefix=Radix(evict="leaf"))
    seq = cache.open(ask("abcd"))
    cache.commit(seq, 8)
    cache.commit(seq, 8)
    cache.close(seq)
    serve(cache, "uvwxy")
    assert cache.probe(ask("abcde")) == 2


def test_all_generated_blocks_are_a_leaf():
    """With evict="leaf" the blocks that a request generates, step by step, are one leaf."""
    cache = make(8, prefix=Radix(evict="leaf"))
    seq = start(cache, "ab", output_keys=["abc", "abcd"])
    for _ in range(2):
        cache.extend(seq, BLOCK)
        compute(cache, seq)
    assert set(spans(cache)) == {"|ab", "ab|cd"}


@pytest.mark.parametrize(("renews", "left"), [(False, [2, 2]), (True, [4, 0])])
def test_a_split_renews_the_part_that_was_not_hit(renews, left):
    """With `renew_split` the unhit rest of a split span becomes the most recent."""
    cache = make(8, LRU(renew_split=renews))
    serve(cache, "abcd", "uv")
    seq = start(cache, "abx")
    other = start(cache, "yzw")
    assert [cache.probe(ask(text)) for text in ("abcd!", "uv!")] == left
    cache.close(seq)
    cache.close(other)


def test_an_unknown_value_of_evict_is_refused():
    """An unknown value of `evict` raises InputError."""
    with pytest.raises(InputError, match="radix: evict='span' is not known"):
        Radix(evict="span")
