"""Names of the blocks of cache groups."""

from typing import get_args

import pytest
from helpers.caches import Lines
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Request
from kvcore.cache import BlockLayout
from kvcore.errors import InputError
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup
from kvcore_plugins.cache_groups.groups import BlockNames, GroupKind, name_generated
from kvcore_plugins.cache_groups.named_blocks import NO_BLOCK


def test_a_prompt_without_room_for_a_chunk_is_looked_up_and_hits_nothing():
    """A replay counts the lookups of a prompt that no pool of this size can compute."""
    cache = GroupedCache([LayerGroup("full", 16)], 4)
    long = Request(id=0, prompt_tokens=160, output_tokens=1, keys=range(10), key_tokens=16)
    assert cache.compute(long, 160).tokens == 0
    assert cache.stats.lookup_blocks == 10
    assert cache.stats.hit_blocks == 0


def test_a_prompt_computed_in_chunks_needs_its_windows_alone():
    """A replay computes a prompt whose blocks do not fit if those that have passed leave."""
    cache = GroupedCache([LayerGroup("full", 16), LayerGroup("window", 16, 40)], 17)
    prompt = Request(id=0, prompt_tokens=161, keys=range(10), key_tokens=16)
    cache.compute(prompt, 32)
    assert cache.match(prompt).tokens == 160


def test_a_hit_counts_its_tokens_and_its_blocks():
    """Blocks are those of the tokens that hit, of 16 each, whatever groups hold of them."""
    cache = GroupedCache([LayerGroup("full", 16), LayerGroup("window", 16, 40)], 20)
    for number in range(2):
        request = Request(id=number, prompt_tokens=70, keys=range(4), key_tokens=16)
        cache.compute(request, 100)
    assert (cache.stats.hit_tokens, cache.stats.hit_blocks) == (64, 4)


def test_what_is_cached_needs_no_more_than_its_own_blocks():
    """To open a request for its hit alone takes the idle blocks of the hit, and no other."""
    cache = GroupedCache([LayerGroup("full", 16), LayerGroup("window", 16, 40)], 20)
    request = Request(id=0, prompt_tokens=70, keys=range(4), key_tokens=16)
    cache.compute(request, 100)
    match = cache.match(request)
    assert cache.need(match, match.tokens) == sum(map(len, match.blocks)) == 7


@pytest.mark.parametrize("tokens", [-1, 9])
def test_a_commit_that_cannot_be_is_refused(tokens):
    """A commit of fewer tokens than none, or of more than allocated, raises InputError."""
    cache = GroupedCache([LayerGroup("full", 8)], 9)
    seq = cache.open(Request(id=0, prompt_tokens=8, keys=[1], key_tokens=8))
    with pytest.raises(InputError, match=f"commit of {tokens} tokens"):
        cache.commit(seq, tokens)
    assert seq.computed == 0


def test_the_keys_of_a_path_are_those_of_the_prompt_and_of_what_it_has_generated():
    """The text of a sequence has its prompt's keys, and names for generated blocks it needs."""
    cache = GroupedCache([LayerGroup("full", 8)], 9)
    seq = cache.open(Request(id=0, prompt_tokens=17, keys=[1, 2], key_tokens=8))
    assert [list(cache.path(seq, 0, end)) for end in (1, 2)] == [[1, 2]] * 2
    generated = list(cache.path(seq, 0, 4))
    assert generated[:2] == [1, 2]
    assert len(set(generated)) == 4


def test_a_load_needs_blocks_for_what_is_not_in_the_pool():
    """Of blocks that it has to hold, those that others hold take no room; idle ones do."""
    cache = GroupedCache([LayerGroup("full", 16)], 6)
    cache.compute(Request(id=0, prompt_tokens=33, keys=range(2), key_tokens=16), 33)
    cache.open(Request(id=1, prompt_tokens=17, keys=range(1), key_tokens=16))
    held, idle = cache.cached[0].values()
    assert [cache.can_load([[held, idle, *[NO_BLOCK] * loaded]]) for loaded in (2, 3, 4)] == [
        True,
        True,
        False,
    ]


