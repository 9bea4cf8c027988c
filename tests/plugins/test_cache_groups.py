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
