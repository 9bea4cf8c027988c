"""The prefix caches `radix` and `hashed`, which lead to the same trace byte for byte."""

import io

import pytest
from helpers.fake_policies import ExpiringPolicy

from kvcore import KVCache, Trace
from kvcore.testing import FORKS, Driver, Traffic, random_steps
from kvcore_plugins.eviction import LFU, LRU
from kvcore_plugins.prefix import Hashed, Radix

KEY = 6


def run(prefix, eviction, steps, **options):
    """Perform `steps` in a small cache; return decisions, and the lines of its trace.

    HEADER and END are left out.
    """
    file = io.BytesIO()
    with Trace(file) as trace:
        cache = KVCache(15, prefix=prefix, eviction=eviction, trace=trace, **options)
        decisions = Driver(cache).run(steps)
    header, *lines = file.getvalue().splitlines()
    assert f'"{cache.prefix.name}"'.encode() in header
    *lines, _ = lines  # END has a digest that covers the header
    return decisions, lines


@pytest.mark.parametrize(
    ("accounting", "block_size"), [("tokens", 2), ("tokens", 6), ("tokens", 12), ("keys", 2)]
)
@pytest.mark.parametrize("eviction", [LRU, LFU, ExpiringPolicy])
@pytest.mark.parametrize("seed", range(5))
def test_radix_and_hashed_write_the_same_trace(seed, eviction, accounting, block_size):
    """`radix` and `hashed` have the same hits, evictions and trace.

    Requests have forks, hints, expiry and coarse keys.
    """
    mix = {} if seed % 2 else {"mix": FORKS}
    steps = random_steps(seed, 250, Traffic(key_tokens=KEY, hints=True, **mix))
    layout = {"accounting": accounting, "block_size": block_size, "key_tokens": KEY}
    radix = run(Radix(), eviction(), steps, **layout)
    hashed = run(Hashed(), eviction(), steps, **layout)
    assert any(decision.hit for decision in radix[0])
    assert seed % 2 == 0 or any(b'"EVICT"' in line for line in radix[1])
    assert hashed == radix
