"""Known miss counts of the published algorithms, on requests of one key each.

The bundled trace is flattened to 288,500 one-block requests and runs at 1,827 and 18,279
blocks. Each number is that of two independent implementations. Policies run at one size each,
because what depends on the size is the cache's. ARC and SIEVE run at the larger one: at smaller
ones `plugins/properties/test_queues.py` compares them hit by hit.
"""

from __future__ import annotations

import pytest
from helpers.requests import keyed

from kvcore import KVCache, Plugins
from kvcore.cache.layout import BlockLayout
from kvcore_plugins.prefix import Radix
from kvcore_plugins.workload import Mooncake
from kvcore_replay.belady import Belady, Future
from kvcore_replay.untimed import replay

MISSES = {
    "lru": {18_279: 208_177},
    "fifo": {1_827: 273_935},
    "lfu:half_life=inf": {1_827: 271_711},
    "arc": {18_279: 206_494},
    "sieve": {18_279: 232_293},
}


@pytest.fixture(scope="module")
def flat():
    """Return every block of the bundled trace as a separate request."""
    keys = (key for request in Mooncake() for key in request.keys)
    return [keyed(n, [key], 1) for n, key in enumerate(keys)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", MISSES)
def test_a_policy_misses_as_the_published_algorithm(policy, flat):
    """The policy misses exactly as often as the published algorithm."""
    found = {}
    for blocks in MISSES[policy]:
        eviction = Plugins().build("eviction", policy)
        cache = KVCache(blocks, 1, eviction=eviction, prefix=Radix(), accounting="keys")
        found[blocks] = len(flat) - replay(flat, cache).hit_blocks
    assert found == MISSES[policy]


def test_the_optimum_misses_as_beladys_algorithm(flat):
    """The optimum that must admit misses as often as Belady's algorithm on one-key requests."""
    future = Future.read(flat, BlockLayout("keys", 1, 1))
    hits = [Belady().replay(future, blocks, 1)[0].hit_blocks for blocks in (1_827, 18_279)]
    assert [len(flat) - hit for hit in hits] == [217_437, 182_790]
