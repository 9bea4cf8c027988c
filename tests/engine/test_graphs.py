"""Decode steps that are captured and replayed: on a stand-in for a GPU's graphs."""

import pytest
from helpers.engine import compute
from helpers.serving import ask

from kvcore import Plugins
from kvcore.engine import RaggedBatch, TensorLayout
from kvcore_engine import executor
from kvcore_engine.backend import TorchCPU
from kvcore_engine.executor import attend_through
from kvcore_engine.graphs import (
    BY_BLOCK,
    BY_TORCH,
    FEW,
    MAX_GRAPHS,
    OBSERVED,
    PROMPTS,
    KeptBuffers,
    StepGraphs,
)

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
pytest.importorskip("triton", reason="needs Triton: pip install 'kvcore[triton]'")

from helpers.recorded_graph import GraphedCPU, counted  # noqa: E402 - needs torch and Triton

SIZE = "transformer:layers=2,hidden=32,heads=4,kv_heads=2,head_dim=8,vocab_size=97"


@pytest.fixture
def graphs(monkeypatch):
    """The `StepGraphs` of the engines of a test."""
    made = []
    of = StepGraphs.of

    def kept(generator, backend):
        made.append(of(generator, backend))
        return made[-1]

    monkeypatch.setattr(executor.StepGraphs, "of", kept)
    return made


def served(backend, *, requests=None, generator=SIZE, **options):
    """Return the run of requests that come and go, share prefixes, and grow by blocks."""
    if requests is None:
        requests = [
            ask(n, 40 * n, 5 + 4 * (n % 2), 9 + 5 * (n % 3), keys=[*range(1 + n % 2)])
            for n in range(4)
        ]
    options = {"blocks": 60, "max_tokens": 16, "max_seqs": 4} | options
    generator = Plugins().build("generator", generator)
    return compute(requests, generator=generator, backend=backend, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"generator": f"{SIZE},window=6"},
        {"generator": f"{SIZE},temperature=0.7"},
        {"blocks": 12},
        {"codec": "int8"},
    ],
    ids=["greedy", "window", "sampled", "preempting", "int8"],
)
def test_replayed_steps_generate_the_same_tokens(graphs, options):
    """Tokens are the same with and without graphs, whatever sequences come, grow and go."""
    codec = options.get("codec")
    options = options | {"codec": codec and Plugins().build("codec", codec)}
    replayed = served(GraphedCPU(attention="triton"), **options)
    launched = served(TorchCPU(attention="triton"), **options)
    assert replayed.result.outputs == launched.result.outputs
    assert replayed.result.cache.stats.hit_blocks > 0
    (made, _) = graphs
    assert made.replays > 10
    assert {*made.launched} == {PROMPTS}


def test_each_batch_size_has_graphs_of_its_own(graphs):
    """Steps of one, two and three sequences are replayed from different graphs."""
    sizes = set()
    refusal = StepGraphs._replayed

    def watched(self, shape, run):
        sizes.add(shape[0][-1][1])
        return refusal(self, shape, run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraphs, "_replayed", watched)
        served(GraphedCPU(attention="triton"))
    assert {(1,), (2,), (3,)} <= sizes


def test_a_replayed_step_launches_uploads_and_a_graph():
    """The host launches each kernel of a step once; then it sends inputs, and a graph."""
    generator = Plugins().build("generator", SIZE)
    backend = GraphedCPU(attention="triton")
    generator.load(backend, "fp32")
    layout = TensorLayout(
        blocks=40, block_size=4, layers=2, kv_heads=2, head_dim=8, value_dim=8
    )
    backend.allocate(layout)
    backend.fill(0.0)
    made, launches = StepGraphs.of(generator, backend), []
    for context in range(8, 12):
        batch = RaggedBatch(
            [[*range(20)], [*range(20, 40)]], [context] * 2, [1] * 2,
            token_ids=[context, 1], positions=[context] * 2, output_indices=[0, 0], seeds=[0, 0],
        )  # fmt: skip
        through = lambda plan: attend_through(plan, backend.store_rotated, backend.attend)  # noqa: E731
        with counted() as counts:
            made.forward(batch, backend.attend, through)
        launches.append(counts)
    assert made.replays == 2
    eager = launches[1]
    raise AssertionError(str(launches))
    assert sum(eager.values()) <= 140
