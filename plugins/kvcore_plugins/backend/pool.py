"""The blocks of a pool as one torch tensor, and the views that the operations work on."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import lcm
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from kvcore.engine import TensorLayout

Upload: TypeAlias = Callable[[Tensor], Tensor]


DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def allocated(numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory that nobody has touched. On Linux the host's is asked for in huge pages.

    Blocks lie anywhere, and looking up a small page for each takes an eighth of attention.
    """
    if sys.platform != "linux" or device.type != "cpu":
        return torch.empty(numbers, dtype=dtype, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, numbers * dtype.itemsize, flags=private)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


@attrs.frozen(eq=False)
class Part:
    """K or V of one layer: three views of the same memory.

    Attributes:
        blocks: `[blocks, kv_heads, block_size, width]`.
        runs: a row for what a block holds for a head, `[rows, block_size * width]`.
        tokens: a row for what a token has for a head, `[rows, width]`.
        step: rows of `runs` from one block to the next; head h of block b is `b * step + h`.
    """

    blocks: Tensor
    runs: Tensor
    tokens: Tensor
    step: int

    @classmethod
    def view(
        cls, flat: Tensor, offset: int, stride: int, layout: TensorLayout, width: int
    ) -> Part:
        """Return the views of the numbers from `offset`, a block every `stride` numbers."""
        blocks, heads, size = layout.blocks, layout.kv_heads, layout.block_size
        run = size * width
        step = stride // run
        rows = (blocks - 1) * step + heads
        return cls(
            flat.as_strided((blocks, heads, size, width), (stride, run, width, 1), offset),
            flat.as_strided((rows, run), (run, 1), offset),
            flat.as_strided((rows * size, width), (width, 1), offset),
            step,
        )


class Pool:
    """All blocks of all layers: one allocation.

    Apart, K of a layer is a tensor by itself, and so is V. Together, a block is one run of
    memory: K and V of the first layer, of the second, and so on. Either way the rows of
    `Part.runs` are equally far apart, so that one `index_select` gathers all heads. Where
    keys and values differ in width, together, a block is rounded up for that.

    Attributes:
        layout: what was asked for.
        upload: returns a host tensor on the device.
        keys, values: a `Part` a layer.
        runs: the memory as matrices with a row a block, `[blocks, numbers]`.
        bytes: what is allocated.
    """

    def __init__(self, layout: TensorLayout, device: torch.device, upload: Upload) -> None:
        """Allocate without touching the memory; `upload` brings indices to the device.

        Raises:
            RuntimeError, OSError, OverflowError: there is not enough of it.
        """
        blocks, layers = layout.blocks, layout.layers
        key = layout.kv_heads * layout.block_size * layout.head_dim
        value = layout.kv_heads * layout.block_size * layout.value_dim
        if layout.together:
            unit = layout.block_size * lcm(layout.head_dim, layout.value_dim)
            stride = -(-layers * (key + value) // unit) * unit
            key_stride = value_stride = stride
            offsets = [layer * (key + value) for layer in range(layers)]
            shift = key
        else:
            stride = layers * (key + value)
            key_stride, value_stride = key, value
            offsets = [layer * blocks * (key + value) for layer in range(layers)]
            shift = blocks * key
        flat = allocated(blocks * stride, DTYPES[layout.dtype], device)
        self.layout = layout
        self.upload = upload
        self.bytes = flat.nbytes
        self.keys = [
            Part.view(flat, offset, key_stride, layout, layout.head_dim) for offset in offsets
        ]
        self.values = [
            Part.view(flat, offset + shift, value_stride, layout, layout.value_dim)
            for offset in offsets
        ]
        if layout.together:
            self.runs = [flat.view(blocks, stride)]
        else:
            parts = zip(self.keys, self.values, strict=True)
            self.runs = [part.blocks.flatten(1) for pair in parts for part in pair]

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self.runs[0].device

    @property
    def dtype(self) -> torch.dtype:
        """What their numbers are."""
        return self.runs[0].dtype

    def ids(self, blocks: Sequence[int]) -> Tensor:
        """Return block ids as an index on the device."""
        return self.upload(torch.tensor(list(blocks), dtype=torch.int64))

    def read(self, layer: int, table: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
        """Return copies of K and V of the first `tokens` tokens of a block table."""
        ids = self.ids(table)
        keys, values = (
            part.blocks.index_select(0, ids).transpose(1, 2).flatten(0, 1)[:tokens]
            for part in (self.keys[layer], self.values[layer])
        )
        return keys, values

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks; all are read before one is written."""
        both = list(pairs)
        if not both:
            return
        sources = self.ids([source for source, _ in both])
        targets = self.ids([target for _, target in both])
        for run in self.runs:
            run.index_copy_(0, targets, run.index_select(0, sources))

    def take(self, blocks: Sequence[int]) -> Tensor:
        """Return copies of blocks, `[len(blocks), numbers of a block in all layers]`."""
        ids = self.ids(blocks)
        return torch.cat([run.index_select(0, ids) for run in self.runs], 1)

    def put(self, data: Tensor, blocks: Sequence[int]) -> None:
        """Write what `take` returned."""
        ids = self.ids(blocks)
        widths = [run.shape[1] for run in self.runs]
        for run, piece in zip(self.runs, torch.split(data, widths, 1), strict=True):
            run.index_copy_(0, ids, piece)

    def fill(self, value: float, blocks: Sequence[int] | None) -> None:
        """Set all numbers of `blocks`, or of all blocks, to `value`."""
        ids = None if blocks is None else self.ids(blocks)
        for run in self.runs:
            if ids is None:
                run.fill_(value)
            else:
                run.index_fill_(0, ids, value)
