"""Hits under a clock, against hits without one, on the bundled trace."""

from __future__ import annotations

import pytest

from kvcore import KVCache
from kvcore.serving import simulate
from kvcore_lab.comparison import compare_policies
from kvcore_plugins.eviction import LRU
from kvcore_plugins.latency import Linear, Roofline
from kvcore_plugins.workload import Mooncake

SIZES = (3_000, 30_000)
TOLERANCE = 0.015
INFINITE = 105_592

MODELS = {
    "default": Roofline,
    "lighter": lambda: Linear(step=5e-4, prefill=1e-6, decode=1e-6, context=1e-9),
}


@pytest.fixture(scope="module")
def untimed():
    """Return the hit blocks of untimed LRU replay by pool size."""
    rows = compare_policies(Mooncake(), ["lru"], SIZES, accounting="tokens").rows
    return {row.blocks: row.hit_blocks for row in rows}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("blocks", SIZES)
def test_a_clock_hardly_changes_the_hit_ratio(untimed, blocks, model):
    """The hit ratio under a clock is within 1.5 points of that of an untimed replay."""
    cache = KVCache(blocks, 512, eviction=LRU(), accounting="tokens")
    simulate(Mooncake(), cache=cache, latency=MODELS[model]())
    stats = cache.stats
    assert (stats.requests, stats.lookup_blocks) == (12_031, 276_491)
    assert stats.hit_blocks <= INFINITE
    assert abs(stats.hit_blocks - untimed[blocks]) / stats.lookup_blocks < TOLERANCE
