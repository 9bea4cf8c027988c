"""The check of a trace against the rules of the cache, and its report."""

from contextlib import contextmanager

import pytest
from helpers.traces import ask, lines, record, seal

from kvcore import KVCache, Trace, TraceError, read_events
from kvcore_plugins.eviction import LRU, TTL
from kvcore_plugins.prefix import Radix
from kvcore_replay.check.trace import check_trace
from kvcore_replay.state.cache import CacheState


@pytest.fixture
def trace(tmp_path):
    """Return the path of a recorded trace with nearly every event in it."""
    return record(tmp_path / "trace.jsonl")


def test_block_tables_are_rebuilt(tmp_path):
    """The rebuilt block table of every open sequence is that of the cache, forks included."""
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        cache = KVCache(12, 4, eviction=LRU(), prefix=Radix(), trace=trace)
        for name, text in enumerate(("abcd", "abx", "abcy")):
            seq = cache.open(ask(name, text))
            cache.commit(seq, 4)
        cache.extend(cache.fork(seq), 3)
        tables = {seq.id: cache.block_table(seq) for seq in cache.sequences.values()}
    header, *events = read_events(path)
    state = CacheState(header)
    for event in events:
        state.apply(event)
    assert {seq.id: seq.table() for seq in state.sequences.values()} == tables


def test_output_blocks_are_shared_by_their_keys(tmp_path):
    """Output blocks are committed under the `output_keys` of their request, and can hit."""
    path = tmp_path / "trace.jsonl"
    longer = ask("longer", "abcd")
    with Trace(path) as trace:
        cache = KVCache(8, 4, eviction=LRU(), prefix=Radix(), trace=trace)
        seq = cache.open(ask("first", "ab", output_keys=longer.keys[2:]))
        cache.extend(seq, 8)
        cache.commit(seq, 16)
        cache.close(seq)
        cache.open(longer)
    assert check_trace(path).hit["hit_blocks"] == 3


def test_the_report_as_json_has_its_schema(trace):
    """The report as JSON has the documented names, in their order."""
    assert list(check_trace(trace).as_dict()) == [
        *("schema", "file", "complete", "lines", "events", "pool"),
        *("requests", "finished", "rejected", "preemptions", "evictions"),
        *("hit", "tiers", "header"),
    ]


@pytest.mark.parametrize(("at", "lines_until", "private"), [(0, 1, 0), (2, 5, 1), (15, 31, 2)])
def test_the_report_of_a_moment_covers_the_lines_up_to_it(trace, at, lines_until, private):
    """The report of a moment covers the lines up to it."""
    report = check_trace(trace, at)
    assert (report.lines, report.pool["private"], report.complete) == (
        lines_until,
        private,
        True,
    )


def test_lines_after_the_moment_are_checked_too(trace):
    """The report of an early moment is refused if a later line is invalid."""
    events = lines(trace)
    events[46]["runs"] = [[4, 1], [1, 1], [3, 1]]
    with pytest.raises(TraceError, match=":47: ALLOC"):
        check_trace(seal(trace, events), 1)


@pytest.mark.parametrize(("text", "names"), [("abc", "xy"), ("a", "xx")])
def test_a_miss_on_expired_blocks_has_the_reason_expired(text, names, tmp_path):
    """A miss on expired blocks has the reason "expired", and the blocks are free.

    So it is of a request that returns with a token more, and may hit its whole prompt.
    """
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        cache = KVCache(8, 4, eviction=TTL(ttl=1), prefix=Radix(), trace=trace)
        for name, now in zip(names, (0, 10**10), strict=True):
            again = {"resumed": True, "target": 5} if now and names == "xx" else {}
            seq = cache.open(ask(name, text), None, now, **again)
            cache.commit(seq, len(text) * 4, now)
            cache.close(seq, now)
    assert [line["why"] for line in lines(path) if line["event"] == "MISS"][1] == "expired"
    assert check_trace(path).pool["cached"] == len(text)


