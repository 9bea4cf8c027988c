"""Hit curves of the bundled trace, against recorded numbers and against replays."""

from __future__ import annotations

import pytest
from lab.golden.test_mooncake import LRU_KEYS, MAY_BYPASS, MUST_ADMIT, SIZES

from kvcore_lab.comparison import compare_policies
from kvcore_lab.curves.mrc import curve
from kvcore_plugins.workload import Mooncake

pytest.importorskip("numba")

LONGEST = 247
"""Blocks of the longest request; smaller pools keep its leading blocks only."""


@pytest.fixture(scope="module")
def curves():
    """Return the exact curves at the sizes of the other golden tests."""
    return curve(Mooncake(), "lru,optimum,optimum:bypass=true", SIZES)


def test_numbers_of_hits_and_blocks_of_an_infinite_cache(curves):
    """On the bundled trace 105,710 of 288,500 blocks can hit, in a pool of 182,790 blocks."""
    bounds = (curves.lookup_blocks, curves.distinct_blocks, curves.hit_blocks)
    assert bounds == (288_500, 182_790, 105_710)


@pytest.mark.parametrize(
    ("place", "expected"), [(0, LRU_KEYS), (1, MUST_ADMIT), (2, MAY_BYPASS)]
)
def test_curves_go_through_the_recorded_hits(curves, place, expected):
    """The curves of LRU and of both optima go through the recorded numbers of hits."""
    assert tuple(curves.curves[place].hit_blocks) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block_size", "ratio", "points"), [(512, 1, 12), (16, 32, 6)], ids=["512", "16"]
)
def test_one_pass_equals_replays_at_many_sizes(block_size, ratio, points):
    """The curve of LRU equals a replay at each size.

    Sizes go from 60 blocks of 512 tokens, less than the longest request, to all blocks.
    """
    spread = (182_790 / 60) ** (1 / (points - 1))
    sizes = [round(60 * ratio * spread**step) for step in range(points)]
    assert sizes[0] < LONGEST * ratio < sizes[-1]
    found = curve(Mooncake(), "lru", sizes, block_size=block_size).curves[0]
    replayed = compare_policies(Mooncake(), "lru", sizes, block_size=block_size)
    assert found.hit_blocks == [row.hit_blocks for row in replayed.rows]
