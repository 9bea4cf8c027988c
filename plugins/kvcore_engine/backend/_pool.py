"""The blocks of a pool as one torch tensor, and the slots that a step stores into."""

from __future__ import annotations

import mmap
import sys
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch import Tensor

from kvcore import InputError
from kvcore.engine import RaggedBatch, Rotation, TensorLayout
from kvcore_plugins.codec.dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from kvcore_engine.backend.kernels.copy import RowMover
    from kvcore_engine.backend.kernels.store import Target

Upload: TypeAlias = Callable[[Tensor], Tensor]
"""Returns a host tensor on the device."""

Transfer: TypeAlias = Callable[[Iterable[tuple[Tensor, Tensor]]], None]
"""Copies between host and device, `(into, source)`, and waits for the copies."""


def _memory(numbers: Tensor) -> memoryview:
    """Return the memory of contiguous bytes on the host: not a copy."""
    buffer: Any = numbers.view(-1).numpy()  # no buffer to type checkers
    return memoryview(buffer)


def kernels_for(device: torch.device) -> bool:
    """Return True if Triton's kernels can work on the memory of a device."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def gathered(rows: Tensor, index: Tensor) -> Tensor:
    """Return the rows that `index` names, in new memory."""
    return rows.index_select(0, index)


def allocate(numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return untouched memory; on Linux, host memory in huge pages.

    Blocks are read in any order, and looking up small pages takes an eighth of attention.
    """
    if sys.platform != "linux" or device.type != "cpu":
        return torch.empty(numbers, dtype=dtype, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, numbers * dtype.itemsize, flags=private)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