def test_a_request_that_returns_hits_what_others_have_cached(tmp_path):
    """A request that returns may hit all of its prompt, which another one has computed."""
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        cache = KVCache(8, 4, eviction=LRU(), prefix=Radix(), trace=trace)
        cache.close(cache.open(ask("one", "a")))
        cache.commit(cache.open(ask("other", "ab")), 4)
        cache.open(ask("one", "a"), resumed=True, target=5)
    assert check_trace(path).hit["self_hit_blocks"] == 1


def test_a_request_that_returns_hits_what_it_generated_before_it_was_compacted(tmp_path):
    """A compaction takes generated blocks from their sequence, and leaves them in the cache."""
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        trace.describe(batching={"generated": "cached"})
        cache = KVCache(8, 4, eviction=LRU(), prefix=Radix(), trace=trace)
        seq = cache.open(ask("one", "a", output_tokens=20))
        cache.extend(seq, 5)
        cache.commit(seq, 9)
        cache.keep_generated(seq, 9, 0)
        cache.compact(seq, 4)
        cache.close(seq)
        cache.open(ask("one", "a", output_tokens=20), resumed=True, target=13)
    assert check_trace(path).hit["self_hit_blocks"] == 2


@contextmanager
def leaf_and_short_prompt(path, blocks, keys):
    """Yield a traced cache whose leaves leave whole, with a leaf of `keys`, and a sequence."""
    with Trace(path) as trace:
        cache = KVCache(blocks, 4, eviction=LRU(), prefix=Radix(evict="leaf"), trace=trace)
        old = cache.open(ask("old", keys), None, 1)
        cache.commit(old, 4 * len(keys), 2)
        cache.close(old, 3)
        yield cache, cache.open(ask("short", "xy", 6), None, 4)


def test_a_copy_leaves_the_rest_of_a_leaf_free(tmp_path):
    """Where whole leaves are evicted, a copy takes a block of one, and others get the rest."""
    path = tmp_path / "trace.jsonl"
    with leaf_and_short_prompt(path, 5, "abc") as (cache, short):
        for now in (5, 6):
            cache.extend(cache.fork(short, now), 1, now)
        cache.close(cache.open(ask("other", "z"), None, 7), 7)
    report = check_trace(path)
    assert report.evictions["blocks"] == 3
    assert report.pool["free"] == cache.pool.free_blocks == 1


def test_a_call_after_a_copy_takes_what_the_copy_left(tmp_path):
    """The rest of a leaf that a copy has not taken is free for the next call, at once too."""
    path = tmp_path / "trace.jsonl"
    with leaf_and_short_prompt(path, 6, "abcd") as (cache, short):
        cache.fork(short, 5)
        for tokens in (1, 2):
            cache.extend(short, tokens, 6)
    assert check_trace(path).evictions["blocks"] == 4


def test_a_cut_trace_is_reported_up_to_the_cut(trace):
    """The report of a cut trace covers the lines up to the cut, without an error."""
    whole = trace.read_bytes()
    trace.write_bytes(whole[: whole.index(b'{"n":19,')])
    report = check_trace(trace)
    assert (report.complete, report.lines, report.pool["cached"]) == (False, 19, 4)
    assert report.cut_reason == "the file ends after line 19, without END"


