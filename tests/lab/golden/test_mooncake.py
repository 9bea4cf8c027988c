"""Hits on the bundled trace, 12,031 requests of a chat service, against recorded numbers."""

from __future__ import annotations

import pytest

from kvcore_lab.comparison import compare_policies
from kvcore_plugins.workload import Mooncake

SIZES = (1_000, 3_000, 5_859, 10_000, 30_000, 50_000, 100_000)
FINE = (3_000, 5_859, 30_000)
OPTIMUM = "optimum"
BYPASS = "optimum:bypass=true"

LRU_KEYS = (12_847, 18_850, 39_258, 61_046, 93_978, 102_290, 104_924)
MUST_ADMIT = (51_705, 84_121, 101_431, 105_710, 105_710, 105_710, 105_710)
MAY_BYPASS = (55_019, 84_953, 101_884, 105_710, 105_710, 105_710, 105_710)
LRU_TOKENS = (12_988, 19_398, 40_640, 62_001, 95_336, 102_723, 104_926)
LRU_TOKENS_FINE = (610_630, 1_283_944, 3_024_301)


def hits(comparison, eviction, **options):
    """Return the hits of a policy by pool size."""
    return {
        row.blocks: row.hit_blocks
        for row in comparison.rows
        if row.eviction == eviction and row.options == options
    }


@pytest.fixture(scope="module")
def keys():
    """Return a comparison of LRU and both optima in `keys` accounting, a block per key."""
    return compare_policies(Mooncake(), ["lru", OPTIMUM, BYPASS], SIZES)


@pytest.fixture(scope="module")
def tokens():
    """Return a comparison of LRU in `tokens` accounting, with a block per key."""
    return compare_policies(Mooncake(), ["lru"], SIZES, accounting="tokens")


@pytest.fixture(scope="module")
def tokens_fine():
    """Return a comparison of LRU in `tokens` accounting, in blocks of 16 tokens."""
    sizes = [32 * size for size in FINE]
    return compare_policies(Mooncake(), ["lru"], sizes, block_size=16, accounting="tokens")


def test_lru_in_keys_accounting(keys):
    """LRU hits the recorded numbers of blocks out of 288,500 in `keys` accounting."""
    assert hits(keys, "lru") == dict(zip(SIZES, LRU_KEYS, strict=True))
    assert {row.lookup_blocks for row in keys.rows} == {288_500}


def test_the_optimum_that_must_admit(keys):
    """The optimum that must admit each request hits the recorded numbers of blocks."""
    assert hits(keys, "optimum", bypass=False) == dict(zip(SIZES, MUST_ADMIT, strict=True))


def test_the_optimum_that_may_bypass(keys):
    """The optimum that may bypass the cache hits the recorded numbers of blocks."""
    assert hits(keys, "optimum", bypass=True) == dict(zip(SIZES, MAY_BYPASS, strict=True))


def test_an_infinite_cache_in_keys_accounting(keys):
    """An infinite cache hits 105,710 blocks and holds 182,790 in `keys` accounting."""
    assert keys.infinite.hit_blocks == 105_710
    assert keys.infinite.distinct_blocks == 182_790


def test_lru_in_tokens_accounting(tokens):
    """LRU hits the recorded numbers of blocks out of 276,491 in `tokens` accounting.

    There the last token of a prompt is always computed.
    """
    assert hits(tokens, "lru") == dict(zip(SIZES, LRU_TOKENS, strict=True))
    assert {row.lookup_blocks for row in tokens.rows} == {276_491}


def test_an_infinite_cache_in_tokens_accounting(tokens):
    """An infinite cache hits 105,592 blocks in `tokens` accounting."""
    assert tokens.infinite.hit_blocks == 105_592


def test_lru_in_tokens_accounting_in_blocks_of_16(tokens_fine):
    """LRU hits the recorded numbers of blocks out of 9,044,013 in blocks of 16 tokens."""
    assert list(hits(tokens_fine, "lru").values()) == list(LRU_TOKENS_FINE)
    assert {row.lookup_blocks for row in tokens_fine.rows} == {9_044_013}
