"""Hits of cache groups on the bundled trace, against those of vLLM's own cache manager."""

from __future__ import annotations

import pytest

from kvcore.config.values import as_checkpoint
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup
from kvcore_plugins.workload import Mooncake

FULL = LayerGroup("full", 512)
LAYOUTS = {
    "full": (1, [FULL]),
    "gemma-3": (6, [FULL, *[LayerGroup("window", 512, 1024)] * 5]),
    "gpt-oss": (2, [FULL, LayerGroup("window", 512, 128)]),
    "qwen3-next": (2, [LayerGroup("full", 1024), *[LayerGroup("state", 1024)] * 3]),
}
"""Groups like those of models, and how many of their blocks take the memory of 512 tokens."""


@pytest.mark.parametrize(
    ("like", "interval", "size", "percent"),
    [
        ("full", 0, 8192, 19.23),
        ("gemma-3", 0, 2048, 18.41),
        ("gemma-3", None, 8192, 20.08),
        ("gpt-oss", 0, 8192, 25.44),
        ("gpt-oss", None, 2048, 5.67),
        ("qwen3-next", 0, 2048, 10.69),
        ("qwen3-next", None, 8192, 26.19),
    ],
)
def test_hits_are_those_of_vllm(like, interval, size, percent):
    """Groups hit the share of tokens that vLLM's hybrid manager hits in equal memory.

    It is the memory of `size` blocks of 512 tokens in all layers; sizes alternate, because
    groups and intervals differ in what they keep, not in how a pool of some size is used.
    Requests come one after the other, in chunks of 8,192 tokens. Made by the `KVCacheManager`
    of vLLM 0.33.
    """
    per_block, groups = LAYOUTS[like]
    blocks = size * per_block
    # Block 0 of vLLM is never used.
    cache = GroupedCache(groups, blocks - 1, checkpoint=as_checkpoint(interval))
    for request in Mooncake():
        cache.compute(request, 8192)
    assert not cache.sequences
    hit = 100 * cache.stats.hit_tokens / cache.stats.lookup_tokens
    assert round(hit, 2) == percent