@pytest.mark.parametrize(
    ("n", "fields", "reason"),
    [
        (0, {"block_size": 3}, "HEADER: blocks of 3 tokens do not fit keys of 4 in 'tokens'"),
        (1, {"key_tokens": 8}, "REQUEST: keys of 8 tokens; HEADER says 4"),
        (7, {"id": "first"}, "REQUEST: request 'first' has a REQUEST line already"),
        (2, {"request": "nobody"}, "MISS: request 'nobody' has no REQUEST line before this"),
        (2, {"seq": 2}, "MISS: sequence 2 opens; the next one is 1"),
        (2, {"why": "partial"}, "MISS: block 0 missed as 'partial'; it is 'absent'"),
        (2, {"why": "expired"}, "MISS: block 0 missed as 'expired'; it is 'absent'"),
        (2, {"block": 1}, "MISS: sequence 1 is of request 'first' and hit 0 blocks"),
        (2, {"again": True}, "MISS: request 'first' was not admitted before"),
        (10, {"why": "absent"}, "MISS: block 2 missed as 'absent'; it is 'partial'"),
        (10, {"request": "first"}, "MISS: sequence 2 is of request 'same' and hit 2 blocks"),
        (9, {"blocks": 1}, "HIT: 1 blocks hit; 2 are cached and may hit"),
        (9, {"blocks": 3}, "HIT: 3 blocks hit; 2 are cached and may hit"),
        (9, {"span": 1}, "HIT: span 1 is not what sequence 2 has up to block 2"),
        (9, {"span": 7}, "HIT: no span 7 is cached"),
        (3, {"first": 1}, "ALLOC: sequence 1 has 0 blocks: 1 is not next"),
        (3, {"seq": 9}, "ALLOC: no sequence 9 is open"),
        (3, {"runs": [[1, 2]]}, "ALLOC: the pool gives [(0, 2)], not [(1, 2)]"),
        (3, {"runs": [[0, 1], [1, 1]]}, "ALLOC: the run before [1, 1] could be longer"),
        (3, {"runs": [[7, 2]]}, "ALLOC: run [7, 2] leaves the block ids, which are 0 to 7"),
        (3, {"runs": []}, "ALLOC: 0 blocks are taken; 8 are free"),
        (40, {"runs": [[5, 3], [2, 1], [4, 1]]}, "ALLOC: 2 more blocks were evicted than"),
        (8, {"at": 3}, "SPLIT: span 1 is blocks 0 to 3: no split at 3"),
        (8, {"upper": 1}, "SPLIT: span 1 is not new: the last one was 1"),
        (4, {"first": 1}, "COMMIT: the private blocks of sequence 1 are 0 to 2"),
        (4, {"blocks": 3}, "COMMIT: the private blocks of sequence 1 are 0 to 2"),
        (6, {"span": 2}, "COMMIT: sequence 1 may not grow span 2 in place"),
        (6, {"blocks": 3}, "COMMIT: request 'first' has 3 blocks to share"),
        (6, {"how": "new"}, "COMMIT: span 1 is not new: the last one was 1"),
        (6, {"how": "same"}, "COMMIT: span 1 does not continue what sequence 1 holds"),
        (17, {"how": "new"}, "COMMIT: some of the blocks 2 to 3 of sequence 3 are cached"),
        (17, {"how": "shared"}, "COMMIT: sequence 3 does not hold the blocks of span 3"),
        (17, {"span": 1}, "COMMIT: span 1 is not what sequence 3 has up to block 3"),
        (29, {"how": "same"}, "COPY: FREE of sequence 5 must come before this"),
        (29, {"how": "new", "span": 6}, "COMMIT: forked sequences still hold blocks"),
        (30, {"from": 6}, "COPY: block 6 is not the private tail of sequence 5"),
        (30, {"to": 7}, "COPY: the pool gives [(6, 1)], not [(7, 1)]"),
        (35, {"span": 2}, "EVICT: span 2 has 0 pins and 2 children"),
        (35, {"runs": [[1, 1]]}, "EVICT: span 1 is [(2, 1)], tail first"),
        (
            35,
            {"by": "fifo"},
            "EVICT: span 1: by 'lru', age 17 ns, 0 hits expected; the line says by 'fifo'",
        ),
        (35, {"age": 18}, "EVICT: span 1: by 'lru', age 17 ns, 0 hits expected;"),
        (37, {"hits": 1}, "EVICT: span 2: by 'lru', age 13 ns, 2 hits expected;"),
        (35, {"reason": "expired"}, "EVICT: eviction policy 'lru' expires nothing"),
        (35, {"for": "nobody"}, "EVICT: request 'nobody' has no REQUEST line before this"),
        (35, {"for": "first"}, "EVICT: blocks were evicted for request 'first', which takes"),
        (38, {"t": 20}, "EVICT: it is of one call with the line before, which is at 19 ns"),
        (18, {"runs": []}, "FREE: sequence 3 frees [(5, 1)], not []"),
        (18, {"reason": "close"}, "FREE: sequence 3 has no blocks to free with reason 'close'"),
        (19, {"reason": "duplicate"}, "FREE: sequence 1 has no blocks to free with reason"),
        (19, {"seq": 2}, "FREE: sequence 2 frees [], not [[3, 1]]"),
        (19, {"runs": [[4, 1]]}, "FREE: sequence 1 frees [(3, 1)], not [[4, 1]]"),
        (31, {"first": 1}, "FREE: blocks 2 to 3 can be rolled back"),
        (27, {"child": 6}, "FORK: sequence 6 opens; the next one is 5"),
        (27, {"seq": 1}, "FORK: no sequence 1 is open"),
    ],
)
def test_an_impossible_line_is_refused(trace, n, fields, reason):
    """A changed line raises TraceError with the line, the event and the reason.

    The changes keep the file well-formed.
    """
    events = lines(trace)
    events[n] |= fields
    with pytest.raises(TraceError) as caught:
        check_trace(seal(trace, events))
    text = str(caught.value).removeprefix(f"{trace}:")
    line, message = text.split(": ", 1)
    assert message.startswith(reason)
    assert n <= int(line) - 1 <= n + 6