Gather: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Returns the rows of a matrix at an index, perhaps in memory that is reused."""


@attrs.frozen
class Writes:
    """The new tokens of a step by the blocks that they go into.

    Attributes:
        full: blocks that are written whole.
        full_rows: rows in the step of their tokens, `[blocks, block_size]`.
        part: id, first slot, and slot after the last, of each block that is written in part.
        part_rows: rows in the step of the tokens in blocks of `part`, `[tokens]`.
        owners, offsets: for each token of `part_rows` the place of its block in `part`, and
            its slot in the block.
    """

    full: list[int]
    full_rows: Tensor
    part: list[tuple[int, int, int]]
    part_rows: Tensor
    owners: Tensor
    offsets: Tensor

    @classmethod
    def from_batch(cls, batch: RaggedBatch, tables: list[Tensor], size: int) -> Writes:
        """Divide the new tokens of a batch. O(blocks written + new tokens)."""
        full, part, row = [], [], 0
        firsts, starts = [], []
        for context, length, table in zip(batch.contexts, batch.lengths, tables, strict=True):
            end = context + length
            written = range(context // size, -(-end // size))
            for index, block in zip(written, table[written.start :].tolist(), strict=True):
                begin = max(context - index * size, 0)
                stop = min(end - index * size, size)
                first = row + index * size + begin - context
                if stop - begin == size:
                    full.append(block)
                    firsts.append(first)
                else:
                    part.append((block, begin, stop))
                    starts.append(first - begin)
            row += length
        counts = torch.tensor([end - begin for _, begin, end in part], dtype=torch.int64)
        owners = torch.repeat_interleave(counts)
        begins = torch.tensor([begin for _, begin, _ in part], dtype=torch.int64)
        offsets = torch.arange(len(owners)) - (counts.cumsum(0) - counts - begins)[owners]
        full_rows = torch.tensor(firsts, dtype=torch.int64)[:, None] + torch.arange(size)
        part_rows = torch.tensor(starts, dtype=torch.int64)[owners] + offsets
        return cls(full, full_rows, part, part_rows, owners, offsets)


LONG_ROW = 4096
"""Bytes of a row from which on rows are copied one by one, not by an index."""


LONG_RUN = 1 << 18
"""Bytes of a row from which on a GPU copies rows to the host one by one, not by a stage."""


class Half(ABC):
    """K or V of one layer, in all blocks.

    Attributes:
        shape: blocks, K/V heads, tokens of a block, width of a head.
        row_stride: rows from one block to the next, where each head has a row.
    """

    shape: tuple[int, int, int, int]
    row_stride: int

    @abstractmethod
    def heads(self, index: Tensor, blocks: Tensor, heads: slice, gather: Gather) -> Tensor:
        """Return K/V of some heads of `blocks`, `[heads, tokens of the blocks, width]`.

        `index` has their rows, head after head; `blocks` are on the host.
        """

    @abstractmethod
    def tokens(self, index: Tensor, gather: Gather) -> Tensor:
        """Return K/V of the tokens with the rows `index`, `[n, width]`."""

    @property
    @abstractmethod
    def target(self) -> Target | None:
        """The place and the coding for Triton's kernel to write new K/V; None: use `store`."""

    @abstractmethod
    def store(self, slots: Tensor, rows: Tensor, writes: Writes | None) -> None:
        """Write K/V of new tokens, `[tokens, kv_heads, width]`, into the rows `slots`."""

    @abstractmethod
    def move(self, table: Sequence[int], into: Sequence[int], moves: Tensor) -> None:
        """Move tokens, as `Backend.move_tokens` does."""

    def token_rows(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Return the rows of tokens in each head, given by block and offset in the block.

        `[tokens]` becomes `[kv_heads, tokens]`, `[n, tokens]` becomes
        `[n, kv_heads, tokens]`.
        """
        _, kv_heads, size, _ = self.shape
        heads = torch.arange(kv_heads, device=blocks.device)[:, None]
        return (blocks[..., None, :] * self.row_stride + heads) * size + offsets[..., None, :]

    def rows_at(self, table: Sequence[int], places: Tensor, heads: Tensor) -> Tensor:
        """Return the rows of tokens at places of a table, each in one of `heads`."""
        size, ids = self.shape[2], torch.tensor([*table], dtype=torch.int64)
        return (ids[places // size] * self.row_stride + heads) * size + places % size


@attrs.frozen(eq=False)
class LayerTensor(Half):
    """K or V of one layer as plain numbers: three views of the same memory.

    Attributes:
        blocks: `[blocks, kv_heads, block_size, width]`.
        by_head: one row for each block and head, `[rows, block_size * width]`; head h of
            block b is row `b * row_stride + h`.
        by_token: one row for each block, head and token, `[rows, width]`.
    """

    blocks: Tensor
    by_head: Tensor
    by_token: Tensor
    shape: tuple[int, int, int, int]
    row_stride: int

    @classmethod
    def view(
        cls, flat: Tensor, offset: int, stride: int, layout: TensorLayout, width: int
    ) -> LayerTensor:
        """Return the views of the numbers from `offset`, a block every `stride` numbers."""
        blocks, heads, size = layout.blocks, layout.kv_heads, layout.block_size
        run = size * width
        row_stride = stride // run
        rows = (blocks - 1) * row_stride + heads
        return cls(
            flat.as_strided((blocks, heads, size, width), (stride, run, width, 1), offset),
            flat.as_strided((rows, run), (run, 1), offset),
            flat.as_strided((rows * size, width), (width, 1), offset),
            (blocks, heads, size, width),
            row_stride,
        )

    def heads(self, index: Tensor, blocks: Tensor, heads: slice, gather: Gather) -> Tensor:
        """Return K/V of some heads of `blocks`, `[heads, tokens of the blocks, width]`."""
        return gather(self.by_head, index).view(heads.stop - heads.start, -1, self.shape[3])

    def tokens(self, index: Tensor, gather: Gather) -> Tensor:
        """Return K/V of the tokens with the rows `index`, `[n, width]`."""
        return gather(self.by_token, index)

    @property
    def target(self) -> Target | None:
        """The place for Triton's kernel to write new K/V; None if it is not used."""
        if not kernels_for(self.by_token.device):
            return None
        from kvcore_engine.backend.kernels.store import PLAIN, Target  # noqa: PLC0415 - Triton's

        return Target(PLAIN, (self.by_token,))

    def store(self, slots: Tensor, rows: Tensor, writes: Writes | None) -> None:
        """Write K/V of new tokens, `[tokens, kv_heads, width]`, into the rows `slots`."""
        self.by_token.index_copy_(0, slots, rows.flatten(0, 1))

    def move(self, table: Sequence[int], into: Sequence[int], moves: Tensor) -> None:
        """Move tokens, row by row."""
        heads, sources, targets = moves
        read, written = (
            self.rows_at(blocks, places, heads).to(self.by_token.device)
            for blocks, places in ((table, sources), (into, targets))
        )
        self.by_token.index_copy_(0, written, gathered(self.by_token, read))


class Pool:
    """All blocks of all layers: one allocation.

    Apart, K of a layer is a tensor by itself, and so is V. Together, a block is one run of
    memory: K and V of the first layer, of the second, and so on. Either way the rows of
    `LayerTensor.by_head` are equally far apart, so that one `index_select` gathers all
    heads. Where keys and values differ in width, together, a block is rounded up for that.

    Attributes:
        layout: layout of the pool.
        upload: returns a host tensor on the device.
        keys, values: a `Half` for each layer.
        matrices: the memory as matrices with one row for each block, `[blocks, numbers]`:
            one matrix together, two for each layer apart.
        bytes: size of the allocation.
        by_token: whether tokens can be read one by one: not if they are coded by blocks.
    """

    by_token = True
    keys: Sequence[Half]
    values: Sequence[Half]
    matrices: list[Tensor]
    bytes: int

    def __init__(self, layout: TensorLayout, device: torch.device, upload: Upload) -> None:
        """Allocate without touching the memory; `upload` brings indices to the device.

        Raises:
            RuntimeError, OSError, OverflowError: there is too little memory.
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
        flat = allocate(blocks * stride, TORCH_DTYPES[layout.dtype], device)
        self.layout = layout
        self.upload = upload
        self.bytes = flat.nbytes
        keys = [
            LayerTensor.view(flat, offset, key_stride, layout, layout.head_dim)
            for offset in offsets
        ]
        values = [
            LayerTensor.view(flat, offset + shift, value_stride, layout, layout.value_dim)
            for offset in offsets
        ]
        self.keys, self.values = keys, values
        if layout.together:
            self.matrices = [flat.view(blocks, stride)]
        else:
            parts = zip(keys, values, strict=True)
            self.matrices = [part.blocks.flatten(1) for pair in parts for part in pair]

    @property
    def device(self) -> torch.device:
        """The device that holds the blocks."""
        return self.matrices[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which K/V is computed."""
        return TORCH_DTYPES[self.layout.dtype]

    @property
    def staged_bytes(self) -> int:
        """Bytes besides the allocation, of blocks that a codec has yet to code."""
        return 0

    def store(
        self,
        layer: int,
        slots: tuple[Tensor, Tensor],
        rows: tuple[Tensor, Tensor],
        writes: Writes | None,
        rotation: Rotation | None,
    ) -> None:
        """Write K and V of new tokens, `[tokens, kv_heads, width]` each, the keys rotated.

        If Triton's kernel can write K and V, it does so in one launch.
        """
        halves = self.keys[layer], self.values[layer]
        new = []
        for half, slot_of, part, turn in zip(
            halves, slots, rows, (rotation, None), strict=True
        ):
            target = half.target
            if target is not None:
                new.append((target, slot_of, part, turn))
            else:
                half.store(slot_of, part if turn is None else turn.rotate(part), writes)
        if new:
            from kvcore_engine.backend.kernels.store import store_rows  # noqa: PLC0415 - Triton's

            store_rows(*new)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks, `(source, target)`; all are read before one is written.

        A source that is another pair's target is put aside before anything is written; the
        other sources are copied straight to their targets.
        """
        both = [(source, target) for source, target in pairs if source != target]
        if not both:
            return
        written = {target for _, target in both}
        aside = [pair for pair in both if pair[0] in written]
        straight = [pair for pair in both if pair[0] not in written]
        if self._mover is not None:
            self._move_rows(self._mover, aside, straight)
        elif self.device.type == "cpu" and self._has_long_rows:
            for rows, size in self._rows:
                kept = [bytes(rows[source * size : (source + 1) * size]) for source, _ in aside]
                for source, target in straight:
                    begin = target * size
                    rows[begin : begin + size] = rows[source * size : (source + 1) * size]
                for (_, target), content in zip(aside, kept, strict=True):
                    rows[target * size : (target + 1) * size] = content
        else:
            read, put = (self._ids(side) for side in zip(*both, strict=True))
            for matrix in self.matrices:
                matrix.index_copy_(0, put, matrix.index_select(0, read))

    def _move_rows(
        self,
        mover: RowMover,
        aside: Sequence[tuple[int, int]],
        straight: Sequence[tuple[int, int]],
    ) -> None:
        """Copy the pairs `straight` by a kernel, and the pairs `aside` through a stage."""
        staged = None
        if aside:
            staged = mover.gather(self._ids([source for source, _ in aside]))
        if straight:
            sources, targets = zip(*straight, strict=True)
            mover.copy(self._ids(sources), self._ids(targets))
        if staged is not None:
            mover.scatter(staged, self._ids([target for _, target in aside]))

    def layer_blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the memory of K and of V of a layer."""
        keys, values = self.keys[layer], self.values[layer]
        assert isinstance(keys, LayerTensor)
        assert isinstance(values, LayerTensor)
        return keys.blocks, values.blocks

    def read_heads(
        self, part: Half, blocks: Sequence[int], gather: Gather | None = None
    ) -> Tensor:
        """Return a copy of K or V of `blocks`, `[kv_heads, tokens, width]`."""
        kv_heads = self.layout.kv_heads
        ids = torch.tensor([*blocks], dtype=torch.int64)
        rows = ids * part.row_stride + torch.arange(kv_heads)[:, None]
        index = self.upload(rows.flatten())
        return part.heads(index, ids, slice(0, kv_heads), gather or gathered)

    def host_rows(self, memory: memoryview, blocks: int) -> Tensor:
        """Return memory of the host as a tensor, `[blocks, bytes]`: not a copy.

        Raises:
            InputError: it has another size.
        """
        size = self.layout.bytes_per_block
        if memory.nbytes != blocks * size:
            msg = f"{blocks} blocks of {size} bytes do not go into {memory.nbytes} bytes"
            raise InputError(msg)
        return torch.frombuffer(memory, dtype=torch.uint8).view(blocks, size)

    def swap_out(self, blocks: Sequence[int], host: Tensor, transfer: Transfer) -> Any:
        """Copy blocks to the host, into `[len(blocks), bytes]`; return their content."""
        Pool.read_bytes(self, blocks, host, transfer)
        return host

    def swap_in(self, host: Any, blocks: Sequence[int], transfer: Transfer) -> None:
        """Write the content that `swap_out` returned into `blocks`."""
        Pool.write_bytes(self, blocks, host, transfer)

    def read_bytes(self, blocks: Sequence[int], into: Tensor, transfer: Transfer) -> None:
        """Copy the bytes of blocks into memory of the host, `[len(blocks), bytes]`.

        Each row is copied once, rows of some KiB one by one: a call of torch takes as long as a
        copy of 64 KiB. A GPU gathers rows on a stage, which is copied at once, unless each row
        is long enough for a copy of its own.
        """
        if self.device != into.device:
            if self._has_long_runs:
                transfer(self._runs(blocks, into))
                return
            transfer([(into, self._gathered(self._ids(blocks), into))])
        elif self._has_long_rows:
            memory, offset = _memory(into), 0
            for block in blocks:
                for rows, size in self._rows:
                    memory[offset : offset + size] = rows[block * size : (block + 1) * size]
                    offset += size
        else:
            ids = self._ids(blocks)
            for matrix, columns in self._columns:
                torch.index_select(matrix, 0, ids, out=into[:, columns])

    def write_bytes(self, blocks: Sequence[int], data: Tensor, transfer: Transfer) -> None:
        """Write the bytes that `read_bytes` has read into `blocks`."""
        if self.device != data.device:
            if self._has_long_runs:
                transfer((row, part) for part, row in self._runs(blocks, data))
                return
            stage, ids = torch.empty_like(data, device=self.device), self._ids(blocks)
            transfer([(stage, data)])
            if self._mover is not None:
                self._mover.scatter(stage, ids)
                return
            for matrix, columns in self._columns:
                matrix.index_copy_(0, ids, stage[:, columns])
        elif self._has_long_rows:
            memory, offset = _memory(data), 0
            for block in blocks:
                for rows, size in self._rows:
                    rows[block * size : (block + 1) * size] = memory[offset : offset + size]
                    offset += size
        else:
            # numpy copies rows; index_copy_ of torch goes byte by byte, six times slower.
            index = torch.tensor(blocks, dtype=torch.int64).numpy()
            for matrix, columns in self._columns:
                matrix.numpy()[index] = data[:, columns].numpy()

    def _gathered(self, ids: Tensor, like: Tensor) -> Tensor:
        """Return the bytes of blocks on a stage of the device, shaped as `like`."""
        if self._mover is not None:
            return self._mover.gather(ids)
        stage = torch.empty_like(like, device=self.device)
        for matrix, columns in self._columns:
            stage[:, columns] = matrix.index_select(0, ids)
        return stage

    def _runs(self, blocks: Sequence[int], host: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each row of blocks: the part on the host, and the part of the pool."""
        for index, block in enumerate(blocks):
            for matrix, columns in self._columns:
                yield host[index, columns], matrix[block]

    @cached_property
    def _mover(self) -> RowMover | None:
        """Moves rows by one kernel; None without Triton, or on the host."""
        if not kernels_for(self.device):
            return None
        from kvcore_engine.backend.kernels.copy import RowMover  # noqa: PLC0415 - Triton's

        return RowMover([rows for rows, _ in self._columns])

    @cached_property
    def _has_long_runs(self) -> bool:
        """Whether each row is long enough to be copied over the link by itself."""
        return all(rows.shape[1] >= LONG_RUN for rows, _ in self._columns)

    @cached_property
    def _columns(self) -> list[tuple[Tensor, slice]]:
        """The matrices as bytes, without padding, each with its columns in a whole block."""
        layout, begin, halves = self.layout, 0, []
        for matrix in self.matrices:
            rows = matrix.view(torch.uint8)
            if layout.together:
                rows = rows[:, : layout.bytes_per_block]
            halves.append((rows, slice(begin, begin + rows.shape[1])))
            begin += rows.shape[1]
        return halves

    @cached_property
    def _has_long_rows(self) -> bool:
        """Whether rows lie one after the other, and are best copied one by one."""
        size = self.layout.bytes_per_block
        contiguous = all(rows.is_contiguous() for rows, _ in self._columns)
        return contiguous and size >= LONG_ROW * len(self._columns)

    @cached_property
    def _rows(self) -> list[tuple[memoryview, int]]:
        """The matrices as memory of the host, each with the bytes of a row."""
        return [(_memory(rows), rows.shape[1]) for rows, _ in self._columns]

    def fill(self, value: float, blocks: Sequence[int] | None) -> None:
        """Set all numbers of `blocks`, or of all blocks, to `value`."""
        ids = None if blocks is None else self._ids(blocks)
        for matrix in self.matrices:
            if ids is None:
                matrix.fill_(value)
            else:
                matrix.index_fill_(0, ids, value)

    def host_tables(self, batch: RaggedBatch) -> list[Tensor]:
        """Return block tables in host memory, cut to the length of their sequences. O(blocks).

        Raises:
            InputError: as for `joined_tables`.
        """
        ids, sizes = self.joined_tables(batch)
        return [*ids.long().split_with_sizes(sizes)]

    def joined_tables(self, batch: RaggedBatch, width: int = 0) -> tuple[Tensor, list[int]]:
        """Return the block ids of all sequences, and how many each has.

        The ids are int32 on the host, one sequence after the other; each has at least `width`,
        zeros behind its own. O(blocks).

        Raises:
            InputError: there is no sequence, a sequence computes nothing or has too few
                blocks, or a block does not exist.
        """
        if not batch.block_tables:
            msg = "a step computes at least one sequence; there is none"
            raise InputError(msg)
        size, blocks = self.layout.block_size, self.layout.blocks
        joined, sizes, zeros = array("i"), [], array("i", bytes(4 * width))
        for index, (table, context, length) in enumerate(
            zip(batch.block_tables, batch.contexts, batch.lengths, strict=True)
        ):
            needed = -(-(context + length) // size)
            msg = ""
            if context < 0 or length < 1:
                msg = f"{length} new tokens after {context}: 1 or more, after 0"
            elif len(table) < needed:
                msg = (
                    f"{len(table)} blocks of {size} tokens for {context} and {length} new "
                    f"tokens: {needed} are needed"
                )
            if msg:
                msg = f"sequence {index} has {msg}"
                raise InputError(msg)
            try:
                joined += array("i", table[:needed])
            except OverflowError:
                wrong = next(block for block in table if not 0 <= block < blocks)
                raise _unknown_block(index, wrong, blocks) from None
            joined += zeros[needed:]
            sizes.append(max(needed, width))
        ids = torch.frombuffer(joined, dtype=torch.int32)
        low, high = map(int, torch.aminmax(ids))
        if low < 0 or high >= blocks:
            wrong = low if low < 0 else high
            index = bisect_right([*accumulate(sizes)], joined.index(wrong))
            raise _unknown_block(index, wrong, blocks)
        return ids, sizes

    def writes(self, batch: RaggedBatch, tables: list[Tensor]) -> Writes | None:
        """Return the new tokens by block, for codecs that code blocks; None: by `slots`."""
        if self.by_token:
            return None
        return Writes.from_batch(batch, tables, self.layout.block_size)

    def slots(self, batch: RaggedBatch, tables: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the slots of K and V of the new tokens: rows of `LayerTensor.by_token`.

        `[rows * kv_heads]` each, on the device; the same rows in every layer.
        """
        size = self.layout.block_size
        lengths = torch.tensor(batch.lengths)
        # For each row its sequence, and its place in that sequence's blocks.
        sequence = torch.repeat_interleave(lengths)
        starts = lengths.cumsum(0) - lengths - torch.tensor(batch.contexts)
        offsets = torch.arange(len(sequence)) - starts[sequence]
        # All tables are laid end to end; `firsts` has the beginning of each.
        firsts = torch.tensor([0, *accumulate(map(len, tables[:-1]))])
        blocks = torch.cat(tables)[firsts[sequence] + offsets // size]
        keys, values = self.rows_of(blocks, offsets % size)
        sent = self.upload(keys)
        return sent, sent if values is keys else self.upload(values)

    def rows_of(self, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of K and of V of tokens, by block and offset in it, head by head."""
        key, value = self.keys[0], self.values[0]
        keys = key.token_rows(blocks, offsets).t().flatten()
        if value.row_stride == key.row_stride:
            return keys, keys
        return keys, value.token_rows(blocks, offsets).t().flatten()

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        """Return block ids as an index on the device."""
        return self.upload(torch.tensor(list(blocks), dtype=torch.int64))


def _unknown_block(index: int, block: int, blocks: int) -> InputError:
    """Return the error of a sequence whose table has a block that the pool does not have."""
    return InputError(f"sequence {index} has block {block}: there are 0 to {blocks - 1}")
