"""Forks: shared blocks, copy-on-write, commits of siblings, and the last owners of blocks."""

import attrs
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
    spell,
    start,
    table,
)

from kvcore import InputError, OutOfBlocks, Request, Trace
from kvcore.request import text_request
from kvcore_plugins.prefix import NoPrefix
from kvcore_replay.check.trace import check_trace

HALF = BLOCK // 2


@pytest.fixture
def cache():
    """Return a cache of 12 blocks of 4 tokens."""
    return make(12)


def generate(cache, seq, tokens):
    """Extend `seq` by `tokens` and compute them."""
    cache.extend(seq, tokens)
    return compute(cache, seq)


def test_fork_allocates_nothing(cache):
    """A fork has the same block table, allocates nothing, and pins its path once more."""
    seq = start(cache, "abc", 2 * BLOCK + HALF)
    child = cache.fork(seq)
    assert table(cache, child) == table(cache, seq) == [0, 1, 2]
    assert (cache.pool.free_blocks, pins(cache)) == (9, {"|ab": 2})
    cache.check_integrity()


def test_fork_is_no_access():
    """A fork is no hit, no lookup and no access, and calls no hook of the policy."""
    cache = make(12, Recorded())
    seq = start(cache, "ab")
    callbacks, stats = list(cache.eviction.callbacks), attrs.astuple(cache.stats)
    cache.fork(seq, now=9)
    assert cache.eviction.callbacks == callbacks
    assert attrs.astuple(cache.stats) == stats
    assert (spans(cache)["|ab"].hit_count, spans(cache)["|ab"].last_access) == (0, 0)


def test_fork_ends_growth_in_place(cache):
    """After a fork the leaf is continued by a child span."""
    seq = cache.open(ask("abc"))
    compute(cache, seq, BLOCK)
    child = cache.fork(seq)
    cache.close(child)
    compute(cache, seq)
    assert pins(cache) == {"|a": 1, "a|bc": 1}


def test_the_writer_gets_the_copy(cache):
    """An extension into a shared partial block copies it for the sequence that writes."""
    seq = start(cache, "ab", BLOCK + HALF)
    child = cache.fork(seq)
    cache.extend(child, 1)
    assert (table(cache, seq), table(cache, child)) == ([0, 1], [0, 2])
    cache.check_integrity()


def test_the_copy_counts_as_a_block_needed(snapshot):
    """The copy of a shared block counts as a block that the extension needs."""
    cache = make(3)
    seq = start(cache, "ab", BLOCK + HALF)
    child = cache.fork(seq)
    before = snapshot(cache)
    with pytest.raises(OutOfBlocks, match="needs 2 more"):
        cache.extend(child, BLOCK)
    assert snapshot(cache) == before
    cache.extend(child, HALF)
    assert table(cache, child) == [0, 2]


def test_the_trace_of_a_copy():
    """COPY has source and target; ALLOC has only the blocks after the copy."""
    trace = Lines()
    cache = make(12, trace=trace)
    seq = start(cache, "ab", BLOCK + HALF)
    child = cache.fork(seq)
    trace.lines.clear()
    cache.extend(child, BLOCK)
    assert trace.events() == ["COPY", "ALLOC"]
    assert trace.of("COPY") == [{"seq": child.id, "block": 1, "from": 1, "to": 2}]
    alloc = trace.of("ALLOC")[0]
    assert (alloc["first"], list(alloc["runs"])) == (2, [3])


def test_on_copy_is_called_once_for_each_copy():
    """`on_copy` is called with source and target once for each copy."""
    copies = []
    cache = make(12)
    cache.on_copy = lambda source, target: copies.append((source, target))
    seq = start(cache, "ab", BLOCK + HALF)
    child, third = cache.fork(seq), cache.fork(seq)
    for writer in (child, third, seq):
        cache.extend(writer, BLOCK)
    assert copies == [(1, 2), (1, 4)]


def failing_once(error):
    """Return a callback that raises `error` when it is called first."""
    errors = [error]

    def called(*_):
        if errors:
            raise errors.pop()

    return called


