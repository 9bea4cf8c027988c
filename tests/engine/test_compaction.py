"""Compaction: a sequence continues with some of its tokens, in private blocks."""

from array import array
from unittest.mock import Mock

import pytest
from helpers.caches import (
    BLOCK,
    Lines,
    Recorded,
    ask,
    compute,
    make,
    pins,
    serve,
    spans,
    start,
    table,
)
from helpers.retention import Eager
from helpers.serving import ask as request
from helpers.serving import serve as serve_all

from kvcore import InputError, PolicyError, Request
from kvcore.testing.harness import snapshot
from kvcore_engine.retention.window import Window


def unkeyed(cache, tokens):
    """Return a sequence with a prompt that has no keys and is not shared."""
    return compute(cache, cache.open(Request(id=0, prompt_tokens=tokens, key_tokens=BLOCK)))


def grown(cache, seq, tokens):
    """Generate `tokens` tokens, one by one."""
    for _ in range(tokens):
        cache.extend(seq, 1)
        compute(cache, seq)
    return seq


def compact(cache, seq, tokens):
    """Compact a sequence, and return its table."""
    cache.compact(seq, tokens)
    cache.check_integrity()
    return table(cache, seq)


def test_the_first_private_blocks_stay_and_the_others_are_freed():
    """A compacted sequence keeps its first blocks and frees the others, deepest first."""
    cache = make()
    seq = unkeyed(cache, 18)
    assert compact(cache, seq, 6) == [0, 1]
    assert (list(cache.pool.free_ids()), cache.pool.free_blocks) == ([4, 3, 2], 6)


def test_the_table_has_the_lengths_of_the_kept_tokens():
    """A compaction reduces the held tokens and the blocks, but not the position in the text."""
    cache = make()
    seq = start(cache, "abc", 14)
    cache.compact(seq, 6)
    assert (seq.tokens, seq.computed, seq.held) == (6, 6, 6)
    assert (seq.blocks, seq.private_blocks) == (2, 2)
    assert (seq.compacted, seq.dropped_tokens, seq.position) == (8, 8, 14)
    grown(cache, seq, 3)
    assert (seq.held, seq.position, seq.blocks) == (9, 17, 3)
    cache.compact(seq, 4)
    assert (seq.held, seq.compacted, seq.position, seq.blocks) == (4, 13, 17, 1)


def test_a_compaction_removes_holes():
    """A compaction removes the holes of dropped tokens and counts these as compacted."""
    cache = make(retention=Window(tokens=4))
    seq = grown(cache, start(cache, "ab"), 8)
    assert (seq.dropped, seq.held) == (3, 4)
    cache.compact(seq, 2)
    assert (seq.holes, seq.dropped, seq.freed, seq.compacted) == ((), 0, 0, 14)
    assert (seq.held, seq.position, cache.stats.compacted_blocks) == (2, 16, 0)
    cache.close(seq)
    assert cache.pool.free_blocks + cache.tree.unpinned_blocks == 8


def test_a_compacted_sequence_publishes_no_more_blocks():
    """A compacted sequence publishes no more blocks, of its prompt or of its output.

    That holds for keys that are appended later, too.
    """
    cache = make(12)
    seq = cache.open(ask("abcd"))
    compute(cache, seq, 8)
    cache.compact(seq, 4)
    compute(cache, seq)
    assert spans(cache).keys() == {"|ab"}
    seq = cache.open(ask("xy", output_keys=["xyz", "xyzz"]))
    compute(cache, seq)
    cache.compact(seq, 4)
    grown(cache, seq, 8)
    cache.append_keys(seq, ["later"])
    grown(cache, seq, 8)
    assert spans(cache).keys() == {"|ab", "|xy"}


