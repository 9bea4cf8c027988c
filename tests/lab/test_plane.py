"""Planes: hits and saved prefill by size of pool and tier, in one pass and replayed."""

from __future__ import annotations

import attrs
import pytest
from helpers.requests import keyed

from kvcore import InputError
from kvcore.models.catalogue import load_model
from kvcore.models.cost import PrefillCost
from kvcore.models.memory import KVLayout
from kvcore.request import Hints
from kvcore_lab.curves.mrc import curve
from kvcore_lab.curves.plane import plane
from kvcore_lab.report.plane import PlaneReport
from kvcore_plugins.eviction import FIFO
from kvcore_plugins.workload import Zipf
from kvcore_tiers.tier import Host

pytest.importorskip("numba", reason="needs the extra `lab`")

SMALL = Zipf(requests=120, prefixes=12)
LAYOUT = KVLayout(load_model("llama-3.1-8b"), "fp16", SMALL.key_tokens)
BLOCK = LAYOUT.bytes_per_block
POOLS = [300, 900]


def host(blocks, rules="load=always"):
    """Return a tier in host memory of `blocks` blocks."""
    return f"host:memory={blocks * BLOCK}B,{rules}"


def test_one_pass_is_lru_of_both_sizes():
    """In one pass, pool hits are LRU's of the pool, and all hits are LRU's of both sizes."""
    found = plane(SMALL, host(800), LAYOUT, pools=POOLS, points=3)
    (lru,) = curve(SMALL, "lru", POOLS).curves
    assert found.tiers[0] == 0
    assert found.tiers[-1] == 800
    for size, points in zip(found.tiers, found.points, strict=True):
        for point in points:
            assert point.hit_blocks == lru.steps.at(point.pool_blocks)
            both = point.hit_blocks + point.found_blocks
            assert both == lru.steps.at(point.pool_blocks + size)
            assert point.loaded_blocks == point.found_blocks


def test_hints_are_refused_in_one_pass_and_obeyed_in_a_replay():
    """A plane of requests with hints has to be replayed, and says so."""
    made = [attrs.evolve(request, hints=Hints(share=0)) for request in SMALL]
    options = {"pools": POOLS, "points": 2}
    with pytest.raises(InputError, match="share alone: add --exact"):
        plane(made, host(800), LAYOUT, **options)
    exact = plane(made, host(800), LAYOUT, exact=True, **options)
    assert exact.points[0][0].hit_blocks == 0


@pytest.mark.parametrize("keep", ["inclusive", "exclusive"])
def test_the_replayed_hierarchy_is_close_to_one_pass(keep):
    """Replayed hit ratios are within 0.04 of those of one pass.

    They differ since blocks are evicted before loaded ones are pinned.
    """
    options = {"pools": POOLS, "points": 3}
    tier = host(800, f"load=always,keep={keep}")
    quick = plane(SMALL, tier, LAYOUT, **options)
    exact = plane(SMALL, tier, LAYOUT, exact=True, **options)
    assert (quick.exact, exact.exact) == (False, True)
    assert quick.points[0] == exact.points[0], "without a tier there is one level"
    pairs = [
        (quick.ratio(mine), exact.ratio(its))
        for rows in zip(quick.points[1:], exact.points[1:], strict=True)
        for mine, its in zip(*rows, strict=True)
    ]
    assert all(abs(mine - its) < 0.04 for mine, its in pairs)
    assert any(mine != its for mine, its in pairs)


def test_several_processes_give_the_same_plane():
    """The plane is the same with one process as with several."""
    options = {"pools": [300], "points": 2, "exact": True}
    alone = plane(SMALL, host(200), LAYOUT, **options)
    assert plane(SMALL, host(200), LAYOUT, jobs=2, **options).points == alone.points


def test_saved_time_is_prefill_less_loading():
    """Saved time is the prefill of the hits, less the time to load them."""
    twice = Zipf(requests=2, prefixes=1, prefix_tokens=1600, suffix_tokens=160)
    cost = PrefillCost(1e-5)
    tier = host(1000, "load=always,read_bandwidth=1GB,latency=0.001")
    found = plane(twice, tier, LAYOUT, pools=[1], points=2, recompute=cost)
    none, *_, some = (points[0] for points in found.points)
    block_s = 16e-5
    assert found.prefill_s == pytest.approx(2 * 110 * block_s)
    assert (none.hit_blocks, none.saved_s) == (1, pytest.approx(block_s))
    assert some.loaded_blocks == 99
    assert some.saved_s == pytest.approx(100 * block_s - 99 * BLOCK / 1e9 - 0.001)


