"""Policies on requests of one key each, against plain implementations of the algorithms."""

from __future__ import annotations

from itertools import islice

import hypothesis.strategies as st
import pytest
from helpers.reference import flat
from helpers.requests import keyed
from hypothesis import given

from kvcore import KVCache
from kvcore_plugins.eviction import LRUK, TinyLFU
from kvcore_plugins.prefix import Radix
from kvcore_plugins.workload import Mooncake
from kvcore_replay.untimed import served

ITEMS = st.lists(st.integers(0, 9), max_size=120)
SHARES = st.sampled_from([0, 0.2, 0.5, 1])


def hits(policy, blocks, items):
    """Return for each of `items`, a one-block request, whether it hit."""
    cache = KVCache(blocks, 1, eviction=policy, prefix=Radix(), accounting="keys")
    requests = (keyed(index, [item], 1) for index, item in enumerate(items))
    return [seq.hit_blocks == 1 for seq in served(requests, cache)]


def assert_lruk(blocks, items, k, correlated, history):
    """Check that LRU-K hits like the published algorithm, request by request."""
    plain = flat.LRUK(blocks, k, correlated, int(history * blocks))
    policy = LRUK(k=k, correlated=correlated, history=history)
    assert hits(policy, blocks, items) == [plain.request(item) for item in items]


def assert_tinylfu(blocks, items, window, protected, period):
    """Check that W-TinyLFU with exact frequencies hits like the plain algorithm."""
    policy = TinyLFU(window=window, protected=protected, period=period)
    policy._sketch = flat.Counts(period * blocks)
    sizes = int(window * blocks), int(protected * (1 - window) * blocks)
    plain = flat.TinyLFU(blocks, *sizes, flat.Counts(period * blocks))
    assert hits(policy, blocks, items) == [plain.request(item) for item in items]


@given(ITEMS, st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), SHARES)
def test_lruk_hits_as_published(items, blocks, k, correlated, history):
    """LRU-K hits like the published algorithm on any items."""
    assert_lruk(blocks, items, k, correlated, history)


@given(ITEMS, st.integers(1, 8), SHARES, SHARES, st.integers(1, 10))
def test_tinylfu_hits_as_published(items, blocks, window, protected, period):
    """W-TinyLFU hits like the plain algorithm on any items."""
    assert_tinylfu(blocks, items, window, protected, period)


@pytest.fixture(scope="module")
def trace():
    """Return the first 15,000 blocks of the bundled trace."""
    return list(islice((key for request in Mooncake() for key in request.keys), 15_000))


@pytest.mark.parametrize(("k", "correlated", "history"), [(2, 0, 1.0), (3, 50, 4.0)])
def test_lruk_hits_as_published_on_the_trace(trace, k, correlated, history):
    """LRU-K hits like the published algorithm on a real trace."""
    assert_lruk(200, trace, k, correlated, history)


@pytest.mark.parametrize(("blocks", "window"), [(200, 0.01), (2000, 0.2)])
def test_tinylfu_hits_as_published_on_the_trace(trace, blocks, window):
    """W-TinyLFU hits like the plain algorithm on a real trace."""
    assert_tinylfu(blocks, trace, window, 0.8, 10)
