"""Policies inside vLLM's cache manager: what they hit, and what they cost beside its own order.

`tox -e vllm -- tests/bench/test_engines.py` runs this; it takes about ten minutes.
"""

from __future__ import annotations

import gc
from warnings import catch_warnings

import pytest
from helpers.block_pools import SIZE, conversations, serve
from helpers.engines import required

from kvcore.analysis.belady import Belady, Future
from kvcore.cache import BlockLayout
from kvcore_plugins import eviction as builtin

required("vllm")
with catch_warnings(action="ignore"):  # of what vLLM imports
    from helpers.vllm_pool import VllmPool

POOLS = 2048, 8192, 32_768
POLICIES = sorted(getattr(builtin, name).name for name in builtin.__all__)


@pytest.fixture(autouse=True)
def uncollected():
    """Count no garbage collection, as `timeit` does not: it reads all that a test holds."""
    gc.disable()
    yield
    gc.enable()


def timed(eviction, blocks, count=None):
    """Return what a pool did, and milliseconds per request."""
    pool = VllmPool(eviction, blocks, watched=False)
    requests = [*conversations(count)]
    found = serve(pool, requests)
    assert pool.host is None or pool.host.failures == 0
    return found, found.seconds / len(requests) * 1e3


@pytest.mark.parametrize("blocks", POOLS)
def test_lru_costs_at_most_twice_vllms_own(blocks):
    """The best of five runs each, turn about, over a quarter of the trace."""
    own, hosted = [], []
    for _ in range(5):
        own.append(timed(None, blocks, 3000)[1])
        hosted.append(timed("lru", blocks, 3000)[1])
    print(f"\n{blocks} blocks: vLLM {min(own):.3f} ms a request, kvcore lru {min(hosted):.3f}")
    assert min(hosted) <= 2 * min(own)


def test_all_policies():
    """The table of the docs: tokens that hit, and ms a request."""
    print()
    for eviction in [None, *POLICIES]:
        cells = []
        for blocks in POOLS:
            found, cost = timed(eviction, blocks)
            cells.append(f"{100 * found.hit / found.tokens:6.2f} % {cost:6.3f}")
        print(f"{eviction or 'vLLM':10}", *cells, sep=" | ", flush=True)
    # Of requests that come one after the other.
    future = Future.read(conversations(), BlockLayout("keys", SIZE, SIZE, None))
    stats = (Belady().replay(future, blocks, SIZE)[0] for blocks in POOLS)
    cells = (f"{100 * each.hit_tokens / found.tokens:6.2f} %" for each in stats)
    print(f"{'optimum':10}", *cells, sep=" | ")
