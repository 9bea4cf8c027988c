"""Attention over block tables by torch's scaled_dot_product_attention.

Every layer gathers the K/V of one part of a step after the other into a buffer, and calls
torch on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import sqrt

import attrs
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

from kvcore import InputError
from kvcore.engine import RaggedBatch
from kvcore_engine.backend._pool import Gather, LayerTensor, Pool
from kvcore_engine.backend._step_plan import (
    AttentionKernel,
    DecodeGroup,
    Divider,
    KernelPart,
    LayerKind,
    StepPlan,
    Tile,
)
from kvcore_engine.page_reader import BlockSelection
from kvcore_plugins.codec.dtypes import widened

CPU_GATHER_BYTES, GPU_GATHER_BYTES = 1 << 21, 1 << 30
"""Bytes of K/V gathered at a time: they fit into caches on a CPU, and occupy a GPU."""

WEIGHED_BYTES = 1 << 24
"""Bytes of attention weights held at a time while they are summed up."""


class Sdpa:
    """Gathers the attended K/V piece by piece, and calls torch on each piece.

    Nothing is repeated for the query heads that share a K/V head: of a single query they
    are the rows of one small matrix, for a chunk K/V is expanded without a copy. Neither
    blocks out of the window are read nor slots behind a sequence's last token.

    Of single queries, those of short contexts are gathered and computed together, a long
    one by itself, as many heads at a time as the caches hold. In fp32 and fp64 on a CPU, V
    of a long one is not gathered at all: `embedding_bag` adds up its rows in place.

    Source: Dao et al., "FlashAttention", NeurIPS 2022, for torch's function; Kwon et al.,
    "Efficient memory management for large language model serving with PagedAttention",
    SOSP 2023, for attention over block tables.
    """

    def __init__(
        self, pool: Pool, kernel: AttentionKernel | None, on_fallback: Callable[[str], None]
    ) -> None:
        """Store the pool, and the kernel that computes what it can in place of torch."""
        group_bytes = tile_bytes = GPU_GATHER_BYTES
        on_cpu = pool.device.type == "cpu"
        if on_cpu:
            group_bytes = CPU_GATHER_BYTES
            tile_bytes = 2 * CPU_GATHER_BYTES * torch.get_num_threads()
        bags = on_cpu and isinstance(pool.values[0], LayerTensor)
        bags = bags and pool.dtype in {torch.float32, torch.float64}
        self._pool = pool
        self._divider = Divider(pool, group_bytes, tile_bytes, bags, kernel, on_fallback)
        self._buffers: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the gather buffers, which grow as needed and are used again."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def plan(self, batch: RaggedBatch) -> StepPlan:
        """Return what the layers of a step share. O(blocks).

        Raises:
            InputError: there is no sequence, or a block table does not hold its sequence.
        """
        tables = self._pool.host_tables(batch)
        if batch.held_positions and len(batch.positions) != batch.total_tokens:
            msg = (
                "held_positions say what windows reach only together with positions: give both"
            )
            raise InputError(msg)
        slots = self._pool.slots(batch, tables)
        return StepPlan(batch, tables, self._divider, *slots, self._pool.writes(batch, tables))

    def plan_on_device(self, batch: RaggedBatch, tables: Tensor, contexts: Tensor) -> StepPlan:
        """Return the plan of a step of single tokens, as `TorchBackend.plan_on_device` does."""
        size = self._pool.layout.block_size
        blocks = tables.gather(1, (contexts // size)[:, None]).long()
        slots = self._pool.rows_of(blocks[:, 0], contexts % size)
        return StepPlan(batch, [], self._divider, *slots, None, (tables, contexts))

    def zero_sums(self, plan: StepPlan, queries: Tensor) -> list[Tensor]:
        """Return zeros, `[kv_heads, tokens]` for each sequence, to add attention weights to."""
        dtype = torch.promote_types(queries.dtype, torch.float32)
        kv_heads, batch = self._pool.layout.kv_heads, plan.batch
        return [
            queries.new_zeros(kv_heads, context + length, dtype=dtype)
            for context, length in zip(batch.contexts, batch.lengths, strict=True)
        ]

    @torch.no_grad()
    def attend(
        self,
        layer: int,
        plan: StepPlan,
        queries: Tensor,
        sums: list[Tensor] | None = None,
        dense: Sequence[int] | None = None,
        selected: Iterable[BlockSelection] = (),
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: int = 0,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Return attention's output, `[rows, query_heads, value_dim]`.

        Attention weights are added to `sums` of `zero_sums`, if it is given. With `dense`, only
        so many first new tokens of each sequence attend to all; `selected` has the others.
        """
        pool, layout = self._pool, self._pool.layout
        rows, heads, width = queries.shape
        learned = sink_logits is not None
        kind = LayerKind(heads // layout.kv_heads, window, sinks, sums is not None, learned)
        grouped = queries.reshape(rows, layout.kv_heads, kind.group, width)
        out = queries.new_empty(rows, layout.kv_heads, kind.group, layout.value_dim)
        logits = None if sink_logits is None else sink_logits.view(layout.kv_heads, kind.group)
        by_torch = _LayerAttention(pool, layer, self.gather, grouped, out, scale, sums, logits)
        for part in plan.parts(kind, dense):
            if isinstance(part, KernelPart):
                assert self._divider.kernel is not None
                self._divider.kernel.attend(layer, part.plan, grouped, out, scale, sums)
            elif isinstance(part, DecodeGroup):
                by_torch.group(part)
            else:
                by_torch.tile(part, plan.mask(part, layer, kind))
        for selection in selected:
            by_torch.selection(selection)
        return out.view(rows, heads, layout.value_dim)

    def gather(self, name: str) -> Gather:
        """Return a function that gathers rows into the buffer of that name, used again."""
        return partial(self._gathered, name)

    def _gathered(self, name: str, rows: Tensor, index: Tensor) -> Tensor:
        """Gather `rows[index]` into the buffer of that name, which the next call reuses."""
        count, width = len(index), rows.shape[1]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count * width:
            self._buffers[name] = buffer = rows.new_empty(count * width)
        out = buffer[: count * width].view(count, width)
        return torch.index_select(rows, 0, index, out=out)


@attrs.define(eq=False)
class _LayerAttention:
    """Attention of one layer in one step, part by part.

    Attributes:
        pool, layer: the pool with the K/V, and the number of the layer.
        gather: returns the function that gathers into the buffer of a name.
        queries: `[rows, kv_heads, group, head_dim]`.
        out: the output, `[rows, kv_heads, group, value_dim]`; each part writes its rows.
        scale: as in `Backend.attend`.
        sums: sums of the attention weights of each sequence, to add to; None: no sums.
        sink_logits: scores of learned sinks, `[kv_heads, group]`; None: there are none.
    """

    pool: Pool
    layer: int
    gather: Callable[[str], Gather]
    queries: Tensor
    out: Tensor
    scale: float | None
    sums: list[Tensor] | None
    sink_logits: Tensor | None

    @property
    def _weighs(self) -> bool:
        """Whether weights are computed here: torch returns none, and has no sinks."""
        return self.sums is not None or self.sink_logits is not None

    def group(self, group: DecodeGroup) -> None:
        """Compute one token of each sequence; query heads of a K/V head are its rows."""
        layout = self.pool.layout
        shape = len(group.rows), layout.kv_heads, -1
        keys = self.pool.keys[self.layer].tokens(group.keys, self.gather("keys"))
        values = self.pool.values[self.layer].tokens(group.values, self.gather("values"))
        keys, values = keys.view(*shape, layout.head_dim), values.view(*shape, layout.value_dim)
        queries = self.queries.index_select(0, group.rows)
        output, weights = self._computed(queries, keys, values, group.mask, self.sink_logits)
        if self.sums is not None:
            positions = self.pool.upload(group.places)
            for sequence, attended, got in zip(
                group.sequences, positions, weights.sum(2), strict=True
            ):
                self.sums[sequence].index_add_(1, attended, got)
        self.out.index_copy_(0, group.rows, output)

    def tile(self, tile: Tile, mask: Tensor | None) -> None:
        """Compute consecutive tokens of one sequence, in the heads of the tile."""
        sums = None if self.sums is None else self.sums[tile.sequence][tile.heads]
        if tile.reach.length == 1:
            self._single(tile, mask, sums)
        elif not self._weighs:
            self._chunk(tile, mask)
        else:
            self._weighed_chunk(tile, mask, sums)

    def selection(self, selection: BlockSelection) -> None:
        """Compute one token, which reads other blocks in each K/V head."""
        row, blocks, tokens = selection
        kv_heads, halves = self.pool.layout.kv_heads, (self.pool.keys, self.pool.values)
        heads = torch.arange(kv_heads, device=blocks.device)[:, None]
        # Blocks on the host are for those that are not coded yet: only the last may be one,
        # the same in all heads.
        host = blocks[0].cpu()
        keys, values = (
            parts[self.layer].heads(
                (blocks * parts[0].row_stride + heads).flatten(),
                host,
                slice(0, kv_heads),
                self.gather(name),
            )[:, :tokens]
            for parts, name in zip(halves, ("keys", "values"), strict=True)
        )
        query = self.queries[row]
        output, _ = self._computed(
            query[None], keys[None], values[None], None, self.sink_logits
        )
        self.out[row] = output[0]

    def _single(self, tile: Tile, mask: Tensor | None, sums: Tensor | None) -> None:
        """Compute one token in some heads, without gathering V if the tile has bags."""
        query, keys = self.queries[tile.row, tile.heads][None], self._keys(tile)[None]
        sinks = self._sinks(tile)
        if tile.bags is None:
            values = self._values(tile)[None]
            output, weights = self._computed(query, keys, values, mask, sinks)
        else:
            stored = self.pool.values[self.layer]
            assert isinstance(stored, LayerTensor)
            weights = _weights(query, keys, self.scale, mask, sinks)
            output = embedding_bag(
                tile.bags[0],
                stored.by_token,
                tile.bags[1],
                mode="sum",
                per_sample_weights=weights.flatten(),
            )
        if sums is not None:
            tile.reach.add(sums, weights[0].sum(1), self.pool.layout.block_size)
        target = self.out[tile.row, tile.heads]
        target.copy_(output.view(target.shape))

    def _chunk(self, tile: Tile, mask: Tensor | None) -> None:
        """Compute several tokens of one sequence, with K/V expanded to the query heads."""
        rows = slice(tile.row, tile.row + tile.reach.length)
        queries = self.queries[rows].permute(1, 2, 0, 3)  # [kv_heads, group, length, head_dim]
        shared = -1, queries.shape[1], -1, -1
        output = scaled_dot_product_attention(
            queries,
            self._keys(tile)[:, None].expand(shared),
            self._values(tile)[:, None].expand(shared),
            attn_mask=mask[:, None] if tile.by_position and mask is not None else mask,
            is_causal=mask is None and tile.reach.causal,
            scale=self.scale,
        )
        self.out[rows] = output.permute(2, 0, 1, 3)

    def _weighed_chunk(self, tile: Tile, mask: Tensor | None, sums: Tensor | None) -> None:
        """Compute a chunk as `_chunk` does, some tokens at a time, by their weights."""
        keys, values = self._keys(tile), self._values(tile)
        reach, (heads, group) = tile.reach, self.queries.shape[1:3]
        wide = torch.promote_types(keys.dtype, torch.float32)
        step = max(1, WEIGHED_BYTES // (heads * group * reach.total * wide.itemsize))
        for first in range(0, reach.length, step):
            end = min(first + step, reach.length)
            rows = slice(tile.row + first, tile.row + end)
            # Gathered tokens end with the new ones: those behind the last row are not seen.
            seen = reach.total - reach.length + end
            if mask is None:
                here = torch.arange(seen - end + first, seen, device=keys.device)
                part = torch.arange(seen, device=keys.device) <= here[:, None]
            else:
                part = mask[..., first:end, :seen]
            queries = self.queries[rows].transpose(0, 1)  # [kv_heads, rows, group, head_dim]
            part = part.repeat_interleave(group, -2)
            # Rows are the query heads of a token, then those of the next one.
            sinks = self._sinks(tile)
            sinks = None if sinks is None else sinks.repeat(1, end - first)
            output, weights = self._computed(
                queries.flatten(1, 2), keys[:, :seen], values[:, :seen], part, sinks
            )
            self.out[rows] = output.view(*queries.shape[:3], -1).transpose(0, 1)
            if sums is not None:
                reach.add(sums, weights.sum(1), self.pool.layout.block_size)

    def _computed(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of rows, and the weights; those of torch are empty."""
        if self._weighs:
            weights = _weights(queries, keys, self.scale, mask, sinks)
            return weights.to(values.dtype) @ values, weights
        output = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=self.scale
        )
        return output, output.new_empty(0)

    def _sinks(self, tile: Tile) -> Tensor | None:
        """Return the scores of learned sinks in the heads of a tile, `[heads, group]`."""
        return None if self.sink_logits is None else self.sink_logits[tile.heads]

    def _keys(self, tile: Tile) -> Tensor:
        """Gather K of a tile, `[heads, total, head_dim]`."""
        half, gather = self.pool.keys[self.layer], self.gather("keys")
        return half.heads(tile.keys, tile.blocks, tile.heads, gather)[:, : tile.reach.total]

    def _values(self, tile: Tile) -> Tensor:
        """Gather V of a tile, `[heads, total, value_dim]`."""
        half, gather = self.pool.values[self.layer], self.gather("values")
        return half.heads(tile.values, tile.blocks, tile.heads, gather)[:, : tile.reach.total]


def _weights(
    queries: Tensor,
    keys: Tensor,
    scale: float | None,
    mask: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention weights in fp32 or better, `[..., rows, tokens]`.

    Queries are `[..., rows, head_dim]`, keys `[..., tokens, head_dim]`, and scores of learned
    sinks `[..., rows]`: the weights of a row do not sum up to 1 then.
    """
    scale = 1 / sqrt(queries.shape[-1]) if scale is None else scale
    scores = widened((queries * scale) @ keys.transpose(-1, -2))
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).expand(scores.shape[:-1])[..., None]
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]
