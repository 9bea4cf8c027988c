"""Hits of hosted policies in LMCache's CPU back end over the whole bundled trace: a table.

`tox -e lmcache -- -s plugins/kvcore-lmcache/tests/bench_hits.py`. Each must be what the replay
of the same accesses in kvcore says, to the last eviction.
"""

from time import perf_counter

import pytest
from helpers.lmcache_package import CPU, Replay, digest

from kvcore.plugins import Plugins

POLICIES = ("lru", "fifo", "lfu", "slru", "sieve", "s3fifo", "arc", "tinylfu")


@pytest.mark.parametrize("chunks", [3_000, 10_000])
def test_the_whole_trace(chunks):
    """Every flat policy evicts in LMCache what it evicts in kvcore, in the same order."""
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
    """Serve all prompts."""
    for prompt in prompts:
        cache.serve(prompt)
    return cache
