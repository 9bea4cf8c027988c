"""The optimum against every possible cache, on prompts of a small tree."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
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


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("ratio", [1, 2])
@given(prompts=PROMPTS, pool=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_the_optimum_hits_the_most(ratio, bypass, prompts, pool):
    """The optimum hits as much as the best choice of victims, or of cached blocks.

    The one is where requests must be admitted, the other where they may bypass.
    """
    prompts = [prompt[: 4 - ratio] for prompt in prompts[: 8 - ratio]]
    expected = most_hits(prompts, ratio, pool, bypass=bypass)
    assert optimum_hits(prompts, ratio, pool, bypass=bypass) == expected


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
