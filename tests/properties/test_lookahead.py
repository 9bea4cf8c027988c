"""Look-ahead at its two ends: told of nothing it is LRU, of everything the optimum."""

from __future__ import annotations

import hypothesis.strategies as st
from helpers.tries import requests
from hypothesis import given

from kvcore import KVCache
from kvcore.analysis import Belady, Future, replay
from kvcore.cache.layout import BlockLayout
from kvcore_plugins.eviction import LRU, Lookahead
from kvcore_plugins.prefix import Radix

PROMPTS = st.lists(st.text("abc", max_size=6), max_size=30)


def hits(policy, served, ratio, blocks):
    """Return what `policy` hits."""
    cache = KVCache(
        blocks, 1, eviction=policy, prefix=Radix(), accounting="keys", key_tokens=ratio
    )
    stats = replay(served, cache)
    cache.check_integrity()
    return stats.hit_blocks


@given(PROMPTS, st.integers(1, 14), st.integers(1, 3))
def test_told_of_all_it_is_the_optimum(prompts, blocks, ratio):
    """It hits as much as the best that admits what it computes, in a pool of any size."""
    served = requests(prompts, ratio)
    best, _ = Belady().replay(Future.read(served, BlockLayout("keys", 1, ratio)), blocks, 1)
    assert hits(Lookahead(requests="all"), served, ratio, blocks) == best.hit_blocks


@given(PROMPTS, st.integers(1, 14), st.integers(1, 3))
def test_told_of_none_it_is_lru(prompts, blocks, ratio):
    """It hits what LRU hits."""
    served = requests(prompts, ratio)
    assert hits(Lookahead(requests=0), served, ratio, blocks) == hits(
        LRU(), served, ratio, blocks
    )
