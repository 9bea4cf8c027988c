"""Hits under a clock, against hits without one, on the bundled trace."""

from __future__ import annotations

import attrs
import pytest
from helpers.schedulers import SCHEDULERS, scheduler_of
from helpers.serving import ask, serve

from kvcore import KVCache
from kvcore.serving import simulate
from kvcore_lab.comparison import compare_policies
from kvcore_plugins.eviction import LRU
from kvcore_plugins.latency import Linear, Roofline
from kvcore_plugins.workload import Mooncake
from kvcore_replay.untimed import replay

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


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_blocks_found_again_after_a_preemption_are_no_hits(scheduler):
    """Blocks that a preempted request finds again are not counted as hits."""
    requests = [
        ask(
            index,
            at=3 * index,
            prompt=20 + index % 30,
            output=10 + index % 40,
            keys=[index * 100 + place for place in range(5 + -(-(index % 30) // 4))],
            priority=index % 3,
            tenant=f"tenant {index % 3}",
        )
        for index in range(150)
    ]
    run = serve(requests, blocks=30, scheduler=scheduler_of(scheduler), max_seqs=8)
    stats = run.result.cache.stats
    assert run.sum("recomputes") > 100
    assert stats.self_hit_blocks > 0
    assert (stats.requests, stats.lookup_blocks > 0, stats.hit_blocks) == (150, True, 0)
    assert run.sum("hit") == stats.hit_tokens == 0


def test_hits_are_counted_at_the_first_admission_only():
    """Lookups and hits of a request are counted at its first admission only."""
    shared = [7, 8, 9]
    requests = [
        ask(index, prompt=12 + index % 5, output=30, keys=shared) for index in range(40)
    ]
    run = serve(requests, blocks=20, max_seqs=4)
    alone = KVCache(1000, 4, eviction=LRU(), accounting="tokens")
    bound = replay([attrs.evolve(request, arrival=0) for request in requests], alone)
    stats = run.result.cache.stats
    assert run.sum("recomputes") > 10
    assert stats.requests == 40
    assert stats.lookup_blocks == bound.lookup_blocks
    assert stats.hit_blocks <= bound.hit_blocks
    assert run.sum("hit") == stats.hit_tokens