def test_a_compaction_evicts_other_spans_only():
    """A compaction may evict other spans, but not the path from which it copies."""
    cache = make(7)
    serve(cache, "xy")
    seq = start(cache, "abcd", 17)
    assert cache.pool.free_blocks == 0
    assert compact(cache, seq, 12) == [6, 1, 0]
    assert spans(cache).keys() == {"|abcd"}
    assert cache.tree.unpinned_blocks == 4


def test_a_compaction_without_room_is_retried_at_the_next_commit():
    """A compaction without enough blocks is deferred to the next commit."""
    cache = make(5, retention=Eager(8))
    other = cache.open(ask("z"))
    seq = start(cache, "abc")
    assert (seq.compacted, cache.stats.deferred_compactions) == (0, 1)
    cache.close(other)
    grown(cache, seq, 1)
    assert (seq.compacted, cache.stats.compactions, cache.stats.compacted_tokens) == (5, 1, 5)


@pytest.mark.parametrize("tokens", [0, -1, 12, 13])
def test_keeping_no_or_all_tokens_is_refused(tokens):
    """Keeping no tokens, all of them or more is refused, and the error gives the range."""
    cache = make()
    seq = start(cache, "abc")
    with pytest.raises(InputError, match="it holds 12; give 1 to 11"):
        cache.compact(seq, tokens)


def test_a_fork_with_uncomputed_shared_blocks_is_not_compacted():
    """A fork can be compacted only when it has computed all blocks that it shares."""
    cache = make()
    seq = cache.open(ask("abc"))
    child = cache.fork(seq)
    compute(cache, seq)
    compute(cache, child, 8)
    with pytest.raises(InputError, match="once it has computed all 3 blocks that it shares"):
        cache.compact(child, 1)
    assert compact(cache, compute(cache, child), 1) == [3]


def test_the_sibling_of_a_compacted_fork_keeps_the_shared_blocks():
    """The blocks that a compacted fork shared with its sibling belong to the sibling alone.

    The sibling then writes into them without a copy.
    """
    cache = make(12)
    seq = unkeyed(cache, 10)
    child = cache.fork(seq)
    cache.extend(child, 3)
    compute(cache, child)
    assert (table(cache, seq), table(cache, child)) == ([0, 1, 2], [0, 1, 3, 4])
    assert compact(cache, child, 9) == [3, 4, 5]
    assert child.family is None
    cache.extend(seq, 3)
    assert (table(cache, seq), cache.pool.owners) == ([0, 1, 2, 6], {})
    cache.close(seq)
    cache.close(child)
    assert cache.pool.free_blocks == 12


def test_a_commit_shares_with_forks_that_were_not_compacted():
    """A commit shares blocks with the other forks, except with one that was compacted."""
    cache = make(12)
    seq = cache.open(ask("abcd", 18))
    compute(cache, seq, 4)
    parent, child = cache.fork(seq), cache.fork(seq)
    compute(cache, child, 1)
    cache.compact(child, 2)
    compute(cache, seq)
    assert (pins(cache), child.private_blocks) == ({"|a": 2, "a|bcd": 2}, 4)
    for open_ in (parent, child, seq):
        cache.close(open_)
        cache.check_integrity()


def test_a_fork_of_a_compacted_sequence_copies_on_write():
    """A fork of a compacted sequence shares its blocks and copies them on write."""
    cache = make(8)
    seq = unkeyed(cache, 14)
    cache.compact(seq, 6)
    child = cache.fork(seq)
    assert (child.compacted, child.position, table(cache, child)) == (8, 14, [0, 1])
    grown(cache, child, 1)
    grown(cache, seq, 1)
    assert (table(cache, child), table(cache, seq)) == ([0, 2], [0, 1])
    cache.close(seq)
    grown(cache, child, 6)
    cache.close(child)
    assert cache.pool.free_blocks == 8


def test_a_compacted_sequence_with_uncommitted_output_is_not_forked():
    """A compacted sequence with uncommitted tokens of its output cannot be forked."""
    cache = make()
    seq = unkeyed(cache, 14)
    cache.compact(seq, 6)
    cache.extend(seq, 1)
    with pytest.raises(InputError, match="1 allocated tokens are not committed"):
        cache.fork(seq)


