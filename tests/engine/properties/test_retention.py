"""Sequences that drop tokens: equal decisions in every mode, and the cost of attention."""

from functools import partial
from random import Random

import pytest
from helpers.engine import compute, decided
from helpers.retention import Eager, retentions, windows
from helpers.serving import BLOCK, Bent, ask, random_server, serve, servers
from hypothesis import given
from hypothesis import strategies as st

from kvcore_replay.check.trace import check_trace

schedulers = pytest.mark.parametrize("scheduler", ["fcfs", "urgent", "fickle"])


class Attending(Bent):
    """A latency model of one nanosecond for each token that is attended to in any layer."""

    def pieces(self, work):
        """Return one line: the pairs of prefill, and a slope of 1 for each window."""
        return [(1000 * sum(work.attended_pairs), *(1000 for _ in work.context))]


def attended(prompt, output, chunk, reach, policy):
    """Return the number of attended tokens, counted token by token."""
    total = computed = forgotten = 0
    while computed < prompt + output - 1:
        step = min(chunk, prompt - computed) if computed < prompt else 1
        for index in range(computed, computed + step):
            seen = index + 1 - forgotten
            total += sum(seen if most is None else min(seen, most) for most in reach)
        computed += step
        if computed <= prompt or (computed - forgotten) % BLOCK == 0:
            forgotten += lost(policy, computed - forgotten, computed, prompt)
    return total


def lost(policy, held, computed, prompt):
    """Return how many of the `held` tokens a sequence drops, as its policy is defined."""
    if policy.name == "window":
        first = -(-policy.sinks // BLOCK) * BLOCK
        end = max(computed - policy.tokens, 0) // BLOCK * BLOCK
        return held - computed + max(end - first, 0)
    if policy.name == "eager":
        return max(held - policy.tokens, 0)
    tokens = policy.budget
    if isinstance(tokens, float):
        tokens = max(1, int(tokens * prompt))
    full = policy.when == "always" and held >= (-(-tokens // BLOCK) + 1) * BLOCK
    asked = computed == prompt or (computed > prompt and full)
    return max(held - tokens, 0) if asked else 0


@given(
    prompt=st.integers(1, 40),
    output=st.integers(1, 60),
    chunk=st.sampled_from((5, 8, 99)),
    reach=st.sampled_from(((None,), (None, 6), (3, None, 20))),
    make=retentions,
)
def test_dropped_tokens_are_not_attended_to(prompt, output, chunk, reach, make):
    """Chunks and decode steps attend to the kept tokens only, also in layers with windows."""
    run = serve(
        [ask("a", prompt=prompt, output=output)],
        retention=make(),
        latency=Attending(reach=reach),
        max_tokens=chunk,
        max_seqs=1,
        trace=False,
    )
    expected = attended(prompt, output, chunk, reach, make())
    assert run.rows["a"]["finish"] == expected


def simulated(server, scheduler, make, **options):
    """Serve the requests of a random server under a retention policy."""
    return server.run(scheduler, retention=make(), **options)


def replayed(trace, path):
    """Return the report on a trace after checking every line of it."""
    path.write_bytes(trace)
    return check_trace(path)


@schedulers
@given(server=servers(), make=retentions)
def test_jumps_drop_blocks_at_the_times_of_single_steps(scheduler, server, make):
    """Blocks are dropped at the same times whether steps are run one by one or not."""
    jumping, stepping = (simulated(server, scheduler, make, jumps=j) for j in (True, False))
    assert jumping.trace == stepping.trace
    assert jumping.result.cache.stats == stepping.result.cache.stats


@schedulers
@given(server=servers(), make=retentions)
def test_a_run_without_ids_ends_requests_at_the_same_times(scheduler, server, make):
    """A run in which blocks have no ids ends the same requests at the same times."""
    with_ids, counted = (simulated(server, scheduler, make, trace=t) for t in (True, False))
    assert with_ids.rows == counted.rows
    assert with_ids.result.cache.stats == counted.result.cache.stats


@given(server=servers(), make=retentions)
def test_a_trace_can_be_replayed(tmp_path_factory, server, make):
    """A trace with dropped tokens replays, and at its end no block is private."""
    run = simulated(server, "urgent", make)
    report = replayed(run.trace, tmp_path_factory.mktemp("trace") / "run.jsonl")
    assert (report.complete, report.pool["private"]) == (True, 0)
    assert report.pool["cached"] == run.result.cache.tree.cached_blocks
    assert report.events.get("COMPACT", 0) == run.result.cache.stats.compactions


def test_random_servers_defer_compactions():
    """Random servers are tight enough for deferred compactions, preemptions and hits."""

    def is_tight(seed):
        server = random_server(Random(seed).randint)
        run = simulated(server, "urgent", partial(Eager, 9), trace=False)
        stats = run.result.cache.stats
        counts = stats.compactions, stats.deferred_compactions, stats.hit_blocks
        return min(*counts, run.sum("recomputes")) > 0

    assert any(map(is_tight, range(100)))


@schedulers
@given(server=servers(), make=windows)
def test_a_run_on_tensors_has_the_trace_of_the_simulator(scheduler, server, make):
    """A run on tensors has the simulator's trace, except for header and END."""
    run = compute(
        server.requests,
        scheduler=scheduler,
        eviction=server.eviction,
        retention=make(),
        latency=Bent(reach=server.windows),
        **server.options,
    )
    assert decided(run.trace) == decided(simulated(server, scheduler, make).trace)
