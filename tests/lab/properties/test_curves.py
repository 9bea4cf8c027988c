"""Hit curves from one pass, of LRU and the optimum, against replays of small trees."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from helpers.tries import number, replayed_hits, requests
from hypothesis import given, settings

from kvcore.cache.layout import BlockLayout
from kvcore_lab.curves.mrc import Steps
from kvcore_replay.belady import Belady, Future

pytest.importorskip("numba")
from kvcore_lab.curves._reuse import Reuse

TEXTS = st.lists(st.text("ab", max_size=6), max_size=14)


def read(served, ratio):
    """Return the reuse of requests whose keys are `ratio` blocks of one token."""
    return Reuse.read(served, BlockLayout("keys", 1, ratio))


@given(texts=TEXTS, ratio=st.integers(1, 3), key=st.sampled_from([str, number]))
@settings(max_examples=300, deadline=None)
def test_one_pass_equals_replays_at_every_size(texts, ratio, key):
    """The curve of LRU equals a replay at every pool size.

    Sizes go from one block, below the longest request, to more than all blocks.
    """
    served = requests(texts, ratio, key)
    reuse = read(served, ratio)
    steps = Steps(*reuse.lru())
    sizes = range(1, reuse.distinct_blocks + 3)
    assert [steps.at(size) for size in sizes] == [
        replayed_hits(served, ratio, size) for size in sizes
    ]


@given(texts=st.lists(st.text("abcd", max_size=9), max_size=40), ratio=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_a_curve_never_falls_and_ends_at_all_hits(texts, ratio):
    """The curve starts at 0, never falls, and ends at the hits of an unbounded pool."""
    served = requests(texts, ratio)
    reuse = read(served, ratio)
    steps = Steps(*reuse.lru())
    hits = [steps.at(size) for size in range(reuse.distinct_blocks + 1)]
    assert hits == sorted(hits)
    assert (hits[0], hits[-1]) == (0, reuse.hit_blocks)
    endless = max(sum(len(text) * ratio for text in texts), 1)
    assert reuse.hit_blocks == replayed_hits(served, ratio, endless)


@given(texts=TEXTS, ratio=st.integers(1, 3), bypass=st.booleans())
@settings(max_examples=400, deadline=None)
def test_the_compiled_optimum_hits_as_belady(texts, ratio, bypass):
    """The compiled optimum hits as many blocks as `Belady.replay` at every size."""
    served = requests(texts, ratio)
    reuse = read(served, ratio)
    future = Future.read(served, BlockLayout("keys", 1, ratio))
    for size in range(1, reuse.distinct_blocks + 3):
        stats, _ = Belady(bypass).replay(future, size, 1)
        assert reuse.optimum(size, bypass=bypass) == stats.hit_blocks


@given(texts=TEXTS)
@settings(max_examples=100, deadline=None)
def test_reuse_counts_distinct_blocks_and_lookups(texts):
    """`Reuse` counts the different prefixes as distinct blocks, and all keys as lookups."""
    served = requests(texts)
    reuse = read(served, 1)
    distinct = {key for request in served for key in request.keys}
    assert reuse.distinct_blocks == len(distinct)
    assert reuse.lookup_blocks == sum(map(len, texts))