def test_a_copy_needs_another_owner(trace):
    """A COPY of a block with a single owner is refused."""
    events = lines(trace)
    copy = dict(events[30], **{"from": 6, "to": 7})
    with pytest.raises(
        TraceError, match=":32: COPY: block 6 has one owner, who may write to it"
    ):
        check_trace(seal(trace, [*events[:31], copy]))


@pytest.mark.parametrize(
    ("n", "reason"),
    [
        (10, ":11: ALLOC: MISS of sequence 2 must come before this"),
        (18, ":19: FREE: FREE of sequence 3 must come before this"),
        (29, ":30: COPY: forked sequences still hold blocks"),
    ],
    ids=["MISS of a partial HIT", "FREE of duplicates", "COMMIT of a sibling"],
)
def test_a_line_that_must_follow_another_cannot_be_left_out(trace, n, reason):
    """A trace without a line that must follow the one before it is refused."""
    events = lines(trace)
    del events[n]
    with pytest.raises(TraceError, match=reason):
        check_trace(seal(trace, events))


@pytest.mark.parametrize(
    ("n", "reason"),
    [
        (2, ":4: MISS: sequence 1 opens; the next one is 2"),
        (19, ":21: FREE: no sequence 1 is open"),
    ],
)
def test_a_repeated_line_is_refused(trace, n, reason):
    """A second MISS of a sequence is refused, and a second FREE of a closed one."""
    events = lines(trace)
    with pytest.raises(TraceError, match=reason):
        check_trace(seal(trace, [*events[: n + 1], *events[n:]]))


def test_an_eviction_for_a_request_must_be_followed_by_its_alloc(trace):
    """An EVICT for a request must be followed by its ALLOC, unless the trace ends."""
    events = lines(trace)
    asked = {**events[34], "id": "other", "keys": [1, 2, 3, 4, 5, 6], "prompt": 24}
    with pytest.raises(
        TraceError, match=":38: REQUEST: blocks were evicted for request 'last'"
    ):
        check_trace(seal(trace, [*events[:37], asked]))
    assert check_trace(seal(trace, events[:37])).pool["free"] == 5
