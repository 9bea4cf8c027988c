"""Commits: published blocks, duplicates, growth in place, and splits."""

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

from kvcore import InputError, OutOfBlocks, Span
from kvcore.request import text_request
from kvcore_plugins.prefix import Radix


def test_a_partial_block_is_not_published():
    """A commit publishes only full blocks."""
    cache = make()
    seq = cache.open(ask("abc"))
    compute(cache, seq, 2 * BLOCK - 1)
    assert spans(cache).keys() == {"|a"}
    compute(cache, seq, 1)
    assert spans(cache).keys() == {"|ab"}


def test_blocks_without_keys_stay_private():
    """Generated blocks without keys stay private, and are freed at close."""
    cache = make()
    seq = start(cache, "ab")
    cache.extend(seq, 3 * BLOCK)
    compute(cache, seq)
    assert (cache.tree.cached_blocks, seq.private_blocks) == (2, 3)
    cache.close(seq)
    assert cache.pool.free_blocks == 6


@pytest.mark.parametrize("key_tokens", [1, 2, BLOCK, 2 * BLOCK])
def test_keys_that_are_appended_publish_blocks_of_any_size(key_tokens):
    """Keys that come one by one, for less or more than a block, publish what a turn hits."""
    cache, tokens = make(12, key_tokens=None), range(6 * BLOCK + 1)
    prompt, turn = (
        text_request(name, tokens[:end], output=99, block_size=key_tokens, publish=True)
        for name, end in enumerate((BLOCK + 1, None))
    )
    seq = cache.open(prompt)
    cache.extend(seq, 5 * BLOCK)
    for key in turn.keys[len(prompt.keys) :]:
        cache.append_keys(seq, [key])
    compute(cache, seq)
    assert cache.probe(turn) == 6


def test_keys_of_an_output_are_refused_where_prompts_alone_count():
    """In `keys` accounting keys of an output are refused, and its request stays as it is."""
    cache = make(12, accounting="keys")
    request = text_request(1, range(BLOCK), output=9, block_size=BLOCK, publish=True)
    with pytest.raises(InputError, match="publishes no output"):
        cache.append_keys(cache.open(request), ["later"])
    assert len(request.keys) == 1


def test_output_keys_publish_generated_blocks():
    """Generated blocks with output keys are published, and hit by the next turn."""
    cache = make()
    seq = cache.open(ask("ab", output_keys=["abc", "abcd"]))
    cache.extend(seq, 2 * BLOCK)
    compute(cache, seq)
    cache.close(seq)
    assert cache.probe(ask("abcde")) == 4


def test_a_text_is_whole_once_its_last_token_but_one_is_computed():
    """The newest token of an output is never computed; without an output none is whole."""
    cache = make()
    seq = cache.open(ask("a", output_tokens=3))
    cache.extend(seq, 2)
    whole = [compute(cache, seq, tokens).is_whole for tokens in (4, 1, 1)]
    assert whole == [False, False, True]
    assert not start(cache, "b").is_whole


def test_commit_of_unallocated_tokens_is_refused():
    """A commit of more tokens than allocated raises InputError and changes nothing."""
    cache = make()
    seq = cache.open(ask("abc"), 6)
    cache.commit(seq, 5)
    with pytest.raises(InputError, match=r"commit of 2 tokens.*5 of its 6 allocated"):
        cache.commit(seq, 2)
    assert seq.computed == 5


def test_commit_of_negative_tokens_is_refused():
    """A commit of a negative number of tokens raises InputError."""
    cache = make()
    seq = start(cache, "abc")
    with pytest.raises(InputError, match="commit of -1 tokens"):
        cache.commit(seq, -1)


def test_a_closed_sequence_is_refused():
    """Every call that changes or reads a closed sequence raises InputError."""
    cache = make()
    seq = start(cache, "ab")
    cache.close(seq)
    calls = [
        lambda: cache.commit(seq, 0),
        lambda: cache.extend(seq, 1),
        lambda: cache.close(seq),
        lambda: cache.fork(seq),
        lambda: cache.rollback(seq, 1),
        lambda: cache.block_table(seq),
        lambda: cache.append_keys(seq, (1,)),
    ]
    for call in calls:
        with pytest.raises(InputError, match="is closed"):
            call()


