"""What the simulator decides, the engine decides too, and what it computes is right."""

from itertools import islice

import pytest
from helpers.engine import compute, decided, digest
from helpers.policies import POLICIES
from helpers.schedulers import SCHEDULERS
from helpers.serving import EVICTIONS, Bent, Server, servers
from hypothesis import given, settings

from kvcore.engine.tokens import TokenStream
from kvcore.workloads import WorkloadSample
from kvcore_plugins.workload import Mooncake

few = settings(max_examples=max(settings.default.max_examples // 2, 1))


def computed(server, scheduler):
    """Serve what a random server serves, on tensors."""
    return compute(
        server.requests,
        scheduler=scheduler,
        eviction=server.eviction,
        latency=Bent(reach=server.windows),
        **server.options,
    )


def expected(request, vocabulary=10_007):
    """Return the output that the whole sequence, computed without a cache, would have."""
    stream = TokenStream(request, vocabulary, 0)
    tokens = stream.token_ids(0, request.prompt_tokens)
    for _ in range(request.output_tokens):
        tokens.append(stream.append(digest(tokens)))
    return tokens[request.prompt_tokens :]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@few
@given(server=servers())
def test_same_decisions_on_tensors(scheduler, server):
    """Under the model's clock the trace is the simulator's, but for header and END."""
    run = computed(server, scheduler)
    assert decided(run.trace) == decided(server.run(scheduler).trace)


@pytest.mark.parametrize("scheduler", ["fcfs", "urgent", "planning"])
@given(server=servers())
def test_paged_is_dense(scheduler, server):
    """Whatever was shared, evicted, preempted and computed again: the output is the dense one.

    A slot that is read must have been stored since it was allocated.
    """
    result = computed(server, scheduler).result
    served = {r.id: r for r in server.requests if r.id not in server_rejects(result)}
    assert result.outputs == {name: expected(request) for name, request in served.items()}


def server_rejects(result):
    """Return the ids of requests that were never admitted."""
    return {result.log.ids[row] for row in result.log.reasons}


@pytest.fixture(scope="module")
def recorded():
    """Return 150 requests of a production trace, 64 times shorter."""
    return list(islice(WorkloadSample(Mooncake(), limit=150, scale=64), 150))


@pytest.mark.parametrize(
    ("eviction", "scheduler"),
    [(eviction, "fcfs") for eviction in EVICTIONS]
    + [("lru", scheduler) for scheduler in SCHEDULERS],
)
def test_twins_on_recorded_requests(recorded, eviction, scheduler):
    """The same of 150 real requests that evict, for every plugin."""
    options = {"blocks": 450, "block_size": 8, "max_tokens": 512, "rate_scale": 1e6}
    server = Server(recorded, eviction, (None,), options)
    simulated = server.run(scheduler)
    run = computed(server, scheduler)
    assert decided(run.trace) == decided(simulated.trace)
    assert simulated.of("FINISH")
    assert simulated.result.cache.tree.evicted_blocks


def test_every_policy_is_in_the_list():
    """Each eviction policy under test is tried."""
    assert set(POLICIES) <= set(EVICTIONS)
