"""`rollback`: the newest tokens are dropped, whole blocks freed, shared blocks kept."""

import pytest
from helpers.caches import BLOCK, Lines, ask, compute, make, start, table

from kvcore import InputError


def drafted(cache, tokens):
    """Return a sequence of one shared block and `tokens` generated tokens."""
    seq = start(cache, "a")
    cache.extend(seq, tokens)
    return compute(cache, seq)


@pytest.mark.parametrize(
    ("tokens", "left"), [(0, [0, 1, 2]), (1, [0, 1, 2]), (2, [0, 1]), (5, [0, 1]), (6, [0])]
)
def test_whole_blocks_are_freed(tokens, left):
    """A rollback frees each block whose first token it drops."""
    cache = make()
    seq = drafted(cache, 6)
    cache.rollback(seq, tokens)
    assert table(cache, seq) == left
    assert (seq.tokens, seq.computed, seq.blocks) == (10 - tokens, 10 - tokens, len(left))
    assert cache.pool.free_blocks == 8 - len(left)
    cache.check_integrity()


def test_uncomputed_tokens_are_dropped_first():
    """A rollback of tokens that are not computed leaves the computed count."""
    cache = make()
    seq = start(cache, "a")
    cache.extend(seq, 6)
    compute(cache, seq, 2)
    cache.rollback(seq, 3)
    assert (seq.tokens, seq.computed) == (7, 6)


def test_blocks_are_freed_deepest_first():
    """A rollback frees from the deepest block, so that they are allocated again in order."""
    trace = Lines()
    cache = make(trace=trace)
    seq = drafted(cache, 3 * BLOCK)
    cache.rollback(seq, 3 * BLOCK)
    assert list(trace.of("FREE")[0]["runs"]) == [3, 2, 1]
    assert trace.of("FREE")[0]["reason"] == "rollback"
    cache.extend(seq, 2 * BLOCK)
    assert table(cache, seq) == [0, 1, 2]


def test_a_rollback_is_traced_even_if_a_fork_keeps_the_blocks():
    """FREE has the new end of the table, even if a fork keeps all blocks."""
    trace = Lines()
    cache = make(trace=trace)
    seq = drafted(cache, 6)
    cache.fork(seq)
    cache.rollback(seq, 5)
    (free,) = trace.of("FREE")
    assert (list(free["runs"]), free["first"], free["reason"]) == ([], 2, "rollback")


def test_a_rollback_inside_a_block_is_not_traced():
    """A rollback inside a block writes no line."""
    trace = Lines()
    cache = make(trace=trace)
    seq = drafted(cache, 3)
    trace.lines.clear()
    cache.rollback(seq, 2)
    assert trace.lines == []


def test_a_rollback_into_published_blocks_is_refused(snapshot):
    """A rollback into published blocks raises InputError with both numbers."""
    cache = make()
    seq = drafted(cache, 6)
    before = snapshot(cache)
    with pytest.raises(
        InputError, match=r"rollback of 7 tokens.*it has 10.* first 4 are shared"
    ):
        cache.rollback(seq, 7)
    assert snapshot(cache) == before


def test_negative_tokens_are_refused():
    """A rollback by a negative number of tokens raises InputError."""
    cache = make()
    seq = drafted(cache, 6)
    with pytest.raises(InputError, match="rollback of -1 tokens"):
        cache.rollback(seq, -1)


def test_a_rollback_of_nothing_is_always_allowed():
    """A rollback by 0 tokens is allowed, even where a sibling has published the block."""
    cache = make()
    seq = cache.open(ask("ab"))
    child = cache.fork(seq)
    cache.rollback(child, BLOCK + 2)
    compute(cache, seq)
    cache.rollback(child, 0)
    cache.check_integrity()
