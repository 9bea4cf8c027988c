"""Requests that are aborted at any time leave no blocks, and a trace that replays."""

import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from helpers.policies import build
from helpers.schedulers import scheduler_of
from helpers.serving import (
    SLOT,
    Bent,
    batching_of,
    random_tiered_server,
    servers,
    tiered_servers,
)
from hypothesis import given
from hypothesis import strategies as st

from kvcore import KVCache, Trace
from kvcore.serving.latency import SimulatedExecutor
from kvcore.serving.loop import ServingLoop
from kvcore.workloads.arrivals import Arrivals
from kvcore_replay.check.trace import check_trace
from kvcore_tiers.hierarchy import Tiers

SCHEDULERS = ("fcfs", "srpt", "urgent", "latest", "planning", "fair")


class ImpatientLoop(ServingLoop):
    """A loop that aborts jobs at random, before a turn begins.

    Attributes:
        aborted: the number of aborts by stage of the job; `late` if the abort had to wait.
    """

    def __init__(self, seed, *parts, **options):
        self.random, self.aborted = Random(seed), Counter()
        super().__init__(*parts, **options)

    def begin(self):
        """Abort some jobs at random, then begin the turn."""
        for job in [*self.batcher.running, *self.batcher.waiting]:
            if self.random.random() < 0.1:
                stage = job.stage
                self.aborted[stage if self.abort(job, "left") else f"late {stage}"] += 1
        return super().begin()


def run(server, scheduler, seed):
    """Serve with random aborts, check cache and trace, and return the aborts by stage."""
    options = server.options | {"watermark": 0}
    blocks, size, keys = (options.pop(n) for n in ("blocks", "block_size", "key_tokens"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        with Trace(path, mode="wall", executor="run") as trace:
            cache = KVCache(
                blocks,
                size,
                eviction=build(server.eviction),
                accounting="tokens",
                key_tokens=keys,
                trace=trace,
            )
            if server.tiers:
                Tiers(cache, server.tiers, SLOT)
            latency = Bent(reach=server.windows)
            loop = ImpatientLoop(
                seed,
                Arrivals(server.requests, prefetches=bool(server.tiers)),
                cache,
                scheduler_of(scheduler),
                SimulatedExecutor(latency),
                batching_of(**options),
            )
            loop.run()
        cache.check_integrity()
        assert not cache.sequences
        assert not [*loop.batcher.running, *loop.batcher.waiting, *loop.batcher.paused]
        assert Counter(loop.log.ids) == Counter(request.id for request in server.requests)
        report = check_trace(path)
        assert report.finished + report.rejected == len(server.requests)
    return loop.aborted


@given(servers() | tiered_servers(), st.sampled_from(SCHEDULERS), st.integers(0, 99))
def test_aborted_requests_leave_no_blocks(server, scheduler, seed):
    """Each request ends exactly once and no block is lost, whatever the stage of its abort."""
    if server.requests:
        run(server, scheduler, seed)


@pytest.mark.parametrize("stage", ["waiting", "prefill", "decode", "paused", "late loading"])
def test_random_servers_abort_jobs_in_each_stage(stage):
    """Random servers abort jobs in every stage, so that the property covers them all."""
    stages = Counter()
    for seed in range(400):
        server = random_tiered_server(Random(seed).randint)
        stages += run(server, "urgent", seed)
        if stages[stage]:
            return
    pytest.fail(f"{stage}: only {stages}")
