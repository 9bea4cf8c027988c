"""Runs of the bundled trace, which `whatif` repeats byte for byte."""

from itertools import islice

import pytest

from kvcore import KVCache, Plugins, Trace
from kvcore.serving import simulate
from kvcore_lab.comparison import compare_policies
from kvcore_plugins.eviction import LRU
from kvcore_plugins.workload import Mooncake
from kvcore_replay.what_if import whatif


def test_whatif_repeats_a_comparison(tmp_path):
    """`whatif` repeats a comparison of 600 requests at 1,000 blocks byte for byte.

    With 2,000 blocks instead, it hits as many blocks as a comparison with 2,000 blocks.
    """
    path, again = tmp_path / "trace.jsonl.gz", tmp_path / "again.jsonl.gz"
    requests = list(islice(Mooncake(), 600))
    (small,) = compare_policies(requests, "lru", 1000, trace=path).rows
    (large,) = compare_policies(requests, "lru", 2000).rows
    found = whatif(path, export=again)
    assert again.read_bytes() == path.read_bytes()
    assert found.changes == []
    assert found.recorded.evicted_blocks > 5000
    assert found.recorded.hit["hit_blocks"] == small.hit_blocks
    larger = whatif(path, blocks=2000)
    assert larger.rerun.hit["hit_blocks"] == large.hit_blocks
    gain = sum(change.tokens for change in larger.changes)
    assert gain == (large.hit_blocks - small.hit_blocks) * 512


@pytest.mark.parametrize(("scheduler", "scale"), [("fcfs", 1.0), ("srpt", 3.0)])
def test_whatif_repeats_a_simulation(tmp_path, scheduler, scale):
    """`whatif` repeats a simulation of 600 requests byte for byte, even under overload."""
    path, again = tmp_path / "trace.jsonl", tmp_path / "again.jsonl"
    with Trace(path) as trace:
        simulate(
            islice(Mooncake(), 600),
            cache=KVCache(1000, 512, eviction=LRU(), trace=trace),
            scheduler=Plugins().build("scheduler", scheduler),
            rate_scale=scale,
        )
    found = whatif(path, export=again)
    assert again.read_bytes() == path.read_bytes()
    assert found.changes == []
    assert found.recorded.evicted_blocks > 5000