def test_the_header_of_a_trace_has_the_keys_of_the_first_request():
    """Without `key_tokens` the header says those of the first request, as the cache does."""
    trace = Lines()
    cache = GroupedCache([LayerGroup("full", 16)], 20, trace=trace)
    cache.compute(Request(id="a", prompt_tokens=64, keys=range(8), key_tokens=8), 100)
    assert trace.lines[0][1]["key_tokens"] == cache.geometry.key_tokens == 8


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda cache, _: setattr(cache.pool, "free_blocks", 1),
            "1 free, 3 held without a name and 14 named blocks are not 20",
        ),
        (lambda cache, _: cache._blocks.pop(1), "6 of 7 idle ones can be evicted"),
        (
            lambda _, tables: tables[1].blocks.append(tables[0].blocks[-1]),
            "and 1 without a name are in two tables",
        ),
        (
            lambda cache, tables: cache._blocks.hold(tables[0].blocks[:1]),
            "has 2 holders and is in 1 tables",
        ),
    ],
    ids=["free", "idle", "bare", "held"],
)
def test_damage_of_a_pool_of_groups_is_found(damage, message):
    """Each block is free, or held by the tables that know it, or idle with its name."""
    cache = GroupedCache([LayerGroup("full", 16), LayerGroup("window", 16, 40)], 20)
    requests = [
        Request(id=n, prompt_tokens=70, keys=range(10 * n, 10 * n + 4), key_tokens=16)
        for n in range(2)
    ]
    cache.compute(requests[0], 100)
    seq = cache.open(requests[1])
    cache.commit(seq, 70)
    cache.check_integrity()
    damage(cache, seq.tables)
    with pytest.raises(AssertionError, match=message):
        cache.check_integrity()


@st.composite
def groups(draw):
    """Draw a group of any kind."""
    kind, size, window = draw(
        st.tuples(st.sampled_from(get_args(GroupKind)), st.integers(1, 20), st.integers(2, 40))
    )
    return LayerGroup(kind, size, window if kind in ("window", "chunk") else None)


def needed(group, position, tokens):
    """Return True if the token after the first `tokens` reads the block at `position`."""
    oldest = {
        "full": 0,
        "window": tokens - (group.window or 0) + 1,
        "chunk": tokens - tokens % (group.window or 1),
        "state": tokens - 1,
    }[group.kind]
    return (position + 1) * group.block_size > oldest


@given(group=groups(), tokens=st.integers(0, 200), position=st.integers(0, 40))
def test_a_block_has_passed_when_no_later_token_reads_it(group, tokens, position):
    """The blocks that have passed are the first ones that no later token reads."""
    has_passed = not any(needed(group, position, later) for later in range(tokens, 900))
    assert (position < group.passed(tokens)) == has_passed
    assert (tokens >= group.passes_at(position)) == has_passed


@given(group=groups(), tokens=st.integers(1, 200), in_flight=st.integers(1, 60))
def test_a_sequence_holds_at_most_what_is_said(group, tokens, in_flight):
    """A group is said to hold what it holds while a text is computed, or a block more."""

    def most(in_flight, tokens):
        return max(
            -(-min(computed + in_flight, tokens) // group.block_size) - group.passed(computed)
            for computed in range(tokens)
        )

    assert group.kind == "state" or group.most_blocks(tokens, in_flight) - most(
        in_flight, tokens
    ) in (0, 1)
    assert group.blocks_for(tokens) - most(1, tokens) in (0, 1)
    assert group.blocks_for(2000) == most(1, 2000)


@given(
    ratio=st.sampled_from(((8, 8), (8, 24), (24, 8))),
    count=st.integers(0, 99),
    texts=st.sampled_from((set(), {5}, {*range(99)})),
    first=st.integers(0, 200),
    end=st.integers(0, 200),
)
def test_names_of_many_blocks_are_those_of_each(ratio, count, texts, first, end):
    """Names are the same for one block, a range, a list, and a walk; and those of no other."""
    (size, key_tokens), keys = ratio, [str(n) if n in texts else n for n in range(count)]
    request = Request(
        id="a", prompt_tokens=len(keys) * key_tokens, keys=keys, key_tokens=key_tokens
    )
    names = {size: BlockNames(BlockLayout("tokens", size, key_tokens), request)}
    name_generated(names, request, request.prompt_tokens + 9 * size)
    (own,) = names.values()
    assert own.end == own.keyed + 9
    positions = range(min(first, own.end), min(end, own.end))
    single = [own[position] for position in positions]
    assert own.at(positions) == own.at(list(positions)) == single
    walked = list(own.walk(positions.start, positions.stop))
    assert walked == list(zip(positions, single, strict=True))
    assert list(own.walk(positions.start, positions.stop, -1)) == walked[::-1]
    assert len(set(single)) == len(single)


@pytest.mark.parametrize("block_size", [16, 64])
def test_requests_with_keys_of_several_types_share_blocks(block_size):
    """A prompt hits blocks of an earlier one, whatever the types of the keys behind them."""
    cache = GroupedCache([LayerGroup("full", block_size)], 100)
    for index, keys in enumerate([[1, 2, 3], [1, 2, "three"], ["one", 2]]):
        request = Request(
            id=index, prompt_tokens=64 * len(keys), output_tokens=1, keys=keys, key_tokens=64
        )
        hit = cache.compute(request, 1000).tokens
        assert hit == (128 if index == 1 else 0)
