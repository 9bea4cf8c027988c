"""Prefetches ahead of requests: the same decisions in every mode, and no lost blocks."""

from random import Random

import pytest
from helpers.serving import random_talks, talks
from hypothesis import given, settings

from kvcore_replay.check.trace import check_trace
from kvcore_replay.misses.explain import explain
from kvcore_replay.recorded_run import recorded_run
from kvcore_replay.state.residency import rebuild_residency


def assert_recorded(path, result):
    """Assert that the figures of a recorded run are those of the run itself."""
    recorded, log, stats = recorded_run(path), result.log, result.cache.stats
    assert recorded.loaded_tokens == sum(log.loaded)
    assert recorded.hit["hit_tokens"] == stats.hit_tokens
    assert recorded.evicted_blocks == result.summary()["evicted_blocks"]
    assert (recorded.completed, recorded.rejected) == (
        len(log.ids) - len(log.reasons),
        len(log.reasons),
    )


few = settings(max_examples=max(settings.default.max_examples // 2, 1))
schedulers = pytest.mark.parametrize("scheduler", ["fcfs", "urgent", "planning", "fickle"])


@schedulers
@few
@given(server=talks())
def test_prefetches_do_not_depend_on_jumps(tmp_path_factory, scheduler, server):
    """Prefetches start at the same times with jumps and without, and their traces replay."""
    run = server.run(scheduler)
    assert run.trace == server.run(scheduler, jumps=False).trace
    path = tmp_path_factory.mktemp("ahead") / "trace.jsonl"
    path.write_bytes(run.trace)
    assert check_trace(path).pool["private"] == 0
    explain(path)
    assert_recorded(path, run.result)
    rests = run.result.cache.tree.residency
    assert rebuild_residency(path).as_dict() == rests.as_dict()
    for level in run.result.cache.tiers.levels:
        assert level.stats.prefetch_hits <= level.stats.prefetched
        assert not any(span.ref_count for span in level.tree.spans())


@schedulers
@few
@given(server=talks())
def test_prefetches_do_not_depend_on_a_trace(scheduler, server):
    """A cache without block ids prefetches the same as a traced one."""
    assert server.run(scheduler).decisions == server.run(scheduler, trace=False).decisions


def test_random_servers_prefetch_blocks():
    """Random servers prefetch blocks, of which requests hit some but not all."""
    runs = [random_talks(Random(seed).randint).run("fcfs", trace=False) for seed in range(40)]
    stats = [level.stats for run in runs for level in run.result.cache.tiers.levels]
    assert sum(s.prefetched for s in stats) > sum(s.prefetch_hits for s in stats) > 0
