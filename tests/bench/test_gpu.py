"""How near a GPU's memory bandwidth the paged cache comes: attention, store, copy, swap.

Shapes are those of a layer of Llama 3 8B in fp16, in blocks of 16. The measure is what a copy
on the same device moves in a second, reads and writes together, in the same run. Nothing is
promised yet: this is the baseline for kernels of our own. Skipped where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import pytest

from kvcore import Backend
from kvcore.engine import RaggedBatch, TensorLayout
from kvcore_plugins.backend import TorchCUDA

torch = pytest.importorskip("torch")

HEADS, KV_HEADS, WIDTH, BLOCK = 32, 8, 128, 16
TOKEN = 2 * KV_HEADS * WIDTH * 2
"""Bytes of a token's K and V in a layer."""

BATCHES, CONTEXTS = (1, 8, 32, 128), (1 << 10, 8 << 10, 32 << 10)
COPIED = 1 << 30
MOVED = 4096
"""Blocks that are stored, copied or swapped at once."""

RUNS, REPEATS = 9, 8


@pytest.fixture(scope="module")
def _gpu() -> None:
    """Skip, with the reason, where there is no GPU."""
    reason = TorchCUDA.unavailable()
    if reason:
        pytest.skip(reason)


def make(blocks: int) -> tuple[Backend, list[int]]:
    """Return a backend with so many blocks, and these in random order."""
    backend = TorchCUDA()
    sizes = {"layers": 1, "kv_heads": KV_HEADS, "head_dim": WIDTH, "value_dim": WIDTH}
    backend.allocate(TensorLayout(blocks=blocks, block_size=BLOCK, dtype="fp16", **sizes))
    backend.fill(0.0)
    return backend, torch.randperm(blocks).tolist()


def seconds(backend: Backend, call: Callable[[], object]) -> float:
    """Return what a call takes on the device: the median over runs of several."""
    times = []
    for _ in range(RUNS + 1):
        backend.synchronize()
        start = perf_counter()
        for _ in range(REPEATS):
            call()
        backend.synchronize()
        times.append((perf_counter() - start) / REPEATS)
    return median(times[1:])


def copy_rate(backend: Backend, *, host: bool = False) -> float:
    """Return the bytes a second that a plain copy reads and writes, or brings to the host."""
    source = backend.tensor([0]).new_zeros(COPIED, dtype=torch.uint8)
    target = torch.empty(
        COPIED, dtype=torch.uint8, device="cpu" if host else source.device, pin_memory=host
    )
    took = seconds(backend, lambda: target.copy_(source, non_blocking=True))
    return COPIED * (1 if host else 2) / took


@pytest.mark.usefixtures("_gpu")
def test_decode() -> None:
    """Print the share of a copy's bandwidth at which decode attention reads the cache."""
    rate = copy_rate(make(1)[0])
    print(f"\na copy on the device: {rate / 1e9:,.0f} GB/s\nbatch  context  GB/s  share")
    for batch in BATCHES:
        for context in CONTEXTS:
            held = context // BLOCK
            backend, order = make(batch * held)
            tables = [order[first : first + held] for first in range(0, len(order), held)]
            plan = backend.plan(RaggedBatch(tables, [context - 1] * batch, [1] * batch))
            queries = backend.tensor([0]).new_zeros(batch, HEADS, WIDTH, dtype=torch.float16)
            took = seconds(backend, lambda p=plan, q=queries, b=backend: b.attend(0, p, q))
            reached = batch * context * TOKEN / took
            print(f"{batch:5}  {context:7,}  {reached / 1e9:4,.0f}  {reached / rate:5.2f}")


@pytest.mark.usefixtures("_gpu")
def test_moving_blocks() -> None:
    """Print the like of storing, copying and swapping blocks."""
    backend, order = make(2 * MOVED)
    size = MOVED * BLOCK * TOKEN
    new = torch.zeros(MOVED * BLOCK, KV_HEADS, WIDTH, dtype=torch.float16)
    here = new.to(backend.tensor([0]).device)
    plan = backend.plan(RaggedBatch([order[:MOVED]], [0], [MOVED * BLOCK]))
    pairs = list(zip(order[:MOVED], order[MOVED:], strict=True))
    host = backend.swap_out(order[:MOVED])
    device, bus = copy_rate(backend), copy_rate(backend, host=True)
    for what, call, moved, rate in (
        ("store of K/V on the device", lambda: backend.store(0, plan, here, here), 2, device),
        ("store of K/V from the host", lambda: backend.store(0, plan, new, new), 1, bus),
        ("block copy", lambda: backend.copy_blocks(pairs), 2, device),
        ("swap out", lambda: backend.swap_out(order[:MOVED]), 1, bus),
        ("swap in", lambda: backend.swap_in(host, order[:MOVED]), 1, bus),
    ):
        reached = moved * size / seconds(backend, call)
        print(f"\n{what}: {reached / 1e9:,.0f} GB/s, {reached / rate:.2f} of a copy")