def test_a_sequence_of_another_cache_is_refused():
    """A sequence of another cache raises InputError."""
    cache, other = make(), make()
    start(cache, "ab")
    with pytest.raises(InputError, match="not of this cache"):
        cache.close(start(other, "ab"))


def test_the_creator_of_a_leaf_grows_it_in_place():
    """A sequence computed in chunks extends one span; only its first chunk is inserted."""
    cache = make(8, Recorded())
    seq = cache.open(ask("abc"))
    for _ in range(3):
        compute(cache, seq, BLOCK)
    assert pins(cache) == {"|abc": 1}
    assert cache.eviction.callbacks == [
        ("on_miss", 0),
        ("on_insert", "|a"),
        ("on_extend", "|ab"),
        ("on_extend", "|abc"),
    ]


def test_growth_ends_with_the_first_reuse():
    """After another request has pinned the leaf, its creator appends a child span."""
    cache = make()
    seq = cache.open(ask("abc"))
    compute(cache, seq, BLOCK)
    cache.close(start(cache, "ax"))
    compute(cache, seq)
    assert pins(cache) == {"|a": 1, "a|bc": 1, "a|x": 0}


def test_growth_ends_with_a_resumed_request():
    """After a resumed request has pinned the leaf, its creator appends a child span."""
    cache = make()
    seq = cache.open(ask("abc"))
    compute(cache, seq, BLOCK)
    cache.close(cache.open(ask("ax"), 0, resumed=True))
    compute(cache, seq)
    assert pins(cache) == {"|a": 1, "a|bc": 1}


def test_growth_ends_with_close():
    """A later sequence of the same request continues the cached leaf by a child span."""
    cache = make()
    request = ask("abc")
    first = cache.open(request, BLOCK)
    compute(cache, first)
    cache.close(first)
    compute(cache, cache.open(request, resumed=True))
    assert pins(cache) == {"|a": 1, "a|bc": 1}


def test_a_refused_admission_does_not_end_growth():
    """A refused admission does not end the growth of the leaf that it would have hit."""
    cache = make(4)
    seq = cache.open(ask("abc"))
    compute(cache, seq, BLOCK)
    with pytest.raises(OutOfBlocks, match="needs 5 more"):
        cache.open(ask("auvwxy"))
    compute(cache, seq)
    assert pins(cache) == {"|abc": 1}


def test_growth_goes_on_in_the_lower_half_of_a_split():
    """After a split, the creator still grows the lower half in place."""
    cache = make(12)
    seq = cache.open(ask("abcd"))
    compute(cache, seq, 3 * BLOCK)
    cache.close(start(cache, "ax"))
    compute(cache, seq)
    assert pins(cache) == {"|a": 1, "a|bcd": 1, "a|x": 0}


def test_a_reinserted_tail_is_a_child():
    """A tail that is inserted again after its eviction is a child span."""
    cache = make(4)
    serve(cache, "abcd", "x")
    assert spans(cache).keys() == {"|abc", "|x"}
    serve(cache, "abcd")
    assert spans(cache).keys() == {"|abc", "abc|d"}


def test_a_last_full_block_that_matched_is_replaced_at_commit():
    """The last block of a cached prompt is recomputed, then replaced by the cached one."""
    cache = make(6)
    serve(cache, "abc")
    seq = cache.open(ask("abc"))
    assert table(cache, seq) == [0, 1, 3]
    compute(cache, seq)
    assert table(cache, seq) == [0, 1, 2]
    assert (cache.pool.free_blocks, cache.tree.cached_blocks) == (3, 3)


def test_a_duplicate_is_no_hit_and_no_access():
    """A switch to a cached duplicate only pins its span: it is no hit and no access."""
    cache = make(6, Recorded())
    serve(cache, "abc", now=1)
    cache.eviction.callbacks.clear()
    seq = cache.open(ask("abc"), now=2)
    before = len(cache.eviction.callbacks)
    compute(cache, seq, now=2)
    last = spans(cache)["ab|c"]
    assert (last.hit_count, last.last_hit_order, last.last_access, last.ref_count) == (
        0,
        1,
        1,
        1,
    )
    assert cache.eviction.callbacks[before:] == [("on_pin", "ab|c")]
    assert cache.stats.hit_blocks == 2


