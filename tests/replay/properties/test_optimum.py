"""The optimum against every possible cache, on prompts of a small tree."""

from __future__ import annotations

import hypothesis.strategies as st
from helpers.reference.optimum import most_hits
from helpers.tries import requests
from hypothesis import given, settings

from kvcore.cache.layout import BlockLayout
from kvcore_replay.belady import Belady, Future

PROMPTS = st.lists(st.text("ab", max_size=3), min_size=1, max_size=7)


def optimum_hits(prompts, ratio, pool, *, bypass):
    """Return the hits of the optimum; a prompt's letters are keys of `ratio` blocks."""
    future = Future.read(requests(prompts, ratio), BlockLayout("keys", 1, ratio))
    stats, _ = Belady(bypass).replay(future, pool, 1)
    return stats.hit_blocks


@given(prompts=PROMPTS, pool=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_the_optimum_that_must_admit_hits_the_most(prompts, pool):
    """The optimum hits as much as the best choice of victims, if requests must be admitted."""
    expected = most_hits(prompts, 1, pool, bypass=False)
    assert optimum_hits(prompts, 1, pool, bypass=False) == expected


@given(prompts=PROMPTS, pool=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_the_optimum_that_may_bypass_hits_the_most(prompts, pool):
    """The optimum hits as much as the best choice of cached blocks, if requests may bypass."""
    expected = most_hits(prompts, 1, pool, bypass=True)
    assert optimum_hits(prompts, 1, pool, bypass=True) == expected


@given(
    prompts=st.lists(st.text("ab", max_size=2), min_size=1, max_size=6),
    pool=st.integers(1, 5),
    bypass=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_the_optimum_with_two_blocks_a_key_hits_the_most(prompts, pool, bypass):
    """The optimum hits as much as the best choice where a key is two blocks."""
    expected = most_hits(prompts, 2, pool, bypass=bypass)
    assert optimum_hits(prompts, 2, pool, bypass=bypass) == expected


@given(
    prompts=st.lists(st.text("abc", max_size=8), max_size=30),
    pool=st.integers(1, 20),
    ratio=st.integers(2, 32),
    bypass=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_the_optimum_does_not_depend_on_the_block_size(prompts, pool, ratio, bypass):
    """`ratio` times as many blocks of a `ratio`-th of the size hit exactly `ratio` times."""
    coarse = optimum_hits(prompts, 1, pool, bypass=bypass)
    assert optimum_hits(prompts, ratio, ratio * pool, bypass=bypass) == ratio * coarse
