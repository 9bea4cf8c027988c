"""Kernels that move whole rows: between blocks of a pool, and between blocks and a stage.

A pool is some matrices with a row for each block. All of them are handled in one launch, by a
table of where each begins. Needs Triton.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,no-untyped-call"
# ruff: noqa: ANN001 - Triton takes annotations for types of its own

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
import triton
from torch import Tensor
from triton import language as tl

CHUNK_BYTES = 8192
"""Bytes of a row that a program moves."""

WARPS = 4

WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""Word that is moved at a time, by the bytes to which rows are aligned."""


@triton.jit
def _move(
    matrices,
    stage,
    sources,
    targets,
    stage_words,
    word: tl.constexpr,
    pair: tl.constexpr,
    chunk: tl.constexpr,
    from_stage: tl.constexpr,
    to_stage: tl.constexpr,
) -> None:
    """Move a piece of a row of a matrix.

    A matrix is four numbers: its address, and in words the width of a row, the distance of two
    rows, and the place of its rows in a row of the stage. Rows are aligned to
    `pair` words, so that a thread moves 16 bytes at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    entry = matrices + tl.program_id(2) * 4
    width = tl.multiple_of(tl.load(entry + 1), pair)
    begin = tl.program_id(1) * chunk
    if begin < width:
        offset = begin + tl.arange(0, chunk)
        inside = offset < width
        base = tl.load(entry).to(tl.pointer_type(word))
        stride = tl.load(entry + 2)
        column = row * stage_words + tl.load(entry + 3)
        if from_stage:
            read = stage + tl.multiple_of(column, pair)
        else:
            skipped = tl.load(sources + row).to(tl.int64) * stride
            read = tl.multiple_of(base, 8 * pair) + tl.multiple_of(skipped, pair)
        if to_stage:
            written = stage + tl.multiple_of(column, pair)
        else:
            skipped = tl.load(targets + row).to(tl.int64) * stride
            written = tl.multiple_of(base, 8 * pair) + tl.multiple_of(skipped, pair)
        tl.store(written + offset, tl.load(read + offset, mask=inside), mask=inside)


class RowMover:
    """Moves rows of matrices of one device, all of them at once.

    Attributes:
        bytes: bytes of a row of the stage: a row of each matrix, one after the other.
    """

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        """Look at the matrices: numbers of any dtype, `[rows, width]`, each row contiguous."""
        rows = [(matrix, matrix.shape[1] * matrix.itemsize) for matrix in matrices]
        strides = [matrix.stride(0) * matrix.itemsize for matrix in matrices]
        self.bytes = sum(width for _, width in rows)
        unit = gcd(16, *(width for _, width in rows), *strides)
        unit = gcd(unit, *(matrix.data_ptr() for matrix in matrices))
        self._word, self._pair = WORDS[unit], 2 if unit == 16 else 1  # noqa: PLR2004
        size = unit // self._pair
        table, column = [], 0
        for (matrix, width), stride in zip(rows, strides, strict=True):
            table.append([matrix.data_ptr(), width // size, stride // size, column // size])
            column += width
        self._device = matrices[0].device
        self._table = torch.tensor(table, dtype=torch.int64).to(self._device)
        self._chunk = CHUNK_BYTES // size
        longest = max(width for _, width in rows) // size
        self._grid = -(-longest // self._chunk), len(rows)
        self._stage_words = self.bytes // size

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows in any order: no row that is written is read."""
        self._launch(None, sources, targets)

    def gather(self, sources: Tensor) -> Tensor:
        """Return rows as bytes, `[rows, bytes]`."""
        shape = len(sources), self.bytes
        stage = torch.empty(shape, dtype=torch.uint8, device=self._device)
        self._launch(stage, sources, None)
        return stage

    def scatter(self, stage: Tensor, targets: Tensor) -> None:
        """Write rows that `gather` returned."""
        self._launch(stage, None, targets)

    def _launch(
        self, stage: Tensor | None, sources: Tensor | None, targets: Tensor | None
    ) -> None:
        """Move rows; without sources or targets, from or to the stage."""
        named = sources if sources is not None else targets
        assert named is not None
        if not len(named):
            return
        ids = [named if blocks is None else blocks for blocks in (sources, targets)]
        view = {tl.int64: torch.int64, tl.int32: torch.int32, tl.int16: torch.int16}
        sources_table = (
            self._table if stage is None else stage.view(view.get(self._word, torch.int8))
        )
        with torch.cuda.device_of(self._table):  # Triton launches on the current GPU
            _move[(len(named), *self._grid)](
                self._table,
                sources_table,
                *ids,
                self._stage_words,
                word=self._word,
                pair=self._pair,
                chunk=self._chunk,
                from_stage=sources is None,
                to_stage=targets is None,
                num_warps=WARPS,
            )
