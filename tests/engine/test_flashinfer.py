"""Attention by FlashInfer, with a fake that computes what FlashInfer documents."""

from itertools import pairwise

import pytest

from kvcore import InputError
from kvcore.engine import RaggedBatch, TensorLayout
from kvcore.testing.dense import attention
from kvcore_engine.backend import TorchCPU

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")

from kvcore_engine.backend import _flashinfer  # noqa: E402 - needs torch
from kvcore_engine.backend._step_plan import LayerKind  # noqa: E402 - needs torch

LENGTHS = [1, 16, 17, 70]
KV_HEADS, GROUP, WIDTH, BLOCK = 2, 4, 64, 16


class FakeWrapper:
    """A fake of FlashInfer's wrapper for decode attention over pages."""

    plans = 0

    def __init__(self, workspace, layout, *, use_tensor_cores):
        """Check the arguments."""
        assert workspace.dtype == torch.uint8
        assert layout == "HND"
        assert use_tensor_cores

    def plan(self, starts, pages, last, heads, kv_heads, width, page, **options):
        """Check and store the plan."""
        assert (heads, kv_heads, width, page) == (KV_HEADS * GROUP, KV_HEADS, WIDTH, BLOCK)
        assert {starts.dtype, pages.dtype, last.dtype} == {torch.int32}
        self.table = starts.tolist(), pages.tolist(), last.tolist()
        self.options = options
        FakeWrapper.plans += 1

    def run(self, queries, cache):
        """Return the output of attention, `[sequences, heads, width]`."""
        starts, pages, last = self.table
        scale, left = self.options["sm_scale"], self.options["window_left"]
        found = []
        for row, (first, end) in enumerate(pairwise(starts)):
            length = (end - first - 1) * BLOCK + last[row]
            begin = 0 if left < 0 else max(0, length - 1 - left)
            keys, values = (
                half[pages[first:end]].transpose(1, 2).flatten(0, 1)[begin:length]
                for half in cache
            )
            found.append(attention(queries[row : row + 1], keys, values, scale))
        return torch.cat(found)


@pytest.fixture
def step(monkeypatch):
    """Return a backend with FlashInfer, one without, a decode step, and queries."""
    monkeypatch.setattr(_flashinfer, "WORKSPACE_BYTES", 16)
    FakeWrapper.plans = 0
    made = torch.Generator().manual_seed(3)
    held = [-(-length // BLOCK) for length in LENGTHS]
    order = torch.randperm(sum(held), generator=made).tolist()
    tables = [[order.pop() for _ in range(count)] for count in held]
    sizes = {"kv_heads": KV_HEADS, "head_dim": WIDTH, "value_dim": WIDTH, "layers": 2}
    layout = TensorLayout(blocks=sum(held), block_size=BLOCK, dtype="fp16", **sizes)
    rows = [torch.randn(sum(LENGTHS), KV_HEADS, WIDTH, generator=made).half() for _ in "kv"]
    backends = [TorchCPU(), TorchCPU()]
    for backend in backends:
        backend.allocate(layout)
        filled = backend.plan(RaggedBatch(tables, [0] * len(LENGTHS), LENGTHS))
        for layer in range(2):
            backend.store(layer, filled, *rows)
    peer = _flashinfer.FlashInferDecode(backends[0]._pool, FakeWrapper)
    divider = backends[0]._kernel._divider
    object.__setattr__(divider, "kernel", peer)
    batch = RaggedBatch(tables, [length - 1 for length in LENGTHS], [1] * len(LENGTHS))
    queries = torch.randn(len(LENGTHS), KV_HEADS * GROUP, WIDTH, generator=made).half()
    return *backends, batch, queries


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"scale": 0.3}], ids=str)
def test_outputs_equal_those_of_torch(step, options):
    """Outputs equal those of torch, with windows and scales, and a step is planned once."""
    peer, plain, batch, queries = step
    plan = peer.plan(batch)
    for layer in range(2):
        found = peer.attend(layer, plan, queries, **options)
        expected = plain.attend(layer, plain.plan(batch), queries, **options)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    assert FakeWrapper.plans == 1
    assert not peer.fallbacks


def test_alternating_steps_are_planned_again(step):
    """A step is planned again if another step was planned since."""
    peer, plain, batch, queries = step
    one, other = RaggedBatch(batch.block_tables[3:], [69], [1]), batch
    plans = [peer.plan(each) for each in (one, other)]
    for number in (0, 1, 0):
        asked = queries[: len((one, other)[number].lengths)]
        found = peer.attend(0, plans[number], asked)
        expected = plain.attend(0, plain.plan((one, other)[number]), asked)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    assert FakeWrapper.plans == 3


def test_sinks_and_weights_are_computed_by_torch(step):
    """Sinks and sums of weights are computed by torch, and `fallbacks` has the reasons."""
    peer, plain, batch, queries = step
    found = peer.attend(0, peer.plan(batch), queries, window=20, sinks=4)
    expected = plain.attend(0, plain.plan(batch), queries, window=20, sinks=4)
    assert torch.equal(found, expected)
    _, sums = peer.attend_weighed(0, peer.plan(batch), queries)
    assert [each.shape[1] for each in sums] == LENGTHS
    assert peer.fallbacks == (
        "FlashInfer's windows have no sinks",
        "FlashInfer does not return attention weights",
    )


def test_unsupported_head_groups_are_refused(step):
    """Groups of query heads for which FlashInfer is not built are refused."""
    kernel = step[0]._kernel._divider.kernel
    assert "7 query heads" in kernel.refusal(LayerKind(7, None, 0))
    assert kernel.refusal(LayerKind(8, None, 0)) is None


def test_flashinfer_without_its_package_or_a_gpu_is_refused():
    """attention=flashinfer is refused without the package or a GPU, with what to do."""
    layout = TensorLayout(
        blocks=2, block_size=16, layers=1, kv_heads=1, head_dim=64, value_dim=64, dtype="fp16"
    )
    match = r"attention=flashinfer: FlashInfer (is not installed: pip|needs a GPU).*=sdpa"
    with pytest.raises(InputError, match=match):
        TorchCPU(attention="flashinfer").allocate(layout)