@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()])
def test_a_copy_that_fails_can_be_repeated(tmp_path, error):
    """If `on_copy` raises, the sequence is as before: the call repeated copies and is traced.

    Blocks that it has evicted are free, and are allocated in the same order.
    """
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        cache = make(4, trace=trace)
        other, request = (
            Request(id=name, prompt_tokens=tokens, keys=keys, key_tokens=BLOCK)
            for name, tokens, keys in [("x", 3 * BLOCK, (7, 8, 9)), ("a", BLOCK + HALF, (1,))]
        )
        cache.close(compute(cache, cache.open(other)))
        seq = compute(cache, cache.open(request))
        child = cache.fork(seq)
        cache.on_copy = failing_once(error)
        before = table(cache, child), child.tokens
        with pytest.raises(type(error)) as caught:
            cache.extend(child, BLOCK)
        assert caught.value is error
        assert (table(cache, child), child.tokens) == before
        cache.check_integrity()
        free = cache.pool.free_blocks
        copies = []
        cache.on_copy = lambda *copy: copies.append(copy)
        cache.extend(child, BLOCK)
        assert copies == [(before[0][-1], table(cache, child)[1])]
        assert cache.pool.free_blocks == free - 2
        cache.check_integrity()
        for each in (seq, child):
            cache.close(each)
    check_trace(path)


def test_a_fork_that_fails_can_be_repeated(cache, snapshot):
    """If `on_fork` raises, there is no child, and nothing has changed."""
    seq = start(cache, "ab", BLOCK + HALF)
    before = snapshot(cache)
    cache.on_fork = failing_once(MemoryError("no memory"))
    with pytest.raises(MemoryError, match="no memory"):
        cache.fork(seq)
    assert snapshot(cache) == before
    assert [*cache.sequences.values()] == [seq]
    child = cache.fork(seq)
    assert child.id == seq.id + 1
    cache.check_integrity()


def test_a_private_block_is_freed_with_its_last_owner():
    """A shared private block is freed, and traced as freed, when its last owner closes."""
    trace = Lines()
    cache = make(12, trace=trace)
    seq = start(cache, "ab", BLOCK + HALF)
    child = cache.fork(seq)
    cache.close(seq)
    assert cache.pool.free_blocks == 10
    cache.close(child)
    assert [list(line["runs"]) for line in trace.of("FREE")] == [[], [1]]
    assert (cache.pool.free_blocks, pins(cache)) == (11, {"|a": 0})
    cache.check_integrity()


def test_a_sibling_commit_of_committed_blocks_changes_nothing():
    """A sibling's commit of blocks that are committed already changes nothing."""
    cache = make(12, Recorded())
    seq = cache.open(ask("abc"))
    child = cache.fork(seq)
    compute(cache, seq)
    callbacks, blocks = list(cache.eviction.callbacks), table(cache, child)
    compute(cache, child)
    assert cache.eviction.callbacks == callbacks
    assert (table(cache, child), pins(cache)) == (blocks, {"|abc": 2})


def test_every_sibling_is_pinned(cache):
    """A commit pins its blocks for all open siblings; a closed one is not kept."""
    seq = cache.open(ask("abc"))
    child = cache.fork(seq)
    grandchild = cache.fork(child)
    cache.close(child)
    compute(cache, grandchild)
    assert pins(cache) == {"|abc": 2}
    assert seq.family == [seq, grandchild]
    cache.close(seq)
    cache.close(grandchild)
    assert pins(cache) == {"|abc": 0}
    cache.check_integrity()


def test_a_sibling_that_holds_part_is_pinned_for_its_part(cache):
    """A sibling that shares part of a committed span pins that part, which is split off."""
    seq = cache.open(ask("ab", BLOCK + HALF, output_keys=["ab"]))
    child = cache.fork(seq)
    cache.extend(child, HALF)
    cache.extend(seq, HALF)
    compute(cache, seq)
    assert pins(cache) == {"|a": 2, "a|b": 1}
    compute(cache, child)
    assert pins(cache) == {"|a": 2, "a|b": 2}
    assert table(cache, child) == table(cache, seq)


def test_on_insert_comes_before_the_split_for_a_sibling():
    """`on_insert` is called before the `on_split` for a sibling's part."""
    cache = make(12, Recorded())
    seq = cache.open(ask("ab", BLOCK + HALF, output_keys=["ab"]))
    child = cache.fork(seq)
    cache.extend(child, HALF)
    cache.extend(seq, HALF)
    cache.eviction.callbacks.clear()
    compute(cache, seq)
    assert cache.eviction.callbacks == [("on_insert", "|ab"), ("on_split", "a|b")]


