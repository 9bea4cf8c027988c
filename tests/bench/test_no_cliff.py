"""The speed of a cache with a full pool, and the cost of an eviction among many leaves."""

from __future__ import annotations

from time import process_time

import pytest
from bench.harness import KEY_TOKENS, POOL, bundled, medians

from kvcore import EvictionPolicy, KVCache, Request
from kvcore_plugins.eviction import (
    ARC,
    LFU,
    LRU,
    LRUK,
    S3FIFO,
    SLRU,
    Cost,
    Lookahead,
    TailLRU,
    TinyLFU,
)
from kvcore_plugins.prefix import Radix

POLICIES = [LRU, SLRU, LFU, Cost, ARC, S3FIFO, LRUK, TinyLFU, TailLRU, Lookahead]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_pool_keeps_its_speed(policy: type[EvictionPolicy]) -> None:
    """The last quarter of a trace has at least 0.7 of the speed of the first full quarter."""
    requests = bundled()
    quarter = len(requests) // 4

    def ratio() -> float:
        cache = KVCache(POOL, KEY_TOKENS, eviction=policy(), prefix=Radix(), accounting="keys")
        rates, full = [], None
        for part in range(4):
            chunk = requests[part * quarter : (part + 1) * quarter]
            start = process_time()
            for request in chunk:
                seq = cache.open(request, None, request.arrival)
                cache.commit(seq, seq.tokens - seq.computed, request.arrival)
                cache.close(seq, request.arrival)
            blocks = sum(len(request.keys) for request in chunk)
            rates.append(blocks / (process_time() - start))
            if full is None and cache.tree.evicted_blocks:
                full = part
        assert full is not None
        return rates[-1] / rates[full]

    (value,) = medians(5, ratio)
    print(f"\n{policy.name}: last quarter at {value:.2f} of the first full quarter, per block")
    assert value >= 0.7


def eviction_seconds(
    policy: type[EvictionPolicy], leaves: int, evictions: int = 2_000
) -> float:
    """Return the CPU seconds of one eviction with `leaves` one-block leaves cached."""
    cache = KVCache(leaves, 1, eviction=policy(), prefix=Radix(), accounting="keys")
    key = 0

    def one() -> None:
        nonlocal key
        key += 1
        seq = cache.open(Request(id=key, prompt_tokens=1, keys=[key], key_tokens=1), None, key)
        cache.commit(seq, 1, key)
        cache.close(seq, key)

    for _ in range(leaves):
        one()
    start = process_time()
    for _ in range(evictions):
        one()
    return (process_time() - start) / evictions


@pytest.mark.parametrize("policy", POLICIES)
def test_evictions_among_many_leaves_keep_their_speed(policy: type[EvictionPolicy]) -> None:
    """An eviction among 20,000 leaves takes at most 1.6 times as long as among 200."""
    few, many = medians(
        5, lambda: eviction_seconds(policy, 200), lambda: eviction_seconds(policy, 20_000)
    )
    print(
        f"\n{policy.name}: {few * 1e6:.2f} µs per admission and eviction at 200 leaves, "
        f"{many * 1e6:.2f} µs at 20,000: {many / few:.2f} x"
    )
    assert many / few <= 1.6
