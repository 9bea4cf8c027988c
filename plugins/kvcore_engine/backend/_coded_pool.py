"""The blocks of a pool as a codec codes them: planes, and the blocks that are not full yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from kvcore import InputError
from kvcore.engine import TensorLayout
from kvcore.models.codec import Codec, Part, Plane
from kvcore.plugins import FAILURES, policy_error
from kvcore.plugins.base import wrong_answer
from kvcore_engine.backend._pool import (
    Gather,
    Half,
    Pool,
    Transfer,
    Upload,
    Writes,
    allocate,
    gathered,
    kernels_for,
)
from kvcore_plugins.codec.dtypes import PLANE_DTYPES, TORCH_DTYPES

if TYPE_CHECKING:
    from kvcore_engine.backend.kernels.store import Target


class Stage:
    """The blocks of a half that wait, as computed, until they are full and can be coded.

    Attributes:
        rows: their content, `[rows, kv_heads, block_size, width]`; grows, and is reused.
    """

    def __init__(self, rows: Tensor) -> None:
        """Store a tensor without rows, for its shape, dtype and device."""
        self.rows = rows
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []

    def __contains__(self, block: int) -> bool:
        """Return True if the block waits here."""
        return block in self._row_of

    def __iter__(self) -> Iterator[int]:
        """Return the blocks that wait here."""
        return iter(self._row_of)

    def __getitem__(self, block: int) -> Tensor:
        """Return the content of a block, `[kv_heads, block_size, width]`: not a copy."""
        return self.rows[self._row_of[block]]

    def row(self, block: int) -> int:
        """Return the row of a block; allocate one if it has none."""
        row = self._row_of.get(block)
        if row is None:
            if not self._free:
                rows = len(self.rows)
                more = self.rows.new_empty((max(4, rows // 4), *self.rows.shape[1:]))
                self.rows = torch.cat((self.rows, more))
                self._free = [*range(rows, len(self.rows))]
            row = self._row_of[block] = self._free.pop()
        return row

    def drop(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the stage: their K/V lies in the planes."""
        for block in blocks:
            row = self._row_of.pop(block, None)
            if row is not None:
                self._free.append(row)