def test_siblings_that_hold_different_parts(cache):
    """A committed span is split at each position where a sibling's own blocks begin."""
    seq = start(cache, "a", output_keys=["ab", "abc", "abcd"])
    cache.extend(seq, 2 * BLOCK + HALF)
    deep = cache.fork(seq)
    cache.extend(deep, HALF)
    shallow = cache.fork(seq)
    cache.rollback(shallow, BLOCK)
    cache.extend(shallow, BLOCK)
    cache.extend(seq, HALF)
    compute(cache, seq)
    assert pins(cache) == {"|a": 3, "a|b": 3, "ab|c": 2, "abc|d": 1}


def test_a_sibling_follows_a_switch(cache):
    """If a commit switches and stores, its sibling has the same blocks."""
    seq = cache.open(ask("abc"))
    child = cache.fork(seq)
    serve(cache, "ab")
    compute(cache, seq)
    assert pins(cache) == {"|ab": 2, "ab|c": 2}
    assert table(cache, child) == table(cache, seq) == [3, 4, 2]
    assert cache.pool.free_blocks == 9


def test_a_duplicate_is_freed_with_its_last_owner(cache):
    """If a commit only switches, its old blocks stay with the sibling until it commits."""
    seq = cache.open(ask("ab"))
    child = cache.fork(seq)
    serve(cache, "ab")
    compute(cache, seq)
    assert (table(cache, seq), table(cache, child)) == ([2, 3], [0, 1])
    compute(cache, child)
    assert table(cache, child) == [2, 3]
    assert (cache.pool.free_blocks, cache.pool.owners) == (10, {})


def test_the_trace_of_a_sibling_commit():
    """A commit writes one COMMIT line, and one with `shared` for each sibling."""
    trace = Lines()
    cache = make(12, trace=trace)
    seq = cache.open(ask("abc"))
    child = cache.fork(seq)
    trace.lines.clear()
    compute(cache, seq)
    span = seq.span.id
    assert trace.lines == [
        ("COMMIT", {"seq": seq.id, "span": span, "first": 0, "blocks": 3, "how": "new"}),
        ("COMMIT", {"seq": child.id, "span": span, "first": 0, "blocks": 3, "how": "shared"}),
    ]


def test_fork_with_uncommitted_generated_tokens_is_refused(cache):
    """A fork with uncommitted generated tokens raises InputError."""
    seq = start(cache, "ab")
    cache.extend(seq, 3)
    with pytest.raises(InputError, match="3 allocated tokens are not committed"):
        cache.fork(seq)
    cache.rollback(seq, 3)
    cache.fork(seq)


def test_fork_of_a_compacted_sequence_with_uncommitted_tokens_is_refused(cache):
    """After a compaction, too, a generated token that is not committed refuses a fork."""
    seq = start(cache, "abc")
    cache.compact(seq, 2)
    cache.fork(seq)
    cache.extend(seq, 1)
    with pytest.raises(InputError, match="1 allocated tokens are not committed"):
        cache.fork(seq)


def test_a_compacted_sequence_shares_no_block_with_its_forks(cache):
    """From its compaction on a sequence is none of those that share private blocks."""
    seq = start(cache, "abc")
    child = cache.fork(seq)
    cache.compact(child, 2)
    assert (seq.family, child.family) == ([seq], None)


def test_fork_in_the_middle_of_a_prompt(cache):
    """A fork may share prompt tokens that are allocated and not yet committed."""
    seq = cache.open(ask("abc"), 6)
    compute(cache, seq, 5)
    child = cache.fork(seq)
    cache.extend(child, 6)
    compute(cache, child)
    cache.extend(seq, 6)
    compute(cache, seq)
    assert table(cache, seq) == table(cache, child)
    assert {spell(span): span.ref_count for span in cache.tree.spans()} == {
        "|a": 2,
        "a|bc": 2,
    }


def test_the_first_fork_gives_ids_to_a_cache_without_ids():
    """The first fork of a cache without block ids gives an id to every block in use."""
    cache = make(12, ids=False)
    seq = start(cache, "abc", 2 * BLOCK + HALF)
    other = start(cache, "xy")
    child = cache.fork(seq)
    assert table(cache, child) == table(cache, seq)
    assert not set(table(cache, seq)) & set(table(cache, other))
    assert cache.pool.free_blocks == 7
    cache.check_integrity()
    cache.extend(child, 1)
    assert table(cache, child) != table(cache, seq)
    cache.check_integrity()


