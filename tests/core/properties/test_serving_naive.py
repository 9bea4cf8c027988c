"""The serving loop against a naive one, on random servers of all features."""

from random import Random

import attrs
import pytest
from helpers.policies import POLICIES, build
from helpers.reference.serving import Server
from helpers.reference.serving_cache import ServingCache
from helpers.schedulers import SCHEDULERS, scheduler_of
from helpers.serving import (
    SLOT,
    Bent,
    batching_of,
    random_ruled_server,
    random_server,
    random_talks,
    random_tiered_server,
    ruled_servers,
    servers,
    talks,
    tiered_servers,
)
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvcore import KVCache, PolicyError, Tiers
from kvcore.request import Hints

BLOCK_EVICTIONS = ("lru", "fifo", "mru", "slru", "lfu:decay=1", "ttl:ttl=2e-8")
"""Policies that the block-by-block cache has too."""

together = settings(max_examples=max(settings.default.max_examples // len(SCHEDULERS), 4))
"""As many servers for all schedulers together as another property has for one."""


MAKES = (random_server, random_ruled_server, random_tiered_server, random_talks)
PARTS = 32
FIXED = 6 * PARTS
"""Servers of fixed seeds: each scheduler has three of each kind."""


def may_circle(server, scheduler):
    """Return True for plans that may preempt in circles: prompts get blocks by the chunk."""
    has_plan = scheduler.partition(":")[0] in ("lpm", "planning")
    return has_plan and server.options.get("reserve") == "first-chunk"


def span_cache(server):
    """Return a function that makes the cache of a server, with its tiers."""

    def make_cache(blocks, block_size, key_tokens):
        eviction = build(server.eviction)
        cache = KVCache(blocks, block_size, eviction=eviction, key_tokens=key_tokens)
        if server.tiers:
            Tiers(cache, server.tiers, SLOT)
        return cache

    return make_cache


def assert_same_decisions(server, scheduler, make_cache):
    """Check that the naive loop, with the cache of `make_cache`, decides as kvcore does.

    Return the run of kvcore; None if both end in a livelock.
    """
    options = dict(server.options)
    cache = make_cache(*(options.pop(name) for name in ("blocks", "block_size", "key_tokens")))
    latency, batching = Bent(reach=server.windows), batching_of(**options)
    naive = Server(server.requests, cache, scheduler_of(scheduler), latency, batching)
    try:
        run = server.run(scheduler, trace=False)
    except PolicyError:
        with pytest.raises(PolicyError, match="livelock"):
            naive.run()
        return None
    naive.run()
    cache.check_integrity()
    assert not cache.sequences
    log = run.result.log
    columns = zip(
        *(log.ids, log.admitted, log.first_token, log.finish, log.output, log.hit, log.loaded),
        *(log.pauses, log.recomputes, log.swaps),
        strict=True,
    )
    # Requests that end at one time are compared in their order.
    assert list(columns) == [
        (
            *(job.request.id, _time(job.admitted), _time(job.first_token), job.finish),
            *(job.output_tokens, job.hit, job.loaded),
            *(job.pauses, job.recomputes, job.swaps),
        )
        for job in naive.jobs
    ]
    assert run.rejected.keys() == naive.reasons.keys()
    assert all(words in run.rejected[name] for name, words in naive.reasons.items())
    evicted = run.result.cache.tree.evicted_blocks
    totals = naive.steps, naive.busy, naive.cache.tree.evicted_blocks
    assert (log.steps, log.busy_ps, evicted) == totals
    gaps = log.itl.percentiles(1)
    assert log.itl.count == len(naive.gaps)
    assert gaps is None or gaps.mean == sum(naive.gaps) / len(naive.gaps)
    return run


def _time(time):
    return -1 if time is None else time


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@together
@given(server=servers() | ruled_servers() | tiered_servers() | talks())
# The last token comes from a prefill; a second plan at one time preempts; pins end early for a
# running job (twice), and blocks expire, while another one waits for blocks.
@example(server=random_server(Random(60).randint))
@example(server=random_ruled_server(Random(358).randint))
@example(server=random_server(Random(405).randint))
@example(server=random_ruled_server(Random(453).randint))
@example(server=random_ruled_server(Random(630).randint))
def test_decisions_are_those_of_the_naive_loop(scheduler, server):
    """Each request has the times, hits and preemptions of the naive loop, to the ns."""
    assume(not may_circle(server, scheduler))
    assert_same_decisions(server, scheduler, span_cache(server))


@pytest.mark.parametrize("part", range(PARTS))
def test_fixed_servers_decide_as_the_naive_loop(part):
    """Servers of fixed seeds decide as the naive loop: with jumps, step by step, and traced.

    A server takes some milliseconds, so that tests of mutants can afford all of them.
    """
    for seed in range(part, FIXED, PARTS):
        scheduler = SCHEDULERS[seed % len(SCHEDULERS)]
        server = MAKES[seed // len(SCHEDULERS) % len(MAKES)](Random(seed).randint)
        if may_circle(server, scheduler):
            continue
        run = assert_same_decisions(server, scheduler, span_cache(server))
        if run is not None:
            steps, traced = (
                server.run(scheduler, trace=False, jumps=False),
                server.run(scheduler),
            )
            assert steps.decisions == traced.decisions == run.decisions


@pytest.mark.parametrize("seed", [*range(16, 24), 38])
def test_fixed_servers_under_a_lag_decide_as_the_naive_loop(seed):
    """Blocks that are scheduled are shared, chunk by chunk, as the naive loop does under a lag.

    Server 21 lacks blocks for some of the jobs that decode, and gives the first ones theirs;
    server 38 takes those of a job that has its last token, and admits no other in its place.
    """
    server = random_ruled_server(Random(seed).randint)
    rules = {
        "lag": 1,
        "steps": "mixed",
        "commit": "scheduled",
        "generated": "cached",
        "admit_after_preemption": False,
        "reserve": ("chunk", "first-chunk")[seed % 2],
    }
    scheduler = SCHEDULERS[seed % len(SCHEDULERS)]
    if not may_circle(attrs.evolve(server, options=rules), scheduler):
        server = attrs.evolve(server, options=server.options | rules)
        assert_same_decisions(server, scheduler, span_cache(server))


@given(
    server=servers() | ruled_servers(),
    scheduler=st.sampled_from(SCHEDULERS),
    eviction=st.sampled_from(BLOCK_EVICTIONS),
)
def test_decisions_are_those_of_a_naive_loop_over_single_blocks(server, scheduler, eviction):
    """Decisions are those of the naive loop with a cache that has a record for each block."""

    def make_cache(blocks, block_size, key_tokens):
        return ServingCache(blocks, block_size, POLICIES[eviction](), key_tokens=key_tokens)

    requests = [
        attrs.evolve(request, hints=Hints(share=request.hints.share))
        for request in server.requests
    ]
    server = attrs.evolve(server, requests=requests, eviction=eviction)
    assume(not may_circle(server, scheduler))
    assert_same_decisions(server, scheduler, make_cache)
