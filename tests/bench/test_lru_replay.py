"""LRU over spans against a flat `OrderedDict` LRU over the same blocks."""

from __future__ import annotations

import pytest
from bench.harness import POOL, bundled, cache_lru, flat_lru, medians

RUNS = 5


@pytest.mark.parametrize(
    ("ratio", "without_ids", "with_ids"),
    [(1, 0.9, 0.5), (32, 15.0, 10.0)],
    ids=["block 512", "block 16"],
)
def test_the_cache_is_faster_than_a_flat_lru(
    ratio: int, without_ids: float, with_ids: float
) -> None:
    """The cache replays requests at least `without_ids` times as fast as the flat LRU.

    With block ids it is at least `with_ids` times as fast.
    """
    requests = bundled()
    blocks = POOL * ratio

    def rate(measured: tuple[float, int]) -> float:
        return measured[1] / measured[0]

    flat, counted, ided = medians(
        RUNS,
        lambda: rate(flat_lru(requests, ratio, blocks)),
        lambda: rate(cache_lru(requests, ratio, blocks, ids=False)),
        lambda: rate(cache_lru(requests, ratio, blocks, ids=True)),
    )
    print(
        f"\nLRU replay, {512 // ratio}-token blocks, requests/s: flat {flat:,.0f}; cache "
        f"{counted:,.0f} = {counted / flat:.2f} x flat (promised {without_ids}); with ids "
        f"{ided:,.0f} = {ided / flat:.2f} x flat (promised {with_ids})"
    )
    assert counted / flat >= without_ids
    assert ided / flat >= with_ids