def test_fork_without_a_prefix_cache():
    """Without a prefix cache siblings share private blocks, with copy-on-write."""
    cache = make(12, prefix=NoPrefix(), ids=False)
    seq = start(cache, "ab", BLOCK + HALF)
    child = cache.fork(seq)
    cache.extend(child, 1)
    assert (table(cache, seq), table(cache, child)) == ([0, 1], [0, 2])
    for member in (seq, child):
        cache.close(member)
    assert cache.pool.free_blocks == 12


@pytest.mark.parametrize(("accounting", "publish"), [("tokens", False), ("keys", True)])
def test_blocks_without_keys_get_no_more_of_them(accounting, publish):
    """Keys are appended to an output with keys alone, and those of the request stay its own."""
    cache = make(12, accounting=accounting)
    prompt = text_request(1, range(BLOCK), output=9, block_size=BLOCK, publish=publish)
    seq = compute(cache, cache.open(prompt))
    with pytest.raises(InputError, match=r"request 1 publishes no output: .* publish=True"):
        cache.append_keys(seq, ["more"])
    assert len(seq.keys) == len(prompt.keys) == 1


def test_generated_blocks_of_forks_stay_private():
    """Of sequences that share private blocks, generated blocks are not kept for a return."""
    cache = make(12)
    seq = start(cache, "ab")
    cache.extend(seq, 2 * BLOCK)
    compute(cache, seq)
    child = cache.fork(seq)
    cache.keep_generated(seq, 4 * BLOCK, 0)
    assert spans(cache).keys() == {"|ab"}
    for member in (seq, child):
        cache.close(member)
    cache.check_integrity()


def test_forks_publish_blocks_of_their_own():
    """Siblings that generate different keys publish different blocks."""
    cache = make(12)
    prompt = text_request(1, range(BLOCK), output=9, block_size=BLOCK, publish=True)
    one = cache.open(prompt)
    compute(cache, one)
    other = cache.fork(one)
    for seq, key in ((one, "one"), (other, "other")):
        cache.extend(seq, BLOCK)
        cache.append_keys(seq, [key])
        compute(cache, seq)
    assert [seq.span.path_keys[1:] for seq in (one, other)] == [["one"], ["other"]]
    assert (table(cache, one), table(cache, other)) == ([0, 1], [0, 2])
    cache.check_integrity()


@pytest.fixture(params=[1, 2], ids=["key of a block", "key of two blocks"])
def rolled_back(request):
    """Return a cache, a sequence that goes on, and a fork that rolled back into its key."""
    size = request.param * BLOCK
    cache = make(12, key_tokens=size)
    prompt = text_request(1, range(size), output=99, block_size=size, publish=True)
    seq = generate(cache, compute(cache, cache.open(prompt)), size)
    child = cache.fork(seq)
    cache.rollback(child, 1)
    cache.append_keys(seq, ["next"])
    cache.extend(seq, 1)
    return cache, seq, child


def test_a_block_into_which_a_fork_rolled_back_is_shared_once_it_is_copied(rolled_back):
    """The fork writes into a copy, not into a block that others hit; then that is cached."""
    cache, seq, child = rolled_back
    last = child.blocks - 1
    for tokens, cached in ((0, last), (1, last + 1)):
        cache.extend(child, tokens)
        compute(cache, seq)
        assert cache.tree.cached_blocks == cached
    blocks = [*range(last + 2)]
    assert (table(cache, seq), table(cache, child)) == (blocks, [*blocks[:last], last + 2])


def test_a_block_that_waited_for_a_fork_is_cached_in_the_end(rolled_back):
    """A block into which a fork rolled back is cached if the fork leaves without a copy."""
    cache, seq, child = rolled_back
    blocks = child.blocks
    for member in (child, seq):
        cache.close(compute(cache, member))
    assert cache.tree.cached_blocks == blocks
    cache.check_integrity()


def test_a_fork_that_is_compacted_as_it_closes_is_closed():
    """A compaction that had no room comes when its sequence closes, which gives all back."""
    pytest.importorskip("kvcore_engine", reason="needs a policy that compacts")
    cache = make(8, retention="h2o:budget=8")
    parent = cache.open(ask("abcd", output_tokens=20))
    cache.fork(parent)
    other = cache.open(ask("efgh"))
    cache.commit(parent, 16)
    cache.close(other)
    cache.close(parent)
    assert not parent.is_open
    cache.check_integrity()
