"""Retention: blocks that leave the table of a running sequence are freed or only hidden."""

from re import escape
from types import SimpleNamespace

import pytest
from helpers.caches import BLOCK, Lines, ask, compute, make, start, table
from hypothesis import given
from hypothesis import strategies as st

from kvcore import InputError, KVCache, OutOfBlocks, PolicyError, Request, simulate
from kvcore.cache import RetentionPolicy
from kvcore.cache.retention import new_holes
from kvcore.cache.sequence import merge_holes
from kvcore.testing.harness import snapshot
from kvcore_engine.retention.window import Window


class Ranges(RetentionPolicy):
    """A retention policy that drops the ranges given to its constructor."""

    name = "ranges"

    def __init__(self, *ranges):
        """Store the ranges."""
        super().__init__()
        self.ranges = ranges

    def droppable(self, seq):
        """Return the ranges that are computed."""
        return [(a, b) for a, b in self.ranges if b <= seq.computed]


def running(cache, prompt, tokens):
    """Return a sequence with a prompt of keyed blocks and `tokens` generated tokens."""
    seq = start(cache, prompt)
    for _ in range(tokens):
        cache.extend(seq, 1)
        compute(cache, seq)
    return seq


def test_a_window_frees_private_blocks_of_a_running_sequence():
    """Private blocks before the window are freed while the sequence runs."""
    cache = make(retention=Window(tokens=4))
    seq = running(cache, "", 16)
    assert (cache.pool.free_blocks, seq.private_blocks, seq.freed) == (7, 1, 3)
    cache.check_integrity()


def test_shared_blocks_are_hidden_and_stay_pinned():
    """Shared blocks before the window leave the table, but stay cached and pinned."""
    cache = make(retention=Window(tokens=4))
    seq = start(cache, "abc")
    assert (table(cache, seq), seq.dropped, seq.freed) == ([2], 2, 0)
    assert (cache.tree.cached_blocks, cache.tree.unpinned_blocks, cache.pool.free_blocks) == (
        3,
        0,
        5,
    )


def test_a_block_is_dropped_after_all_its_tokens_left_the_window():
    """A block stays in the table as long as one of its tokens is in the window."""
    cache = make(retention=Window(tokens=5))
    assert table(cache, start(cache, "abc")) == [1, 2]


def test_a_sequence_publishes_no_blocks_after_dropping_tokens():
    """After dropping tokens a sequence publishes no blocks, as their K/V differs."""
    cache = make(retention=Window(tokens=4))
    seq = cache.open(ask("abcd"))
    cache.commit(seq, 12)
    cache.commit(seq, 4)
    assert (cache.tree.cached_blocks, seq.span.end) == (3, 3)
    assert cache.probe(ask("abcde")) == 3


def test_a_first_chunk_is_published_whole():
    """A first chunk is published whole, since tokens are dropped after it is computed."""
    cache = make(retention=Window(tokens=4))
    start(cache, "abcdef")
    assert cache.tree.cached_blocks == 6


def test_after_closing_each_block_is_free_or_cached():
    """After closing, each block is either free or cached."""
    cache = make(retention=Window(tokens=4, sinks=4))
    cache.close(running(cache, "ab", 13))
    cache.check_integrity()
    assert (cache.pool.free_blocks, cache.tree.cached_blocks) == (6, 2)


def test_dropped_ranges_may_be_unordered_overlap_or_repeat():
    """Ranges in any order, overlapping or repeated, drop each block once."""
    cache = make(retention=Ranges((16, 20), (4, 8), (4, 12), (0, 3), (4, 8)))
    seq = start(cache, "abcdef")
    assert (table(cache, seq), seq.holes) == ([0, 3, 5], ((1, 3), (4, 5)))


def test_each_dropped_range_frees_the_private_blocks_at_its_positions():
    """Each range frees the private blocks at its positions, whatever was freed before them."""
    cache = make(retention=Ranges((4, 8), (12, 16), (20, 24)))
    seq = cache.open(Request(id=0, prompt_tokens=28, key_tokens=BLOCK))
    cache.commit(seq, 20)
    assert (table(cache, seq), list(cache.pool.free_ids())) == ([0, 2, 4, 5, 6], [3, 1])
    compute(cache, seq)
    assert table(cache, seq) == [0, 2, 4, 6]


TOKENS = st.tuples(st.integers(0, 80), st.integers(0, 24)).map(lambda r: (r[0], sum(r)))


