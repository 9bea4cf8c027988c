"""The host's part of a decode step that is replayed: on a stand-in whose graphs do nothing.

It prints microseconds: of the batch that is given, the comparison of tables, the copy of what
is sent, and the tokens that are drawn from logits of zeros.
"""

from __future__ import annotations

from array import array
from statistics import median
from time import perf_counter

import pytest

from kvcore import Plugins
from kvcore.engine import RaggedBatch, TensorLayout, attend_through
from kvcore_engine.graphs import StepGraphs

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers.recorded_graph import GraphedCPU, counted  # noqa: E402 - needs torch and Triton

BLOCK, VOCABULARY = 16, 97
MODEL = f"transformer:layers=1,hidden=32,heads=4,kv_heads=2,vocab_size={VOCABULARY}"


@pytest.mark.parametrize(
    ("sequences", "context"), [(1, 8192), (32, 32_768), (256, 1024)], ids=str
)
def test_the_host_does_as_much_for_any_step(sequences: int, context: int) -> None:
    """The host's operations of torch are as many for any number of sequences and blocks."""
    generator, backend = Plugins().build("generator", MODEL), GraphedCPU(attention="triton")
    generator.load(backend, "fp32")
    width = context // BLOCK + 8
    backend.allocate(
        TensorLayout(
            blocks=sequences * width, block_size=BLOCK, layers=1, kv_heads=2, head_dim=16,
            value_dim=16,
        )
    )  # fmt: skip
    graphs = StepGraphs.of(generator, backend)
    assert graphs is not None
    graphs._recordable = True
    logits = torch.zeros(sequences, VOCABULARY)
    generator.logits = lambda *_: logits
    order = array("i", torch.randperm(sequences * width).tolist())
    tables = [order[first * width : (first + 1) * width] for first in range(sequences)]

    def step(position: int) -> float:
        """Run a step; return its seconds."""
        batch = RaggedBatch(
            [table[: position // BLOCK + 1] for table in tables],
            [position] * sequences, [1] * sequences, token_ids=[0] * sequences,
            positions=[position] * sequences, output_indices=[0] * sequences,
            seeds=[0] * sequences,
        )  # fmt: skip
        begun = perf_counter()
        graphs.forward(batch, backend.attend, lambda plan: attend_through(plan, len, len))
        return perf_counter() - begun

    for position in (context, context + 1):
        step(position)
    for inputs in graphs._shapes.values():
        inputs.step.graph.again.clear()
    seconds = [step(position) for position in range(context + 2, context + 100)]
    with counted() as launches:
        step(context + 100)
    print(f"{sequences} x {context:,}: {1e6 * median(seconds):,.0f} us")
    assert launches.total() <= 15