def test_two_sequences_compute_the_same_prompt():
    """The second sequence to commit a prompt switches to the first's blocks."""
    cache = make()
    one, two = cache.open(ask("abc")), cache.open(ask("abc"))
    assert cache.pool.free_blocks == 2
    compute(cache, one)
    compute(cache, two)
    assert table(cache, one) == table(cache, two) == [0, 1, 2]
    assert cache.pool.free_blocks == 5
    assert pins(cache) == {"|abc": 2}


def test_a_switch_splits_where_prompts_diverge():
    """A commit that diverges inside a span splits it, and adds the rest as a child."""
    cache = make(12)
    one, two = cache.open(ask("abcd")), cache.open(ask("abxy"))
    compute(cache, one)
    compute(cache, two)
    assert pins(cache) == {"|ab": 2, "ab|cd": 1, "ab|xy": 1}
    assert table(cache, two) == [0, 1, 6, 7]


def test_a_switch_goes_down_several_spans():
    """One commit can switch to several spans that others have committed."""
    cache = make(16)
    late = cache.open(ask("abcdef"))
    serve(cache, "ab", "abcd")
    compute(cache, late)
    assert pins(cache) == {"|ab": 1, "ab|cd": 1, "abcd|ef": 1}
    assert cache.pool.free_blocks == 10


def test_a_switch_ends_growth():
    """After another sequence has switched to a leaf, its creator appends a child span."""
    cache = make(12)
    one, two = cache.open(ask("abc")), cache.open(ask("abx"))
    compute(cache, one, 2 * BLOCK)
    cache.commit(two, 2 * BLOCK)
    cache.close(two)
    compute(cache, one)
    assert pins(cache) == {"|ab": 1, "ab|c": 1}


def test_duplicates_are_freed_deepest_first():
    """Duplicates are freed from the deepest, so that the shallowest is allocated next."""
    trace = Lines()
    cache = make(trace=trace)
    one, two = cache.open(ask("abc")), cache.open(ask("abc"))
    compute(cache, one)
    compute(cache, two)
    (free,) = trace.of("FREE")
    assert (free["reason"], list(free["runs"])) == ("duplicate", [5, 4, 3])
    assert table(cache, cache.open(ask("xy"))) == [3, 4]


def test_the_trace_of_a_commit():
    """COMMIT lines are `new`, `grown`, or `same` with a FREE line for duplicates."""
    trace = Lines()
    cache = make(12, trace=trace)
    one, two = cache.open(ask("abc")), cache.open(ask("abcd"))
    compute(cache, one, BLOCK)
    compute(cache, one)
    compute(cache, two)
    lines = [(line["how"], line["first"], line["blocks"]) for line in trace.of("COMMIT")]
    assert lines == [("new", 0, 1), ("grown", 1, 2), ("same", 0, 3), ("new", 3, 1)]
    assert trace.events()[-3:] == ["COMMIT", "FREE", "COMMIT"]


def test_a_span_has_the_time_and_request_of_its_first_block():
    """A span has the time, serial, request and tenant of the commit of its first block."""
    cache = make()
    request = ask("abc", tenant="t")
    seq = cache.open(request, now=3)
    compute(cache, seq, BLOCK, now=5)
    compute(cache, seq, now=8)
    span = spans(cache)["|abc"]
    assert (span.created, span.last_access, span.tenant) == (5, 5, "t")
    assert (span.last_hit_order, span.last_request) == (seq.id, request.id)
    assert (span.tokens, span.depth, span.blocks, span.is_leaf) == (3 * BLOCK, 0, 3, True)


@pytest.mark.parametrize("prefix", ["radix", "hashed:spans=block"])
def test_a_turn_counts_the_requests_of_a_path(prefix):
    """Each request that continues a path has a turn more, however many spans it stores."""
    cache = make(prefix=prefix)
    for text in ("ab", "abcd", "abcdef"):
        seq = cache.open(ask(text))
        compute(cache, seq, BLOCK)
        compute(cache, seq)
        cache.close(seq)
    turns = {span.end: span.turn for span in cache.tree.spans()}
    assert {end: turns[end] for end in (2, 4, 6)} == {2: 1, 4: 2, 6: 3}


