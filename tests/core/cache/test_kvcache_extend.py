"""`extend`: it allocates all blocks that it needs, or raises OutOfBlocks."""

import pytest
from helpers.caches import (
    BLOCK,
    Lines,
    Recorded,
    make,
    serve,
    start,
)

from kvcore import InputError, OutOfBlocks


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 2), (1, 2), (2, 2), (3, 3), (6, 3), (7, 4)])
def test_blocks_follow_tokens(tokens, blocks):
    """`extend` fills the partial last block before it allocates another."""
    cache = make()
    seq = start(cache, "ab", BLOCK + 2)
    cache.extend(seq, tokens)
    assert (seq.tokens, seq.blocks) == (BLOCK + 2 + tokens, blocks)
    assert cache.pool.free_blocks == 8 - blocks
    cache.check_integrity()


def test_a_refused_extension_changes_nothing(snapshot):
    """An `extend` that does not fit allocates and evicts nothing."""
    cache = make(6, Recorded())
    serve(cache, "xyz")
    seq = start(cache, "a")
    before, callbacks = snapshot(cache), list(cache.eviction.callbacks)
    with pytest.raises(
        OutOfBlocks, match=r"needs 6 more .* 2 of 6 are free and 3 can be evicted"
    ):
        cache.extend(seq, 6 * BLOCK)
    assert snapshot(cache) == before
    assert cache.eviction.callbacks == callbacks
    cache.extend(seq, 5 * BLOCK)
    assert cache.pool.free_blocks == 0


def test_negative_tokens_are_refused():
    """A negative number of tokens raises InputError that names rollback."""
    cache = make()
    seq = start(cache, "ab")
    with pytest.raises(InputError, match=r"extend by -1 tokens.*rollback"):
        cache.extend(seq, -1)


def test_the_trace_of_an_extension():
    """`extend` writes EVICT, then ALLOC with its first position in the block table."""
    trace = Lines()
    cache = make(4, trace=trace)
    serve(cache, "xy")
    seq = start(cache, "a")
    trace.lines.clear()
    cache.extend(seq, 2 * BLOCK, now=9)
    assert trace.events() == ["EVICT", "ALLOC"]
    evict, alloc = trace.lines[0][1], trace.lines[1][1]
    assert evict == {
        "span": 1,
        "runs": evict["runs"],
        "by": "lru",
        "for": seq.request.id,
        "age": 9,
        "hits": 0,
        "reason": "capacity",
        "scope": "cache",
    }
    assert (list(evict["runs"]), alloc["first"], list(alloc["runs"])) == ([1], 1, [3, 1])


def test_extending_inside_a_block_is_not_traced():
    """An `extend` within the partial last block writes no line."""
    trace = Lines()
    cache = make(trace=trace)
    seq = start(cache, "ab", BLOCK + 1)
    trace.lines.clear()
    cache.extend(seq, 3)
    assert trace.lines == []
