"""A benchmark of hosted policies in LMCache's CPU back end over the bundled trace.

Run it by `tox -e lmcache -- -s plugins/kvcore-lmcache/tests/bench_hits.py`. It prints a table
of the hits, and checks that hits and evictions equal those of a replay in kvcore.
"""

from time import perf_counter

import pytest
from helpers.lmcache_package import CPU, Replay, digest

from kvcore.plugins import Plugins

POLICIES = ("lru", "fifo", "lfu", "slru", "sieve", "s3fifo", "arc", "tinylfu")


@pytest.mark.parametrize("chunks", [3_000, 10_000])
def test_policies_evict_in_lmcache_as_in_kvcore(chunks):
    """Every flat policy evicts the same chunks in LMCache as in kvcore, in the same order."""
    prompts = [each.keys for each in Plugins().build("workload", "mooncake")]
    own = run(CPU("LRU", chunks), prompts)
    print(f"{chunks} chunks: LMCache's LRU hits {own.hits} of {sum(map(len, prompts))}")
    for policy in POLICIES:
        begun = perf_counter()
        hosted = run(CPU(f"kvcore:{policy}", chunks), prompts)
        seconds = perf_counter() - begun
        replay = run(Replay(policy, chunks), prompts)
        print(f"{policy}: {hosted.hits} hits, {digest(hosted.evicted)[:12]}, {seconds:.0f} s")
        assert (hosted.hits, digest(hosted.evicted)) == (replay.hits, digest(replay.evicted))
        assert policy != "lru" or hosted.evicted == own.evicted


def run(cache, prompts):
    """Serve all prompts, and return the cache."""
    for prompt in prompts:
        cache.serve(prompt)
    return cache
