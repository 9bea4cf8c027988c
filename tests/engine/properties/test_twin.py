"""The engine against the simulator: equal decisions, and outputs without a cache."""

from itertools import cycle

import attrs
import pytest
from helpers.engine import CODECS, SPEC, compute, decided, digest, slot_bytes_of
from helpers.policies import POLICIES
from helpers.schedulers import SCHEDULERS
from helpers.serving import EVICTIONS, Bent, Server, ask, servers, talks
from hypothesis import given, settings

from kvcore.plugins import Plugins, resolve
from kvcore.plugins.options import parse
from kvcore.workloads import WorkloadSample
from kvcore_engine.tokens import TokenStream
from kvcore_plugins.workload import Mooncake

few = settings(max_examples=max(settings.default.max_examples // 2, 1))


def computed(server, scheduler):
    """Serve the requests of a random server on tensors."""
    return compute(
        server.requests,
        scheduler=scheduler,
        eviction=server.eviction,
        latency=Bent(reach=server.windows),
        tiers=server.tiers,
        **server.options,
    )


def expected(request, vocabulary=10_007):
    """Return the output that the sequence would have if computed without a cache."""
    stream = TokenStream(request, vocabulary, 0)
    tokens = stream.token_ids(0, request.prompt_tokens)
    for _ in range(request.output_tokens):
        tokens.append(stream.append(digest(tokens)))
    return tokens[request.prompt_tokens :]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@few
@given(server=servers())
def test_a_run_on_tensors_has_the_trace_of_the_simulator(scheduler, server):
    """A run on tensors has the simulator's trace, except for header and END."""
    run = computed(server, scheduler)
    assert decided(run.trace) == decided(server.run(scheduler).trace)


@pytest.mark.parametrize("scheduler", ["fcfs", "urgent", "planning"])
@given(server=servers())
def test_outputs_equal_those_without_a_cache(scheduler, server):
    """Outputs equal those without a cache after sharing, eviction, preemption and recompute.

    A slot that is read must have been stored since it was allocated.
    """
    result = computed(server, scheduler).result
    served = {r.id: r for r in server.requests if r.id not in server_rejects(result)}
    assert result.outputs == {name: expected(request) for name, request in served.items()}


TIERS = {
    "always": "host:memory={0},latency=0,load=always",
    "cost": "host:memory={0},latency=0,read_bandwidth=1000000000,write_bandwidth=1000000000",
    "through": "host:memory={0},latency=3e-9,write=through,load=always,eviction=fifo",
    "exclusive": "host:memory={0},write=1,keep=exclusive,load=always,latency=0",
    "two": "host:memory={0},latency=0,load=always,host:memory={1},latency=1e-8,load=always",
    "through both": (
        "host:memory={0},latency=0,write=through,load=always,"
        "host:memory={1},latency=1e-8,load=always,write=through"
    ),
    "one waits": "host:memory={0},latency=0,max_wait=0,host:memory={1},write=2,load=always",
}


def tiers_of(name, server):
    """Return the tiers of a server: a third of its pool, and below that twice its pool."""
    block = slot_bytes_of(SPEC, server.options["block_size"])
    blocks = server.options["blocks"]
    sizes = [block * max(blocks // 3, 1), block * 2 * blocks]
    return [str(tier) for tier in parse(TIERS[name].format(*sizes))]


@pytest.mark.parametrize(
    ("name", "scheduler"), [*zip(TIERS, cycle(["fcfs", "urgent", "planning"]), strict=False)]
)
@few
@given(server=servers() | talks())
def test_tiers_on_tensors_have_the_trace_of_the_simulator(name, scheduler, server):
    """Offloads, loads, drops and swaps on tensors are the simulator's, and keep K/V right."""
    tiers = tiers_of(name, server)
    server = attrs.evolve(server, tiers=tiers)
    run = computed(server, scheduler)
    size = slot_bytes_of(SPEC, server.options["block_size"])
    assert decided(run.trace) == decided(server.run(scheduler, slot_bytes=size).trace)
    assert not any(level.stats.errors for level in run.result.cache.tiers.levels)
    rejected = server_rejects(run.result)
    served = {r.id: expected(r) for r in server.requests if r.id not in rejected}
    assert run.result.outputs == served


RETENTIONS = {
    "full": "full",
    "window": "window:tokens=9,sinks=2",
    "window, rebased": "window:tokens=7,sinks=1,positions=cache",
    "h2o": "h2o:budget=9",
    "snapkv": "snapkv:budget=0.5,window=2,pool=3",
    "tova": "tova:budget=4",
    "knorm": "knorm:budget=20,recent=3",
    "expected": "expected:budget=0.25,sinks=1,queries=4,ahead=4",
    "random": "random:budget=1",
    "kvmerger": "kvmerger:budget=9,threshold=0",
    "quest": "quest:budget=48,page=48,dense_layers=0",
}
MODEL = "transformer:layers=2,hidden=8,heads=2,kv_heads=1,head_dim=4,mlp=8,vocab_size=64"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("retention", "codec"),
    [(name, "fp32") for name in RETENTIONS] + [("h2o", codec) for codec in CODECS[1:]],
)
@settings(max_examples=max(settings.default.max_examples // 8, 1))
@given(server=servers())
def test_compactions_and_codecs_have_the_trace_of_the_simulator(retention, codec, server):
    """A run with compactions or a codec has the simulator's trace.

    Compactions depend on lengths only, and a codec affects no decision.
    """
    pytest.importorskip("torch", reason="K/V lies in tensors")
    policy = RETENTIONS[retention]
    run = compute(
        server.requests,
        eviction=server.eviction,
        latency=Bent(reach=server.windows),
        retention=policy,
        generator=MODEL,
        backend="torch-cpu",
        codec=codec,
        **server.options,
    )
    assert decided(run.trace) == decided(server.run("fcfs", retention=policy).trace)


@pytest.mark.parametrize("kind", ["retention", "codec"])
def test_every_retention_policy_and_codec_is_tested(kind):
    """All built-in retention policies and codecs, except fp16 and fp64, are tested."""
    named = [*RETENTIONS.values()] if kind == "retention" else CODECS
    built_in = {i.name for i in Plugins().listing() if i.kind == kind and i.distribution}
    assert {name.split(":")[0] for name in named} == built_in - {"fp16", "fp64"}


def server_rejects(result):
    """Return the ids of requests that were never admitted."""
    return {result.log.ids[row] for row in result.log.reasons}


@pytest.fixture(scope="module")
def recorded():
    """Return 40 requests of a production trace, 64 times shorter."""
    return list(WorkloadSample(Mooncake(), limit=40, scale=64))


@pytest.mark.parametrize(
    ("eviction", "scheduler"), [*zip(EVICTIONS, cycle(SCHEDULERS), strict=False)]
)
def test_recorded_requests_have_the_trace_of_the_simulator(recorded, eviction, scheduler):
    """A run of 40 real requests on tensors has the simulator's trace, for every plugin."""
    options = {"blocks": 450, "block_size": 8, "max_tokens": 512, "rate_scale": 1e6}
    server = Server(recorded, eviction, (None,), options)
    simulated = server.run(scheduler)
    run = computed(server, scheduler)
    assert decided(run.trace) == decided(simulated.trace)
    assert simulated.of("FINISH")
    assert simulated.result.cache.tree.evicted_blocks


@pytest.mark.parametrize("generator", [MODEL, "induction:vocab_size=64"])
def test_a_model_on_tiers_has_the_trace_of_the_simulator(generator):
    """A model on tiers has the simulator's trace, and the output of a run without tiers."""
    pytest.importorskip("torch", reason="K/V lies in tensors")
    requests = [
        ask(n, 60 * n, 4 * blocks, 9, keys=[*range(n % 4, 130, 7)][:blocks])
        for n in range(16)
        for blocks in [10 + 2 * (n // 4)]
    ]
    size = slot_bytes_of(resolve("generator", generator).spec, 4, "fp64")
    tiers = [f"host:memory={n * size},latency=1e-9,load=always" for n in (45, 99)]
    options = {"blocks": 30, "block_size": 4, "max_seqs": 2}
    server = Server(requests, "lru", (None,), options, tiers)
    simulated = server.run("fcfs", slot_bytes=size)
    torch = {"generator": generator, "backend": "torch-cpu", "dtype": "fp64"}
    run = compute(requests, latency=Bent(), tiers=tiers, **options, **torch)
    assert decided(run.trace) == decided(simulated.trace)
    assert all(level.stats.loaded for level in run.result.cache.tiers.levels)
    plain = compute(requests, latency=Bent(), **options, **torch)
    assert run.result.outputs == plain.result.outputs


def test_every_policy_is_in_the_list():
    """Each eviction policy of the test helpers is tested."""
    assert set(POLICIES) <= set(EVICTIONS)
