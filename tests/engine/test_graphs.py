"""Decode steps that are captured and replayed: on a stand-in for a GPU's graphs."""

import pytest
from helpers.engine import compute
from helpers.serving import ask
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Plugins
from kvcore.engine import RaggedBatch, TensorLayout
from kvcore_engine import executor
from kvcore_engine import graphs as graphs_module
from kvcore_engine.backend import TorchCPU
from kvcore_engine.executor import attend_through
from kvcore_engine.graphs import (
    BY_BLOCK,
    BY_TORCH,
    OBSERVED,
    PROMPTS,
    StepGraphs,
    StepInputs,
)

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
pytest.importorskip("triton", reason="needs Triton: pip install 'kvcore[triton]'")

from helpers.recorded_graph import GraphedCPU, counted  # noqa: E402 - needs torch and Triton

from kvcore_engine.backend._step_plan import LayerKind, NewToken  # noqa: E402 - likewise

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
            ask(n, 40 * n, 5 + 4 * (n % 2), 5 + 2 * n, keys=[*range(1 + n % 2)])
            for n in range(3)
        ]
    options = {"blocks": 60, "max_tokens": 16, "max_seqs": 3} | options
    generator = Plugins().build("generator", generator)
    return compute(requests, generator=generator, backend=backend, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"generator": f"{SIZE},window=6"},
        {"generator": f"{SIZE},temperature=0.7"},
        {"blocks": 9},
        {"codec": "int8"},
    ],
    ids=["greedy", "window", "sampled", "preempting", "int8"],
)
def test_replayed_steps_generate_the_same_tokens(graphs, options):
    """Tokens are the same with and without graphs, whatever sequences come, grow and go."""
    codec = options.get("codec")
    options = options | {"codec": codec and Plugins().build("codec", codec)}
    replayed = served(GraphedCPU(attention="triton"), **options)
    launched = served(TorchCPU(attention="sdpa"), **options)
    assert replayed.result.outputs == launched.result.outputs
    assert replayed.result.cache.stats.hit_blocks > 0
    (made, _) = graphs
    assert made.replays > 5
    assert {*made.launched} == {PROMPTS}


def stepping(generator=SIZE, backend=None, codec=None):
    """Return the graphs of a generator on a backend with a pool, and a function that steps.

    It runs a step of sequences in the blocks from 0 on and from 20 on, and so on.
    """
    generator = Plugins().build("generator", generator)
    backend = GraphedCPU(attention="triton") if backend is None else backend
    generator.load(backend, "fp32")
    codec = codec and Plugins().build("codec", codec)
    layout = TensorLayout(
        blocks=60, block_size=4, layers=2, kv_heads=2, head_dim=8, value_dim=8, codec=codec
    )
    backend.allocate(layout)
    backend.fill(0.0)
    graphs = StepGraphs.of(generator, backend)

    def through(plan):
        return attend_through(plan, backend.store_rotated, backend.attend)

    def step(*contexts, attend=None, new=1):
        """Run a step of sequences with `contexts` tokens; return the next tokens."""
        count, rows = len(contexts), len(contexts) * new
        batch = RaggedBatch(
            [[*range(20 * n, 20 * n + 20)] for n in range(count)], contexts, [new] * count,
            token_ids=[*range(rows)], positions=[c + i for c in contexts for i in range(new)],
            output_indices=[0] * count, seeds=[0] * count,
        )  # fmt: skip
        return graphs.forward(batch, attend or backend.attend, through)

    return graphs, step


def test_each_batch_size_has_a_graph():
    """Steps of one and of two sequences are replayed from graphs of their own."""
    graphs, step = stepping()
    for contexts in ([8], [9], [8, 30], [10], [9, 31], [11]):
        step(*contexts)
    # The first step of all, and the first of each size, are launched.
    assert graphs.replays == 3
    assert len(graphs._shapes) == 2


def test_tables_that_outgrow_their_rows_have_a_new_graph():
    """A table of more blocks than its row holds needs a graph of a larger row."""
    graphs, step = stepping()
    for context in (12, 13, 14, 15, 16, 17, 18):
        step(context)
    assert graphs.replays == 2 + 2
    assert len(graphs._shapes) == 2


def test_a_step_launches_no_more_kernels():
    """The graph of a step of two layers has 112 launches, which plan it, too."""
    graphs, step = stepping()
    for context in (8, 9, 10):
        step(context, context)
    (inputs,) = graphs._shapes.values()
    assert len(inputs.step.graph.again) <= 112


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_host_does_as_much_for_any_number_of_sequences(sequences):
    """Beside the graph the host compares tables, sends one tensor, and draws tokens."""
    graphs, step = stepping()
    for context in (8, 9, 10):
        step(*[context] * sequences)
    (inputs,) = graphs._shapes.values()
    inputs.step.graph.again.clear()
    with counted() as launches:
        step(*[11] * sequences)
    assert launches.total() <= 15
    assert launches["argmax"] == 1