def test_a_rollback_stops_at_the_kept_tokens():
    """A rollback cannot remove tokens that a compaction kept: each head has kept others."""
    cache = make()
    seq = unkeyed(cache, 14)
    cache.compact(seq, 6)
    grown(cache, seq, 4)
    before = snapshot(cache)
    with pytest.raises(InputError, match="it has 10, of which the first 6 are shared or forg"):
        cache.rollback(seq, 5)
    assert snapshot(cache) == before
    cache.rollback(seq, 4)
    assert (seq.computed, seq.blocks, seq.position) == (6, 2, 14)
    cache.check_integrity()


def test_a_copy_that_fails_ends_the_use_of_the_cache():
    """If `on_compact` raises, the cache is unusable and every later call raises the error.

    The error names the callback, and no plugin; a PolicyError names a plugin and passes.
    """
    plugin = PolicyError("plugin 'x' raised")
    for raised, says in [
        (OSError("no room"), r"^on_compact\(\) of the owner .* raised .*: no room; seq"),
        (plugin, "^plugin 'x' raised$"),
    ]:
        cache = make(retention=Eager(4))
        cache.on_compact = Mock(side_effect=raised)
        with pytest.raises(PolicyError, match=says) as first:
            start(cache, "abc")
        assert (first.value is plugin) == (raised is plugin)
        with pytest.raises(PolicyError, match=says):
            cache.probe(ask("a"))


@pytest.mark.parametrize("answer", [0, -3, 1.5, "2"])
def test_an_invalid_number_of_kept_tokens_ends_the_use_of_the_cache(answer):
    """A policy whose `keeps()` returns an invalid number raises PolicyError with its name.

    Every later call of the cache raises the same error.
    """
    cache = make(retention=Eager(answer))
    with pytest.raises(
        PolicyError, match=rf"'eager'.* answered keeps\(\) with {answer!r} of"
    ) as first:
        start(cache, "abc")
    for call in (lambda: cache.probe(ask("a")), lambda: cache.open(ask("a"))):
        with pytest.raises(PolicyError) as later:
            call()
        assert str(later.value) == str(first.value)


def test_a_compaction_calls_on_release():
    """A compaction calls `on_release` from leaf to root, as closing does."""
    cache = make(12, Recorded())
    serve(cache, "ab")
    seq = start(cache, "abcd")
    cache.eviction.callbacks.clear()
    cache.compact(seq, 3)
    assert cache.eviction.callbacks == [("on_release", "ab|cd"), ("on_release", "|ab")]


def test_a_compact_line_has_kept_and_new_blocks():
    """COMPACT has the tokens and blocks that stay and the new ones.

    FREE has the number of all removed tokens.
    """
    lines = Lines()
    cache = make(12, trace=lines)
    seq = cache.open(ask("abcd", 18), 15)
    compute(cache, seq, 12)
    cache.compact(seq, 5)
    compute(cache, seq)
    cache.compact(seq, 1)
    cache.close(seq)
    none, some = array("i"), array("i", [4])
    assert lines.of("COMPACT") == [
        {"seq": 1, "tokens": 5, "held": 12, "runs": none, "new": some, "ahead": 3},
        {"seq": 1, "tokens": 1, "held": 8, "runs": some},
    ]
    assert lines.of("FREE")[-1]["compacted"] == 14


@pytest.mark.parametrize(("output", "compactions"), [(1, 0), (5, 1), (9, 2)])
def test_no_compaction_after_the_last_token(output, compactions):
    """A sequence is not compacted after its last token, since nothing attends to it."""
    run = serve_all([request("a", prompt=8, output=output)], retention=Eager(4), trace=False)
    assert run.result.cache.stats.compactions == compactions
