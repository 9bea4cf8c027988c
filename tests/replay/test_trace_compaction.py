"""Compactions in a trace must follow from the lines before them and fit those after them."""

import pytest
from helpers.traces import BLOCK, ask, compact, lines, seal

from kvcore import KVCache, Trace, TraceError, read_events
from kvcore_engine.retention.window import Window
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix
from kvcore_replay.check.trace import check_trace


@pytest.fixture
def trace(tmp_path):
    """Return the path of a trace with four compactions, in lines 11, 17, 19 and 24."""
    return compact(tmp_path / "trace.jsonl")


@pytest.mark.parametrize(
    ("n", "fields", "reason"),
    [
        (11, {"seq": 9}, "COMPACT: no sequence 9 is open"),
        (
            11,
            {"tokens": 4},
            "COMPACT: sequence 2 has room for 15 tokens of its text, 0 of them",
        ),
        (24, {"tokens": 3}, "FREE: compactions of sequence 2 removed 16 tokens"),
        (11, {"tokens": 2}, "COMPACT: 2 blocks stay, of 2 own ones and 1 new ones"),
        (11, {"tokens": 8}, "COMPACT: 4 blocks stay, of 2 own ones and 1 new ones"),
        (11, {"tokens": 9}, "COMPACT: of 9 tokens 9 stay: it must be fewer"),
        (11, {"held": 10}, "COMPACT: sequence 2 has room for 15 tokens of its text, 5 of them"),
        (11, {"held": 8}, "COMPACT: sequence 2 has room for 13 tokens of its text, 5 of them"),
        (11, {"held": 12}, "COMPACT: sequence 2 has 4 blocks, and kept 0 tokens before: they"),
        (11, {"held": 7, "ahead": 7}, "COMPACT: of 7 tokens 5 stay: it must be fewer, and"),
        (11, {"ahead": 4}, "COMPACT: sequence 2 has room for 13 tokens of its text, 4 of them"),
        (11, {"ahead": 8}, "COMPACT: sequence 2 has 4 blocks, and kept 0 tokens before: they"),
        (11, {"new": [[7, 1]]}, "COMPACT: the pool gives [(6, 1)], not [(7, 1)]"),
        (11, {"new": [[6, 2]]}, "COMPACT: 3 blocks stay, of 2 own ones and 2 new ones"),
        (11, {"new": []}, "COMPACT: 3 blocks stay, of 2 own ones and 0 new ones"),
        (11, {"runs": [[5, 1]]}, "COMPACT: sequence 2 frees [], not [[5, 1]]"),
        (
            17,
            {"seq": 2},
            "COMPACT: sequence 2 has 3 blocks, and kept 5 tokens before: they are",
        ),
        (17, {"new": [[1, 1]]}, "COMPACT: 2 blocks stay, of 0 own ones and 1 new ones"),
        (17, {"new": [[0, 2]]}, "COMPACT: the pool gives [(1, -2)], not [(0, 2)]"),
        (17, {"t": 4}, "COMPACT: it is of one call with the line before, which is at 3 ns"),
        (19, {"runs": [[5, 2]]}, "COMPACT: sequence 2 frees [(6, -2)], not [[5, 2]]"),
        (19, {"runs": [[6, 1]]}, "COMPACT: sequence 2 frees [(6, -2)], not [[6, 1]]"),
        (19, {"runs": []}, "COMPACT: sequence 2 frees [(6, -2)], not []"),
        (19, {"new": [[3, 1]]}, "COMPACT: 1 blocks stay, of 3 own ones and 1 new ones"),
        (19, {"ahead": 1}, "COMPACT: sequence 2 has room for 15 tokens of its text, 1 of them"),
        (19, {"held": 4}, "COMPACT: sequence 2 has 3 blocks, and kept 5 tokens before: they"),
        (24, {"held": 7}, "COMPACT: sequence 2 has room for 18 tokens of its text, 0 of them"),
        (
            24,
            {"held": 7, "tokens": 3},
            "COMPACT: sequence 2 has room for 18 tokens of its text",
        ),
        (27, {"compacted": 14}, "FREE: compactions of sequence 2 removed 15 tokens"),
        (27, {"forgotten": [[0, 2]]}, "FREE: sequence 2 has forgotten [], as first and count"),
    ],
)
def test_a_forged_compaction_is_refused(trace, n, fields, reason):
    """A changed COMPACT or FREE raises TraceError with the event and the reason.

    The changes keep the file well-formed.
    """
    events = lines(trace)
    events[n] |= fields
    with pytest.raises(TraceError) as caught:
        check_trace(seal(trace, events))
    assert str(caught.value).removeprefix(f"{trace}:").split(": ", 1)[1].startswith(reason)


def error_of(trace, events):
    """Return the reason of the error that the check of these lines raises."""
    with pytest.raises(TraceError) as caught:
        check_trace(seal(trace, events))
    return str(caught.value).split(": ", 2)[2]


@pytest.mark.parametrize(
    ("n", "left_out", "repeated"),
    [
        (11, "the pool gives [(6, 2)], not [(7, 2)]", "sequence 2 has 3 blocks, and kept 5"),
        (17, "blocks were evicted for request 'wide'", "sequence 3 has room for 10 tokens of"),
        (19, "sequence 2 has 3 blocks: 1 is not next", "sequence 2 has 1 blocks, and kept 3"),
        (24, "sequence 2 has 2 blocks: 1 is not next", "sequence 2 has 1 blocks, and kept 4"),
    ],
)
def test_a_compaction_left_out_or_repeated_is_refused(trace, n, left_out, repeated):
    """A trace with a COMPACT left out or repeated is refused."""
    events = lines(trace)
    assert error_of(trace, events[:n] + events[n + 1 :]).startswith(left_out)
    assert error_of(trace, events[: n + 1] + events[n:]).startswith(repeated)