@pytest.mark.parametrize(
    ("options", "step_options", "reason"),
    [
        ({}, {"new": 3}, PROMPTS),
        ({}, {"attend": len}, OBSERVED),
        ({"backend": GraphedCPU()}, {}, BY_TORCH),
        ({"backend": GraphedCPU(), "codec": "kivi:bits=4"}, {}, BY_BLOCK),
    ],
    ids=["prompt", "observed", "torch", "blocks"],
)
def test_a_step_that_cannot_be_replayed_has_a_reason(options, step_options, reason):
    """A step that no graph covers is launched, and the reason is counted."""
    graphs, step = stepping(**options)
    for context in (8, 9, 10):
        step(context, **step_options)
    assert not graphs.replays
    assert graphs.launched[reason] >= 2


def test_a_step_that_cannot_be_captured_is_launched(monkeypatch, caplog):
    """If the host reads a number while a step is captured, no more steps are captured."""
    graphs, step = stepping()
    logits = graphs._generator.logits

    def reading(batch, attend):
        out = logits(batch, attend)
        out[0, 0].item()
        return out

    monkeypatch.setattr(graphs._generator, "logits", reading)
    tokens = [step(context) for context in (8, 9, 10, 11)]
    assert not graphs.replays
    reason = "a step could not be captured: the host reads a number: _local_scalar_dense"
    assert graphs.launched == {reason: 2}
    assert reason in caplog.text
    monkeypatch.undo()
    _, step = stepping(backend=GraphedCPU(attention="triton"))
    assert [step(context) for context in (8, 9, 10, 11)] == tokens


def test_a_generator_that_is_not_made_for_graphs_is_launched(caplog):
    """A generator that does not say that its steps can be captured has no graphs."""
    generator = Plugins().build("generator", "sincos:layers=2,heads=4,kv_heads=2,head_dim=8")
    assert StepGraphs.of(generator, GraphedCPU()) is None
    assert "generator sincos is launched kernel by kernel" in caplog.text


def test_backends_have_no_graphs_unless_asked():
    """Graphs of the CUDA backend are off by default."""
    assert StepGraphs.of(Plugins().build("generator", SIZE), TorchCPU()) is None
    assert not Plugins().get("backend", "torch-cuda")().graphs


def test_the_oldest_graph_makes_room(monkeypatch):
    """Of more than `MAX_GRAPHS` graphs the one that was not replayed for longest is freed."""
    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", 1)
    graphs, step = stepping()
    for contexts in ([8], [9], [10], [8, 30], [9, 31]):
        step(*contexts)
    assert [*graphs._shapes] == [(2, 8)]


@pytest.mark.parametrize(("changed", "uploads"), [(0, 0), (2, 0), (3, 1)])
def test_few_changes_of_tables_are_sent_with_the_step(changed, uploads):
    """A changed block id for each sequence at most is sent by its index, more as all tables."""
    uploaded, backend = [], GraphedCPU(attention="triton")
    graphs, _ = stepping(backend=backend)
    inputs = StepInputs.make(backend, 2, 8)
    ids = torch.arange(16, dtype=torch.int32)
    batch = RaggedBatch(contexts=[20, 21], token_ids=[1, 2], positions=[20, 21])

    def send():
        inputs.send(batch, ids, lambda tensor: uploaded.append(tensor) or tensor)
        graphs._planned(batch, inputs, type)
        return inputs.tables[:-1].flatten()

    assert send().equal(ids)
    uploaded.clear()
    ids = ids.clone()
    ids[:changed] = 40
    address = inputs.tables.data_ptr()
    assert send().equal(ids)
    assert inputs.tables.data_ptr() == address
    assert len(uploaded) == uploads


@given(st.data())
def test_contexts_are_divided_alike_on_the_device(data):
    """A plan in shapes of a graph has the chunks of that of the host, and then empty ones."""
    draw = data.draw
    count = draw(st.integers(1, 6))
    top = draw(st.sampled_from([40, 400, 30_000]))
    contexts = draw(st.lists(st.integers(0, top), min_size=count, max_size=count))
    window = draw(st.none() | st.integers(1, 500))
    kind = LayerKind(2, window, draw(st.sampled_from([0, 0, 4, 70])))
    layout = TensorLayout(
        blocks=1, block_size=draw(st.sampled_from([1, 16, 128])), layers=1,
        kv_heads=draw(st.sampled_from([1, 8])), head_dim=16, value_dim=16,
    )  # fmt: skip
    backend = TorchCPU(attention="triton")
    backend.allocate(layout)
    kernel = backend._kernel._divider.kernel
    kernel.programs = draw(st.sampled_from([1, 8, 66]))
    width = top // layout.block_size + 1
    tables = [torch.zeros(width, dtype=torch.int64)] * count
    new = [NewToken(index, index, context) for index, context in enumerate(contexts)]
    host = kernel.plan(new, tables, kind)
    zeros = torch.zeros(count, width, dtype=torch.int32)
    plan = kernel.plan_decode(zeros, torch.tensor(contexts), kind)
    entries = len(host.work)
    assert plan.work[:entries].equal(host.work)
    assert (plan.work[entries:, 2] == plan.work[entries:, 3]).all()
    divided = plan.splits[:, 1] < plan.splits[:, 2]
    assert plan.splits[divided].equal(host.splits)
    assert host.slots <= plan.slots
