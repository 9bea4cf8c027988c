"""Names of the blocks of cache groups."""

import pytest

from kvcore import Request
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup


def test_a_prompt_without_room_for_a_chunk_is_looked_up_and_hits_nothing():
    """A replay counts the lookups of a prompt that no pool of this size can compute."""
    cache = GroupedCache([LayerGroup("full", 16)], 4)
    long = Request(id=0, prompt_tokens=160, output_tokens=1, keys=range(10), key_tokens=16)
    assert cache.compute(long, 160).tokens == 0
    assert cache.stats.lookup_blocks == 10
    assert cache.stats.hit_blocks == 0


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