def test_a_commit_of_a_compacted_sequence_is_refused(trace):
    """A COMMIT of a compacted sequence is refused."""
    events = lines(trace)
    forged = {"seq": 2, "span": 4, "first": 0, "blocks": 1, "how": "new"}
    commit = {"n": 0, "t": 3, "event": "COMMIT", **forged}
    reason = error_of(trace, [*events[:20], commit, *events[20:]])
    assert reason == "sequence 2 has forgotten blocks, so it has none to share"


def test_an_eviction_for_a_compaction_without_need_is_refused(trace):
    """An EVICT for a compaction that needs no new block is refused."""
    events = lines(trace)
    victim = events[16] | {"t": 3, "for": "long", "span": 3, "runs": [[8, -2]]}
    victim |= {"age": 0, "hits": 0}
    reason = error_of(trace, [*events[:19], victim, *events[19:]])
    assert reason == "blocks were evicted for request 'long', which takes none"


def test_compactions_of_a_server_need_a_retention_policy(trace):
    """Compactions of a server need a retention policy in the header.

    Those of an untimed trace do not.
    """
    events = lines(trace)
    del events[0]["plugins"]["retention"]
    assert error_of(trace, events) == "HEADER has no retention policy that asks for it"
    events = lines(compact(trace))
    events[0]["mode"] = "untimed"
    del events[0]["plugins"]["retention"]
    assert check_trace(seal(trace, events)).complete


def test_a_finished_sequence_has_blocks_for_its_remaining_tokens(trace):
    """At FINISH a sequence needs blocks for its tokens without the removed ones."""
    events = lines(trace)
    del events[25]
    events[26] |= {"runs": [[4, 1]]}
    assert error_of(trace, events).startswith(
        "sequence 2 has had 1 blocks; its prompt and 8 tok"
    )


def test_blocks_that_a_compaction_left_cannot_be_rolled_back(tmp_path):
    """Blocks that a compaction left cannot be rolled back; those after them can."""
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        cache = KVCache(8, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        seq = cache.open(ask("a", "ab", 14))
        cache.commit(seq, 14)
        cache.compact(seq, 6)
        cache.extend(seq, 4)
        cache.rollback(seq, 4)
    assert check_trace(path).complete
    events = lines(path)
    assert (events[-2]["event"], events[-2]["first"]) == ("FREE", 2)
    events[-2] |= {"first": 1, "runs": [[4, -2]]}
    assert error_of(path, events) == "blocks 2 to 3 can be rolled back"


def test_blocks_dropped_before_a_compaction_count_as_removed(tmp_path):
    """Blocks dropped before a compaction count among the removed tokens.

    A window drops two blocks of four, a compaction one: three are removed.
    """
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        cache = KVCache(
            8,
            BLOCK,
            eviction=LRU(),
            prefix=Radix(),
            retention=Window(tokens=2 * BLOCK),
            trace=trace,
        )
        seq = cache.open(ask("a", "abcd"))
        cache.commit(seq, 4 * BLOCK)
        cache.compact(seq, BLOCK)
        gone = seq.compacted
        cache.close(seq)
    closed = next(event for event in read_events(path) if getattr(event, "compacted", 0))
    assert (gone, closed.compacted) == (3 * BLOCK, 3 * BLOCK)
    assert check_trace(path).complete


def test_a_window_may_drop_what_a_compaction_kept(tmp_path):
    """Between compactions a window drops blocks of kept tokens, and newer ones roll back."""
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        cache = KVCache(8, BLOCK, retention=Window(tokens=2 * BLOCK), trace=trace)
        seq = cache.open(ask("a", "abcd"))
        cache.commit(seq, 3 * BLOCK - 1)
        cache.compact(seq, 3 * BLOCK - 2)
        cache.commit(seq, 2)
        assert (seq.held, seq.compacted_to) == (2 * BLOCK, 3 * BLOCK - 2)
        cache.rollback(seq, BLOCK - 1)
        cache.compact(seq, BLOCK)
        cache.close(seq)
    assert check_trace(path).complete


def test_a_compaction_does_not_free_blocks_of_a_fork(tmp_path):
    """A compaction does not free blocks that a fork shares.

    The last sequence that compacts frees them.
    """
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        cache = KVCache(12, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        seq = cache.open(ask("a", "a", 14))
        cache.commit(seq, 10)
        child = cache.fork(seq)
        cache.compact(child, 3)
        cache.compact(seq, 3)
        cache.close(child)
        cache.close(seq)
    events = [line for line in lines(path) if line["event"] == "COMPACT"]
    assert [(line["runs"], line.get("new")) for line in events] == [
        ([], [[4, 2]]),
        ([[3, 1]], None),
    ]
    assert check_trace(path).pool == {"free": 11, "cached": 1, "private": 0, "spans": 1}


def test_an_eviction_for_a_copied_tail_needs_no_alloc(tmp_path):
    """A block evicted for the copy of a shared tail needs no ALLOC after it."""
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        cache = KVCache(4, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        old = cache.open(ask("old", "abc"))
        cache.commit(old, 12)
        cache.close(old)
        seq = cache.open(ask("new", "x", 2))
        cache.commit(seq, 2)
        child = cache.fork(seq)
        cache.extend(child, 1)
        cache.commit(child, 1)
    assert [line["event"] for line in lines(path)][-3:] == ["EVICT", "COPY", "END"]
    assert check_trace(path).pool["cached"] == 2