@given(calls=st.lists(st.lists(TOKENS, max_size=6), max_size=4))
def test_holes_are_the_runs_of_the_blocks_that_were_dropped(calls):
    """Each call drops the blocks that lie whole in a range and are there; holes are runs."""
    layout = SimpleNamespace(geometry=SimpleNamespace(block_size=BLOCK))
    seq, dropped = SimpleNamespace(holes=(), computed=104, span=layout), set()
    for ranges in calls:
        wanted = {b for first, end in ranges for b in range(-(-first // BLOCK), end // BLOCK)}
        new = new_holes(RetentionPolicy(), seq, ranges)
        assert all(first < end for first, end in new)
        assert [b for hole in new for b in range(*hole)] == sorted(wanted - dropped)
        dropped |= wanted
        seq.holes = merge_holes([*seq.holes, *new])
        firsts = [b for b in sorted(dropped) if b - 1 not in dropped]
        ends = [b + 1 for b in sorted(dropped) if b + 1 not in dropped]
        assert seq.holes == tuple(zip(firsts, ends, strict=True))


def test_a_dropped_range_may_cover_shared_and_private_blocks():
    """In a range over shared and private blocks, the former are hidden and the latter freed."""
    cache = make(retention=Ranges((4, 16)))
    seq = running(cache, "ab", 8)
    assert (table(cache, seq), seq.dropped, seq.freed) == ([0], 3, 2)
    assert cache.pool.free_blocks == 6


def test_forks_that_share_private_blocks_do_not_drop_them():
    """While forks share private blocks, neither drops any."""
    cache = make(retention=Window(tokens=4))
    seq = running(cache, "", 4)
    child = cache.fork(seq)
    for _ in range(8):
        cache.extend(seq, 1)
        compute(cache, seq)
    assert (seq.dropped, table(cache, child)[0]) == (0, table(cache, seq)[0])
    cache.close(child)
    cache.extend(seq, 4)
    compute(cache, seq)
    assert seq.dropped == 3
    cache.check_integrity()


def test_forks_without_shared_private_blocks_free_their_own():
    """Forks with a last block of their own both free blocks that they generated."""
    cache = make(16, retention=Window(tokens=4))
    seq = running(cache, "ab", 2)
    child = cache.fork(seq)
    for fork in (child, seq):
        cache.extend(fork, 1)
        compute(cache, fork)
    for fork in (seq, child):
        cache.extend(fork, 9)
        compute(cache, fork)
    assert (seq.freed, child.freed) == (2, 2)


def test_a_fork_drops_nothing_before_it_computed_published_blocks():
    """A fork drops nothing until it has computed the blocks that the other published."""
    cache = make(retention=Window(tokens=1))
    seq = cache.open(ask("abc"))
    child = cache.fork(seq)
    compute(cache, seq)
    cache.close(seq)
    compute(cache, child, 2 * BLOCK)
    assert (child.span.end, child.holes) == (3, ())
    assert compute(cache, child).holes == ((0, 2),)


def test_a_fork_after_a_drop_has_the_table_of_its_parent():
    """A fork has the table of its parent after a drop, and each block is freed once."""
    cache = make(retention=Window(tokens=4))
    seq = running(cache, "", 12)
    child = cache.fork(seq)
    assert table(cache, child) == table(cache, seq)
    cache.close(seq)
    cache.check_integrity()
    cache.close(child)
    cache.check_integrity()
    assert cache.pool.free_blocks == 8


def test_a_rollback_to_before_a_dropped_range_is_refused():
    """A rollback to before a dropped range raises InputError and changes nothing."""
    cache = make(retention=Window(tokens=4))
    seq = running(cache, "", 16)
    before = snapshot(cache)
    with pytest.raises(InputError, match="the first 12 are shared or forgotten"):
        cache.rollback(seq, 5)
    assert snapshot(cache) == before
    cache.rollback(seq, 4)
    cache.check_integrity()
    assert cache.pool.free_blocks == 8


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        *[([(-1, 4)], "(-1, 4)"), ([(0, 99)], "(0, 99)"), ([(8, 4)], "(8, 4)")],
        *[(["ab"], "'ab'"), ([(1,)], "(1,)"), ([(0.0, 4.0)], "(0.0, 4.0)")],
        *[(None, "None"), ((0, 4), "0")],
    ],
)
def test_a_wrong_range_of_droppable_drops_nothing(answer, shown):
    """A wrong range of `droppable` raises PolicyError with plugin and range; nothing drops."""

    class Wrong(Ranges):
        name = "wrong"

        def droppable(self, seq):
            return answer

    cache = make(retention=Wrong())
    seq = cache.open(Request(id=0, prompt_tokens=8, key_tokens=BLOCK))
    says = rf"plugin 'wrong' .* answered droppable\(\) with {escape(shown)}: give .* 8,"
    with pytest.raises(PolicyError, match=says):
        cache.commit(seq, 8)
    assert (seq.holes, cache.pool.free_blocks) == ((), 6)


def test_the_trace_has_a_line_for_each_dropped_range():
    """The trace has an EVICT line of scope `sequence` for each range, with the freed blocks."""
    lines = Lines()
    cache = make(retention=Window(tokens=4), trace=lines)
    running(cache, "a", 8)
    dropped = [fields for event, fields in lines.lines if event == "EVICT"]
    assert [(f["first"], f["blocks"], list(f["runs"])) for f in dropped] == [
        (0, 1, []),
        (1, 1, [1]),
    ]
    assert {(f["seq"], f["by"], f["reason"], f["scope"]) for f in dropped} == {
        (1, "window", "retention", "sequence")
    }


def test_a_window_serves_outputs_longer_than_the_pool():
    """Two outputs longer than the pool together run without preemption under a window."""
    requests = [
        Request(id=i, prompt_tokens=4, output_tokens=80, key_tokens=BLOCK) for i in range(2)
    ]

    def preemptions(retention):
        cache = KVCache(24, BLOCK, retention=retention)
        return simulate(requests, cache=cache).summary()["preemptions"]["recompute"]

    assert preemptions(None) == 1
    assert preemptions(Window(tokens=16)) == 0


def test_contiguous_memory_with_a_retention_policy_is_refused():
    """Contiguous allocation with a retention policy raises InputError that names both."""
    with pytest.raises(InputError, match=r"contiguous.*'window'"):
        simulate([], cache=KVCache(8, retention=Window()), allocation="contiguous")


def test_a_full_pool_can_extend_a_sequence_after_a_drop():
    """A full pool can extend a sequence as soon as it has dropped blocks."""
    cache = make(4, retention=Window(tokens=4))
    seq = cache.open(Request(id=0, prompt_tokens=16, key_tokens=BLOCK))
    with pytest.raises(OutOfBlocks):
        cache.extend(seq, 1)
    compute(cache, seq)
    cache.extend(seq, 1)
    assert cache.pool.free_blocks == 2
