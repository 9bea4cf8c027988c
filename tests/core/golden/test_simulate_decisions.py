"""Decisions of the simulator on the first 300 requests of the bundled trace."""

from __future__ import annotations

from itertools import islice

import pytest
from helpers.schedulers import scheduler_of
from helpers.serving import serve

from kvcore_plugins.latency import Linear
from kvcore_plugins.workload import Mooncake

REQUESTS = 300

# Steps; preemptions by pause and by recompute; blocks that hit, blocks of their own that
# preempted requests found again, and evicted blocks; sums of nanoseconds to the first tokens,
# and to the last ones.
GOLDEN = {
    "fcfs": (10_709, 0, 12, 298, 235, 7_514, 5_927_673_001_656, 7_009_681_565_508),
    "srpt": (12_898, 73, 1, 394, 1, 7_431, 1_842_489_137_352, 2_953_249_659_640),
    "slo": (10_411, 0, 2, 299, 2, 7_552, 6_059_587_061_720, 7_216_320_206_516),
}


@pytest.mark.parametrize("scheduler", GOLDEN)
def test_decisions_of_a_small_run_equal_the_recorded_ones(scheduler):
    """Steps, preemptions, hits, evictions and latencies equal the recorded ones.

    The trace runs twice as fast as recorded, with 16 sequences at once and too few blocks for
    them.
    """
    run = serve(
        islice(Mooncake(), REQUESTS),
        blocks=400,
        block_size=512,
        scheduler=scheduler_of(scheduler),
        latency=Linear(step=0.0035, prefill=1e-5, decode=1e-5, context=1.2e-8),
        max_seqs=16,
        rate_scale=2,
    )
    cache = run.result.cache
    assert len(run.rows) == REQUESTS
    assert GOLDEN[scheduler] == (
        run.result.log.steps,
        run.sum("pauses"),
        run.sum("recomputes"),
        cache.stats.hit_blocks,
        cache.stats.self_hit_blocks,
        cache.tree.evicted_blocks,
        run.sum("first_token") - run.sum("arrival"),
        run.sum("finish") - run.sum("arrival"),
    )
