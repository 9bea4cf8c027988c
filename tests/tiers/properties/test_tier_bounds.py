"""Bounds on the hits of a pool and its tiers together, in a replay without a clock."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from helpers.policies import POLICIES, build
from helpers.reference.optimum import contents, most_hits
from helpers.tries import requests
from hypothesis import given, settings

from kvcore import KVCache
from kvcore.cache.layout import BlockLayout
from kvcore_replay.belady import Belady, Future
from kvcore_replay.untimed import replay, served
from kvcore_tiers.hierarchy import Tiers

NAMES = [name for name in POLICIES if ":" not in name]
SLOT = 1000
PROMPTS = st.lists(st.text("abc", max_size=6), min_size=1, max_size=25)


def hierarchy(policy, pool, *slots, **options):
    """Return a cache of `pool` blocks under a policy, with tiers of `slots` below."""
    cache = KVCache(pool, 1, eviction=build(policy), accounting="keys")
    rules = "".join(f",{name}={value}" for name, value in options.items())
    tiers = [f"host:memory={size * SLOT},eviction={policy}{rules}" for size in slots]
    if tiers:
        Tiers(cache, tiers, SLOT)
    return cache


def reused(cache, prompts):
    """Return how many blocks of `prompts` hit in the pool and the tiers."""
    for _ in served(requests(prompts), cache):
        cache.check_integrity()
    return cache.tiers.hit_stats().hit_blocks


def optimum(prompts, blocks, *, bypass=True):
    """Return the most hits of one cache of `blocks` blocks."""
    future = Future.read(requests(prompts), BlockLayout("keys", 1, 1))
    return Belady(bypass).replay(future, blocks, 1)[0].hit_blocks


@pytest.mark.parametrize("policy", NAMES)
@given(
    prompts=PROMPTS,
    pool=st.integers(1, 6),
    slots=st.lists(st.integers(1, 8), min_size=1, max_size=2),
    write=st.sampled_from(["evict", "through", 1, 2]),
    keep=st.sampled_from(["inclusive", "exclusive"]),
)
@settings(max_examples=25, deadline=None)
def test_no_hierarchy_hits_more_than_one_cache_of_all_its_blocks(
    policy, prompts, pool, slots, write, keep
):
    """The optimum that may bypass bounds the hits of pool and tiers, whatever moves when.

    If every prompt fits into the pool, the optimum that must admit is a bound as well.
    """
    cache = hierarchy(policy, pool, *slots, write=write, keep=keep)
    hits = reused(cache, prompts)
    assert hits <= optimum(prompts, pool + sum(slots))
    if max(map(len, prompts)) <= pool:  # then every prompt is cached in full after its request
        assert hits <= optimum(prompts, pool + sum(slots), bypass=False)


@given(
    prompts=st.lists(st.text("ab", max_size=3), min_size=1, max_size=5),
    pool=st.integers(1, 2),
    slots=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_no_movement_between_two_levels_exceeds_the_bound(prompts, pool, slots):
    """No movement between two prefix-closed levels hits more than the bound.

    All contents of both levels are tried.
    """
    best = {(frozenset(), frozenset()): 0}
    for text in prompts:
        path = frozenset(text[: end + 1] for end in range(len(text)))
        must = frozenset(text[: end + 1] for end in range(min(len(text), pool)))
        after = {}
        for (above, below), hits in best.items():
            total = hits + len(path & (above | below))
            known = above | below | path
            lower = contents(known, slots)
            for upper in (content for content in contents(known, pool) if must <= content):
                for rest in lower:
                    state = upper, rest
                    after[state] = max(total, after.get(state, 0))
        best = after
    assert max(best.values()) <= most_hits(prompts, 1, pool + slots, bypass=True)


@given(prompts=PROMPTS, pool=st.integers(1, 4), slots=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_a_tier_that_holds_all_of_the_pool_is_bounded_by_its_own_size(prompts, pool, slots):
    """A tier that always holds all of the pool hits at most the optimum of its own size."""
    cache = hierarchy("lru", pool, slots, write="through")
    (level,) = cache.tiers.levels
    for request in requests(prompts):
        here = level.find(request.keys, len(request.keys), cache.now)
        if here < cache.probe(request, cache.now):
            return
        replay([request], cache)
    assert cache.tiers.hit_stats().hit_blocks <= optimum(prompts, slots)


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@given(prompts=PROMPTS, pool=st.integers(1, 6), slots=st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_a_tier_does_not_change_the_hits_of_the_pool(policy, prompts, pool, slots):
    """A tier does not change the hits of the pool."""
    alone, above = hierarchy(policy, pool), hierarchy(policy, pool, slots)
    assert replay(requests(prompts), above) == replay(requests(prompts), alone)


@given(prompts=PROMPTS, pool=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_a_tier_for_all_blocks_hits_as_an_infinite_cache(prompts, pool):
    """Pool and a tier for all blocks hit as often as a cache that never evicts."""
    cache = hierarchy("lru", pool, 10_000, write="through")
    fits = [prompt[:pool] for prompt in prompts]
    assert reused(cache, fits) == optimum(fits, 10_000)


def test_a_tier_that_never_loads_adds_no_hits():
    """Blocks found in a tier with `load=never` are computed again."""
    cache = hierarchy("lru", 2, 8, load="never")
    assert reused(cache, ["ab", "cd", "ab"]) == 0
    assert cache.tiers.levels[0].stats.found == 2


def test_a_long_prompt_loads_as_many_blocks_as_the_pool_has():
    """A prompt longer than the pool loads as many leading blocks as the pool has."""
    cache = hierarchy("lru", 2, 8)
    assert reused(cache, ["abcd", "ef", "abcd"]) == 2
