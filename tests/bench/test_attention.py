"""The cost of paging on a CPU: attention and store against torch on contiguous tensors.

Shapes are those of a layer of Llama 3.1 8B. The baseline of attention is torch's function on a
contiguous cache, called as well as it can be: the query heads that share a K/V head are rows of
one matrix. The plain call, with `enable_gqa`, is printed beside it. Bounds are asserted with
one thread only: with more, the result depends on other load of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

import pytest
from bench.harness import medians

from kvcore import Backend, Codec, Plugins
from kvcore.engine import RaggedBatch, TensorLayout
from kvcore_engine.backend import TorchCPU

torch = pytest.importorskip("torch")

RUNS = 15
HEADS, KV_HEADS, WIDTH, BLOCK = 32, 8, 128, 16
SEQUENCES, CONTEXT = 8, 2048
STORED = 8192
PROMISED = 0.8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """Return a measure of `call`, in seconds."""

    def measure() -> float:
        start = perf_counter()
        call()
        return perf_counter() - start

    return measure


def backend(
    tokens: int, dtype: str, block: int = BLOCK, codec: Codec | None = None
) -> tuple[Backend, list[int]]:
    """Return a backend with blocks for `tokens` tokens, and its blocks in random order."""
    blocks = tokens // block
    made = TorchCPU()
    made.allocate(
        TensorLayout(
            blocks=blocks,
            block_size=block,
            layers=1,
            kv_heads=KV_HEADS,
            head_dim=WIDTH,
            value_dim=WIDTH,
            dtype=dtype,
            codec=codec,
        )
    )
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
    return made, order.tolist()


@pytest.fixture(params=[1, None], ids=["one thread", "all threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Limit torch to the number of threads that the parameter gives."""
    usual = torch.get_num_threads()
    torch.set_num_threads(request.param or usual)
    yield
    torch.set_num_threads(usual)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_attention_through_block_tables(dtype: str) -> None:
    """Attention through block tables is nearly as fast as over contiguous K/V."""
    paged, order = backend(SEQUENCES * CONTEXT, dtype)
    held = CONTEXT // BLOCK
    tables = [order[first : first + held] for first in range(0, len(order), held)]
    shape = SEQUENCES, KV_HEADS, CONTEXT, WIDTH
    keys, values = (torch.randn(shape).to(DTYPES[dtype]) for _ in range(2))
    rows = [x.transpose(1, 2).reshape(-1, KV_HEADS, WIDTH) for x in (keys, values)]
    paged.store(
        0, paged.plan(RaggedBatch(tables, [0] * SEQUENCES, [CONTEXT] * SEQUENCES)), *rows
    )
    queries = torch.randn(SEQUENCES, HEADS, WIDTH).to(DTYPES[dtype])
    packed = queries.view(SEQUENCES, KV_HEADS, HEADS // KV_HEADS, WIDTH)
    plan = paged.plan(RaggedBatch(tables, [CONTEXT - 1] * SEQUENCES, [1] * SEQUENCES))
    dense = torch.nn.functional.scaled_dot_product_attention

    found = paged.attend(0, plan, queries).view_as(packed)
    assert (found - dense(packed, keys, values)).abs().max() < 0.01

    ours, best, plain = medians(
        RUNS,
        timed(lambda: paged.attend(0, plan, queries)),
        timed(lambda: dense(packed, keys, values)),
        timed(lambda: dense(queries[:, :, None], keys, values, enable_gqa=True)),
    )
    print(
        f"\ndecode, {dtype}, {SEQUENCES} x {CONTEXT:,} tokens, {torch.get_num_threads()} "
        f"threads, in ms: paged {ours * 1e3:.1f}, contiguous {best * 1e3:.1f} (plain call "
        f"{plain * 1e3:.1f}): {best / ours:.2f} of its speed ({plain / ours:.2f})"
    )
    if torch.get_num_threads() == 1:
        assert best / ours >= PROMISED


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("spec", ["int8", "fp8-e4m3", "int4", "kivi:bits=4", "kivi:bits=2"])
def test_attention_over_encoded_blocks(spec: str) -> None:
    """Attention over encoded blocks has a bounded error; its time is printed."""
    block = 128
    codec = Plugins().build("codec", spec)
    paged, order = backend(SEQUENCES * CONTEXT, "fp32", block, codec)
    held = CONTEXT // block
    tables = [order[first : first + held] for first in range(0, len(order), held)]
    keys, values = (torch.randn(SEQUENCES, KV_HEADS, CONTEXT, WIDTH) for _ in range(2))
    rows = [x.transpose(1, 2).reshape(-1, KV_HEADS, WIDTH) for x in (keys, values)]
    filled = paged.plan(RaggedBatch(tables, [0] * SEQUENCES, [CONTEXT] * SEQUENCES))
    paged.store(0, filled, *rows)
    queries = torch.randn(SEQUENCES, HEADS, WIDTH)
    packed = queries.view(SEQUENCES, KV_HEADS, HEADS // KV_HEADS, WIDTH)
    plan = paged.plan(RaggedBatch(tables, [CONTEXT - 1] * SEQUENCES, [1] * SEQUENCES))
    dense = torch.nn.functional.scaled_dot_product_attention

    found, exact = paged.attend(0, plan, queries).view_as(packed), dense(packed, keys, values)
    error = float((found - exact).norm() / exact.norm())
    assert error < {"kivi:bits=2": 1.0}.get(spec, 0.2)

    ours, best = medians(
        RUNS,
        timed(lambda: paged.attend(0, plan, queries)),
        timed(lambda: dense(packed, keys, values)),
    )
    share = paged.layout.bytes / (keys.nbytes + values.nbytes)
    print(
        f"\ndecode, {spec}, {SEQUENCES} x {CONTEXT:,} tokens, {torch.get_num_threads()} "
        f"threads, in ms: paged {ours * 1e3:.1f}, contiguous fp32 {best * 1e3:.1f}: "
        f"{ours / best:.2f} of its time, for {share:.0%} of its bytes, {error:.1%} off"
    )


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_store_scatters_kv_unchanged(dtype: str) -> None:
    """K/V scattered into blocks is read back unchanged; the time of a store is printed."""
    paged, order = backend(STORED, dtype)
    keys, values = (torch.randn(STORED, KV_HEADS, WIDTH).to(DTYPES[dtype]) for _ in range(2))
    plan = paged.plan(RaggedBatch([order], [0], [STORED]))
    targets = torch.empty_like(keys), torch.empty_like(values)

    def copy() -> None:
        targets[0].copy_(keys)
        targets[1].copy_(values)

    ours, plain = medians(RUNS, timed(lambda: paged.store(0, plan, keys, values)), timed(copy))
    print(
        f"\nstore, {dtype}, {STORED:,} tokens, {torch.get_num_threads()} threads, in ms: "
        f"{ours * 1e3:.2f}, a copy of the same bytes {plain * 1e3:.2f}: "
        f"{plain / ours:.2f} of its speed"
    )
    stored = paged.read(0, order, STORED)
    assert all(map(torch.equal, stored, (keys, values)))
