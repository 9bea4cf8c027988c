"""Names of the blocks of cache groups."""

import pytest

from kvcore import Request
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup


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