def test_a_split_keeps_turns_and_who_stored_the_span():
    """Both halves of a split have the turn of the whole, and the request that stored it."""
    cache = make()
    serve(cache, "ab")
    request = ask("abcd")
    cache.close(compute(cache, cache.open(request)))
    serve(cache, "abcx")
    halves = [spans(cache)[text] for text in ("ab|c", "abc|d")]
    assert [(half.turn, half.created_by) for half in halves] == [(2, request.id)] * 2
    assert (spans(cache)["abc|x"].turn, cache.tree.root.created_by) == (3, None)


def test_a_request_that_resumes_has_the_turn_that_it_had():
    """The spans that a preempted request stores after its return are of the same turn."""
    cache = make()
    request = ask("abcd")
    seq = cache.open(request)
    compute(cache, seq, 2 * BLOCK)
    cache.close(seq, preempted=True)
    seq = cache.open(request, resumed=True)
    compute(cache, seq)
    assert {span.turn for span in cache.tree.spans()} == {1}
    assert len(spans(cache)) == 2


def test_a_split_copies_statistics():
    """Both halves of a split have the statistics of the whole; the lower keeps its id."""
    cache = make()
    serve(cache, "abcd", now=1)
    serve(cache, "abcde", now=2)
    whole = spans(cache)["|abcd"]
    cache.open(ask("abx"), now=3)
    upper, lower = spans(cache)["|ab"], spans(cache)["ab|cd"]
    assert lower is whole
    assert upper.id not in {whole.id, spans(cache)["abcd|e"].id}
    assert (upper.created_order, upper.created, upper.hit_count) == (
        lower.created_order,
        lower.created,
        2,
    )
    assert (lower.hit_count, lower.released_order, lower.depth) == (
        1,
        upper.released_order,
        2 * BLOCK,
    )


def test_the_head_of_a_span_copies_every_attribute_but_its_own():
    """`Span.head` leaves out no attribute: what is not its own is that of the span."""
    cache = make()
    serve(cache, "abcd")
    whole = spans(cache)["|abcd"]
    own = {"id", "end", "children", "ref_count", "ids", "data", "creator"}
    copied = {name: object() for name in Span.__slots__ if name not in own}
    for name, value in copied.items():
        setattr(whole, name, value)
    head = whole.head(7, 2, "c")
    assert {name: getattr(head, name) for name in copied} == copied


def test_recency_counts_up_from_leaf_to_root():
    """After a close, spans on its path are more recent the nearer they are to the root."""
    cache = make(12)
    serve(cache, "ab", "abcd")
    cache.close(start(cache, "abcdef"))
    leaf, middle, root = (
        spans(cache)[text].released_order for text in ("abcd|ef", "ab|cd", "|ab")
    )
    assert leaf < middle < root


def test_recompute_seconds_are_of_the_tail_block():
    """`recompute_seconds` is the time to compute a span's last block, all before it cached."""
    cache = make(recompute=lambda context, tokens: 1000.0 * context + tokens)
    serve(cache, "abc")
    assert spans(cache)["|abc"].recompute_seconds == 1000.0 * 2 * BLOCK + BLOCK


def test_close_keeps_committed_blocks():
    """After a close, committed blocks stay cached and unpinned; all others are free."""
    cache = make()
    seq = cache.open(ask("abc"))
    compute(cache, seq, 2 * BLOCK)
    cache.close(seq)
    assert (cache.pool.free_blocks, cache.tree.cached_blocks, cache.tree.unpinned_blocks) == (
        6,
        2,
        2,
    )
    assert not cache.sequences
    assert not seq.is_open


def test_close_is_traced_even_without_blocks():
    """Every close writes a FREE line, even if it frees no block."""
    trace = Lines()
    cache = make(trace=trace)
    serve(cache, "ab")
    (free,) = trace.of("FREE")
    assert (free["reason"], list(free["runs"])) == ("close", [])


def test_the_header_describes_the_cache():
    """The header of a trace has both plugins with options, the accounting and the sizes."""
    trace = Lines()
    make(trace=trace, prefix=Radix(), accounting="keys", key_tokens=12)
    assert trace.of("HEADER") == [
        {
            "count": "keys",
            "block_size": BLOCK,
            "key_tokens": 12,
            "blocks": 8,
            "plugins": {
                "eviction": {"name": "lru", "options": {}},
                "prefix": {"name": "radix", "options": {}},
            },
        }
    ]