@pytest.mark.parametrize("exact", [False, True])
def test_no_more_prefill_is_saved_than_a_prompt_takes(exact):
    """A hit in a last block, filled in part, saves that part; prefill is of all tokens."""
    prompts = [keyed(0, [7], 16, more=4), *(keyed(n, [1, 2], 16, more=-12) for n in (1, 2))]
    tier = host(4, "load=always,latency=0")
    options = {"pools": [2], "points": 2, "recompute": PrefillCost(1.0), "exact": exact}
    found = plane(prompts, tier, LAYOUT, **options)
    assert found.prefill_s == 60
    assert found.points[0][0].saved_s == 20
    assert found.saved(found.points[0][0]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("bandwidth", "loaded"), [("100GB", True), ("1MB", False)])
def test_blocks_that_load_slower_than_they_compute_are_not_loaded(bandwidth, loaded):
    """`load=cost` loads blocks only if computing takes longer; `load=always` may lose time."""
    rules = f"read_bandwidth={bandwidth}"
    by_cost, always = (
        plane(SMALL, host(800, f"{rules},load={load}"), LAYOUT, pools=[300], points=2)
        for load in ("cost", "always")
    )
    before, after = by_cost.points[0][0], by_cost.points[-1][0]
    assert after.found_blocks > 0
    assert (after.loaded_blocks > 0, after.saved_s > before.saved_s) == (loaded, loaded)
    assert always.points[-1][0].loaded_blocks == after.found_blocks
    assert always.points[-1][0].saved_s <= after.saved_s


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_found_is_counted_where_nothing_is_loaded(exact):
    """With `load=never` blocks are found in the tier, and none of them is loaded."""
    options = {"pools": [300], "points": 2, "exact": exact}
    tops = plane(SMALL, host(800, "load=never"), LAYOUT, **options).points[-1]
    assert [point.found_blocks > 0 for point in tops] == [True]
    assert [(point.loaded_blocks, point.saved_s > 0) for point in tops] == [(0, True)]


@pytest.mark.parametrize(
    ("tier", "options", "fault"),
    [
        (host(99, "write=through"), {}, "write=through: one pass knows LRU"),
        (host(99, "eviction=lfu"), {}, "the tier's eviction=lfu"),
        (host(99), {"eviction": "fifo"}, "eviction=fifo"),
        (host(99), {"eviction": "lru,fifo"}, "a plane is of one policy"),
        (host(99), {"eviction": "optimum"}, "a plane is of one policy"),
        (host(99), {"jobs": 0, "exact": True}, "0 jobs were asked for"),
        (host(99), {"points": 1}, "a curve through 1 sizes"),
        (Host, {}, "Host'> is no tier: give one, or its text"),
        (None, {}, "None is no tier"),
        ("host", {}, "tier plugin 'host' needs a value for option 'memory'"),
    ],
)
def test_impossible_options_are_refused(tier, options, fault):
    """Options that a plane cannot show raise InputError with the option."""
    with pytest.raises(InputError, match=fault):
        plane(SMALL, tier, LAYOUT, **{"pools": [300], "points": 2, **options})


def test_policies_that_cannot_be_pickled_need_one_process(monkeypatch):
    """One process replays policies that cannot be pickled; several raise InputError."""
    monkeypatch.setattr("kvcore_lab.workers.can_fork", lambda: False)

    class Local(FIFO):
        name = "local"

    tier = Host(memory=500 * BLOCK, eviction=FIFO())
    options = {"pools": [300], "points": 2, "exact": True}
    found = plane(SMALL, tier, LAYOUT, eviction=Local, **options)
    assert found.points == plane(SMALL, tier, LAYOUT, eviction="fifo", **options).points
    with pytest.raises(InputError, match="cannot be sent to another process"):
        plane(SMALL, tier, LAYOUT, eviction=Local, jobs=2, **options)


@pytest.mark.parametrize(("pools", "blocks"), [([300], 800), (POOLS, 1)])
def test_a_plane_of_one_size_has_no_contours(pools, blocks):
    """A plot of a plane with a single size raises InputError with the numbers of sizes."""
    found = plane(SMALL, host(blocks), LAYOUT, pools=pools, points=2)
    sizes = f"it has {len(pools)} of the pool and {min(blocks, 2)} of the tier"
    with pytest.raises(InputError, match=sizes):
        PlaneReport(found, LAYOUT).contours("svg")
