"""`lookahead` at its limits: LRU without known requests, and the optimum with all of them."""

from __future__ import annotations

import hypothesis.strategies as st
from helpers.tries import requests
from hypothesis import given

from kvcore import KVCache
from kvcore.cache.layout import BlockLayout
from kvcore_plugins.eviction import LRU, Lookahead
from kvcore_plugins.prefix import Radix
from kvcore_replay.belady import Belady, Future
from kvcore_replay.untimed import replay

PROMPTS = st.lists(st.text("abc", max_size=6), min_size=15, max_size=30)


def hits(policy, served, ratio, blocks):
    """Return the number of blocks that `policy` hits."""
    cache = KVCache(
        blocks, 1, eviction=policy, prefix=Radix(), accounting="keys", key_tokens=ratio
    )
    stats = replay(served, cache)
    cache.check_integrity()
    return stats.hit_blocks


@given(PROMPTS, st.integers(1, 14), st.integers(1, 3))
def test_lookahead_at_all_requests_hits_as_the_optimum(prompts, blocks, ratio):
    """With all requests known, `lookahead` hits as much as the optimum that must admit."""
    served = requests(prompts, ratio)
    best, _ = Belady().replay(Future.read(served, BlockLayout("keys", 1, ratio)), blocks, 1)
    assert hits(Lookahead(requests="all"), served, ratio, blocks) == best.hit_blocks


@given(PROMPTS, st.integers(1, 14), st.integers(1, 3))
def test_lookahead_at_no_request_hits_as_lru(prompts, blocks, ratio):
    """With no request known, `lookahead` hits as much as LRU."""
    served = requests(prompts, ratio)
    assert hits(Lookahead(requests=0), served, ratio, blocks) == hits(
        LRU(), served, ratio, blocks
    )