class CodedHalf(Half):
    """K or V of one layer, coded.

    Planes are kept as bytes, one row for each block and head, so that all dtypes are copied in
    the same way. If the codec codes whole blocks, a block that is not full waits on the stage:

        planes    | coded | coded |  ///  | coded |     rows for all blocks
        stage                     | K K _ |             rows for some, in `layout.dtype`

    It is read from there, and its planes are undefined. When its last slot is written, it is
    coded. A later write into a coded block puts it back on the stage, decoded.

    Attributes:
        by_token: whether each token is coded by itself; then nothing is ever on the stage.
        planes: a matrix of bytes for each plane, `[blocks * kv_heads, bytes]`.
        stage: the blocks that are not full yet.
    """

    def __init__(
        self,
        part: Part,
        layout: TensorLayout,
        codec: Codec,
        device: torch.device,
        upload: Upload,
    ) -> None:
        """Allocate planes without touching the memory."""
        width = layout.head_dim if part == "keys" else layout.value_dim
        self.shape = layout.blocks, layout.kv_heads, layout.block_size, width
        self.row_stride = layout.kv_heads
        self.by_token = codec.by_token(part)
        rows = layout.blocks * layout.kv_heads
        self._described = codec.planes(part, layout.block_size, width)
        self.planes = [
            allocate(rows * plane.bytes, torch.uint8, device).view(rows, plane.bytes)
            for plane in self._described
        ]
        dtype = TORCH_DTYPES[layout.dtype]
        self.stage = Stage(torch.empty((0, *self.shape[1:]), dtype=dtype, device=device))
        self._part, self._codec, self._upload = part, codec, upload

    def heads(self, index: Tensor, blocks: Tensor, heads: slice, gather: Gather) -> Tensor:
        """Return K/V of some heads of `blocks`, `[heads, tokens of the blocks, width]`."""
        out = self._decoded([gathered(plane, index) for plane in self.planes])
        out = out.view(heads.stop - heads.start, len(blocks), *self.shape[2:])
        if not self.by_token:
            for slot, block in enumerate(blocks.tolist()):
                if block in self.stage:
                    out[:, slot] = self.stage[block][heads]
        return out.flatten(1, 2)

    def tokens(self, index: Tensor, gather: Gather) -> Tensor:
        """Return K/V of the tokens with the rows `index`, `[n, width]`."""
        return self._decoded([gathered(x, index) for x in self._token_planes])[:, 0]

    def store(self, slots: Tensor, rows: Tensor, writes: Writes | None) -> None:
        """Write K/V of new tokens: coded if by token, else onto the stage and from there."""
        if self.by_token:
            coded = self._encoded(rows.flatten(0, 1)[:, None])
            for plane, data in zip(self._token_planes, coded, strict=True):
                plane.index_copy_(0, slots, data)
            return
        assert writes is not None
        if writes.full:
            full = rows[self._upload(writes.full_rows)]  # [blocks, tokens, kv_heads, width]
            self._put(writes.full, full.transpose(1, 2))
        if writes.part:
            again = [block for block, begin, _ in writes.part if begin]
            self._unpack([block for block in again if block not in self.stage])
            _, kv_heads, size, _ = self.shape
            owners = torch.tensor([self.stage.row(block) for block, _, _ in writes.part])
            flat = owners[writes.owners][:, None] * kv_heads + torch.arange(kv_heads)
            index = self._upload((flat * size + writes.offsets[:, None]).flatten())
            new = rows[self._upload(writes.part_rows)].flatten(0, 1)
            self.stage.rows.flatten(0, 2).index_copy_(0, index, new)
            ended = [block for block, _, end in writes.part if end == size]
            if ended:
                self._put(ended, torch.stack([self.stage[block] for block in ended]))

    @cached_property
    def target(self) -> Target | None:
        """Where Triton's kernel codes new tokens; None: the codec's own function does."""
        if not kernels_for(self.planes[0].device):
            return None
        from kvcore_engine.backend.kernels.store import Target  # noqa: PLC0415 - Triton's

        dtype = self.stage.rows.dtype
        return Target.from_codec(self._codec, self._part, dtype, self._token_planes)

    def content(self, blocks: Sequence[int]) -> Tensor:
        """Return the content of `blocks`, `[blocks, kv_heads, block_size, width]`."""
        ids = torch.tensor([*blocks], dtype=torch.int64)
        _, kv_heads, size, width = self.shape
        rows = ids * kv_heads + torch.arange(kv_heads)[:, None]
        content = self.heads(self._upload(rows.flatten()), ids, slice(0, kv_heads), gathered)
        return content.view(kv_heads, len(ids), size, width).transpose(0, 1)

    def move(self, table: Sequence[int], into: Sequence[int], moves: Tensor) -> None:
        """Move tokens, as `Backend.move_tokens` does.

        Coded bytes are moved if each token is coded by itself. With a codec by block, every
        changed block is coded again, except the last: it goes to the stage unless its last
        slot is written.
        """
        heads, sources, targets = moves
        if not self.by_token:
            self._rewrite(into, heads, targets, self._tokens_at(table, heads, sources))
            return
        read, written = (
            self._upload(self.rows_at(blocks, places, heads))
            for blocks, places in ((table, sources), (into, targets))
        )
        for plane in self._token_planes:
            plane.index_copy_(0, written, gathered(plane, read))

    def _tokens_at(self, table: Sequence[int], heads: Tensor, sources: Tensor) -> Tensor:
        """Return the tokens at places of a table, one in each of `heads`, `[tokens, width]`."""
        _, kv_heads, size, width = self.shape
        old = torch.tensor([*table], dtype=torch.int64)
        moved = self.stage.rows.new_empty(len(heads), width)
        for head in range(kv_heads):  # whole blocks are decoded: one head at a time
            which = (heads == head).nonzero()[:, 0]
            used, token_of = torch.unique(sources[which] // size, return_inverse=True)
            ids = old[used]
            moving = self.heads(
                self._upload(ids * kv_heads + head), ids, slice(head, head + 1), gathered
            )
            index = token_of * size + sources[which] % size
            moved[self._upload(which)] = moving[0, self._upload(index)]
        return moved

    def _rewrite(
        self, into: Sequence[int], heads: Tensor, targets: Tensor, moved: Tensor
    ) -> None:
        """Write tokens to places of a table, and code its changed blocks again."""
        size = self.shape[2]
        # All blocks but the last are full when this is done, also those on the stage.
        changed = {*(targets // size).tolist()}
        changed |= {index for index, block in enumerate(into[:-1]) if block in self.stage}
        blocks = [block for index, block in enumerate(into) if index in changed]
        content = self.content(blocks)
        place_of = torch.zeros(len(into), dtype=torch.int64)
        place_of[sorted(changed)] = torch.arange(len(blocks))
        address = place_of[targets // size], heads, targets % size
        content[tuple(map(self._upload, address))] = moved
        if changed and max(changed) == len(into) - 1 and targets.max() < len(into) * size - 1:
            self.put_on_stage(blocks.pop(), content[-1])
        self._put(blocks, content[: len(blocks)])

    def fill(self, value: float, blocks: Sequence[int] | None) -> None:
        """Set all numbers of `blocks`, or of all, to `value`, as far as the codec has it."""
        self.stage.drop([*self.stage] if blocks is None else blocks)
        rows = self.stage.rows.new_full((1, *self.shape[2:]), value)
        for plane, data in zip(self.block_planes, self._encoded(rows), strict=True):
            head = data.reshape(-1).repeat(self.shape[1])
            if blocks is None:
                plane.copy_(head.expand_as(plane))
            else:
                plane[self._upload(torch.tensor([*blocks], dtype=torch.int64))] = head

    def copy_stage(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the blocks on the stage that are sources of pairs, `(source, target)`."""
        staged = [
            (target, self.stage[source].clone())
            for source, target in pairs
            if source in self.stage
        ]
        self.stage.drop(target for _, target in pairs)
        for target, content in staged:
            self.put_on_stage(target, content)

    def put_on_stage(self, block: int, content: Tensor) -> None:
        """Copy a block onto the stage, `[kv_heads, block_size, width]`."""
        row = self.stage.row(block)
        self.stage.rows[row] = content

    @property
    def block_planes(self) -> list[Tensor]:
        """The planes with one row for each block."""
        return [plane.view(self.shape[0], -1) for plane in self.planes]

    @property
    def _token_planes(self) -> list[Tensor]:
        """The planes with one row for each token of each head."""
        rows = self.planes[0].shape[0] * self.shape[2]
        return [plane.view(rows, -1) for plane in self.planes]

    def _shape(self, plane: Plane, tokens: int) -> tuple[int, ...]:
        """Return the shape of a plane of `tokens` tokens."""
        return (tokens, *plane.shape[1:]) if self.by_token else plane.shape

    def _put(self, blocks: list[int], content: Tensor) -> None:
        """Code whole blocks, `[blocks, kv_heads, block_size, width]`."""
        if not blocks:
            return
        ids = self._upload(torch.tensor(blocks, dtype=torch.int64))
        coded = self._encoded(content.flatten(0, 1))
        for plane, data in zip(self.block_planes, coded, strict=True):
            plane.index_copy_(0, ids, data.view(len(blocks), -1))
        self.stage.drop(blocks)

    def _unpack(self, blocks: list[int]) -> None:
        """Decode blocks onto the stage."""
        if blocks:
            for block, content in zip(blocks, self.content(blocks), strict=True):
                self.put_on_stage(block, content)

    def _encoded(self, rows: Tensor) -> list[Tensor]:
        """Return the planes of `[n, tokens, width]` as bytes, `[n, bytes]`."""
        try:
            coded = self._codec.encode(self._part, rows)
            planes = [(tuple(data.shape), data.dtype) for data in coded]
        except FAILURES as error:
            raise policy_error(self._codec, "encode", error) from error
        wanted = [
            ((len(rows), *self._shape(plane, rows.shape[1])), PLANE_DTYPES[plane.dtype])
            for plane in self._described
        ]
        if planes != wanted:
            request = f"encode() of {self._part}, {list(rows.shape)},"
            raise wrong_answer(self._codec, request, f"{planes}, where its planes are {wanted}")
        return [data.contiguous().flatten(1).view(torch.uint8) for data in coded]

    def _decoded(self, planes: list[Tensor]) -> Tensor:
        """Return planes of bytes, `[n, bytes]`, as `[n, tokens, width]` in `layout.dtype`."""
        tokens = self.shape[2] * planes[0].shape[1] // self._described[0].bytes
        tensors = tuple(
            data.view(PLANE_DTYPES[plane.dtype]).view(len(data), *self._shape(plane, tokens))
            for data, plane in zip(planes, self._described, strict=True)
        )
        try:
            rows: Tensor = self._codec.decode(self._part, tensors)
        except FAILURES as error:
            raise policy_error(self._codec, "decode", error) from error
        wanted = len(planes[0]), tokens, self.shape[3]
        shape = getattr(rows, "shape", type(rows).__name__)
        if shape != wanted:
            request = f"decode() of {self._part}"
            raise wrong_answer(self._codec, request, f"{shape}, where it coded {wanted}")
        return rows.to(self.stage.rows.dtype).contiguous()


@attrs.frozen(eq=False)
class SwappedBlocks:
    """Blocks of a coded pool on the host.

    Attributes:
        planes: their bytes in all planes of all layers, `[blocks, bytes]`.
        staged: for each half of the pool the places of the blocks that were on the stage.
        content: the content of these blocks, one after the other.
    """

    planes: Tensor
    staged: list[list[int]]
    content: Tensor

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.planes)


class CodedPool(Pool):
    """All blocks of all layers, coded: K and V of a layer are planes by themselves.

    Attributes:
        halves: K and V of all layers.
        matrices: as in `Pool`, of bytes, one for each plane.
    """

    def __init__(
        self, layout: TensorLayout, codec: Codec, device: torch.device, upload: Upload
    ) -> None:
        """Allocate without touching the memory.

        Raises:
            InputError: the layers of a block are to lie together.
            RuntimeError, OSError, OverflowError: there is too little memory.
        """
        if layout.together:
            msg = (
                f"codec {codec.name!r} keeps codes, scales and zeros apart, layer by layer: "
                "together=True is for K/V as it is computed; leave it out"
            )
            raise InputError(msg)
        self.layout, self.upload = layout, upload
        keys, values = (
            [CodedHalf(part, layout, codec, device, upload) for _ in range(layout.layers)]
            for part in ("keys", "values")
        )
        self.keys, self.values = keys, values
        self.halves = [*keys, *values]
        self.by_token = all(half.by_token for half in self.halves)
        self.matrices = [plane for half in self.halves for plane in half.block_planes]
        self.bytes = sum(matrix.nbytes for matrix in self.matrices)

    @property
    def staged_bytes(self) -> int:
        """Bytes of the stages."""
        return sum(half.stage.rows.nbytes for half in self.halves)

    def layer_blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Raise InputError: the blocks hold codes."""
        assert self.layout.codec is not None
        msg = (
            f"codec {self.layout.codec.name!r} keeps codes in the blocks: there is no memory "
            "of K/V to hand out; use `read`, which decodes"
        )
        raise InputError(msg)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks, `(source, target)`; all are read before one is written."""
        both = list(pairs)
        super().copy_blocks(both)
        for half in self.halves:
            half.copy_stage(both)

    def swap_out(
        self, blocks: Sequence[int], host: Tensor, transfer: Transfer
    ) -> SwappedBlocks:
        """Copy blocks to the host, into `[len(blocks), bytes]`, with those on the stage."""
        staged = [
            [index for index, block in enumerate(blocks) if block in half.stage]
            for half in self.halves
        ]
        content = [
            half.stage[blocks[index]].flatten()
            for half, indices in zip(self.halves, staged, strict=True)
            for index in indices
        ]
        packed = torch.cat([self.halves[0].stage.rows.new_empty(0), *content])
        kept = torch.empty_like(packed, device=host.device)
        transfer([(kept, packed)])
        return SwappedBlocks(super().swap_out(blocks, host, transfer), staged, kept)

    def swap_in(self, host: SwappedBlocks, blocks: Sequence[int], transfer: Transfer) -> None:
        """Write the content that `swap_out` returned into `blocks`."""
        super().swap_in(host.planes, blocks, transfer)
        content, begin = self.upload(host.content), 0
        for half, indices in zip(self.halves, host.staged, strict=True):
            half.stage.drop(blocks)
            for index in indices:
                shape = half.shape[1:]
                end = begin + prod(shape)
                half.put_on_stage(blocks[index], content[begin:end].view(shape))
                begin = end

    def read_bytes(self, blocks: Sequence[int], into: Tensor, transfer: Transfer) -> None:
        """Copy the bytes of blocks in all planes.

        Raises:
            InputError: a block is not full yet, so that it has no bytes.
        """
        waiting = [b for b in blocks if any(b in half.stage for half in self.halves)]
        if waiting:
            msg = f"block {waiting[0]} is not full, and not coded yet: use swap_out"
            raise InputError(msg)
        super().read_bytes(blocks, into, transfer)

    def write_bytes(self, blocks: Sequence[int], data: Tensor, transfer: Transfer) -> None:
        """Write the bytes that `read_bytes` has read into `blocks`, which are full then."""
        super().write_bytes(blocks, data, transfer)
        for half in self.halves:
            half.stage.drop(blocks)

    def fill(self, value: float, blocks: Sequence[int] | None) -> None:
        """Set all numbers of `blocks`, or of all blocks, to `value`."""
        for half in self.halves:
            half.fill(value, blocks)
