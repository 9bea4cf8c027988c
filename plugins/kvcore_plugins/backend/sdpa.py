"""Attention over block tables by way of torch's scaled_dot_product_attention."""

from __future__ import annotations

from math import sqrt

import attrs
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

from kvcore.engine import Rows
from kvcore_plugins.backend.jobs import Batch, Planner, Reach, Tile
from kvcore_plugins.backend.pool import Pool

NARROW, BROAD = 1 << 21, 1 << 30
"""Bytes of K/V gathered at a time: what caches hold on a CPU, what occupies a GPU."""


MASKS = 1 << 26
"""Bytes of masks that a step keeps from layer to layer."""


@attrs.frozen(eq=False)
class Work:
    """The sequences of a step, and its jobs: made once for each kind of layer.

    A kind is how many query heads share a K/V head, a window, and sinks. Masks are kept for
    the layers that follow, up to `MASKS` bytes of them.
    """

    rows: Rows
    tables: list[Tensor]
    jobs: dict[tuple[int, int | None, int], list[Tile | Batch]] = attrs.field(factory=dict)
    masks: dict[Reach, Tensor] = attrs.field(factory=dict)

    def mask(self, reach: Reach, pool: Pool) -> Tensor | None:
        """Return which tokens those of `reach` attend to; None: no mask is needed."""
        found = self.masks.get(reach)
        if found is None:
            found = reach.mask(pool.layout.block_size, pool.device)
            kept = sum(mask.nbytes for mask in self.masks.values())
            if found is not None and kept + found.nbytes <= MASKS:
                self.masks[reach] = found
        return found


class Sdpa:
    """Gathers what is attended to, piece by piece, and calls torch on the piece.

    Nothing is repeated for the query heads that share a K/V head: of a single query they
    are the rows of one small matrix, for a chunk K/V is expanded without a copy. Neither
    blocks out of the window are read nor what lies behind a sequence's last token.

    Of single queries, those of short contexts are gathered and computed together, a long
    one by itself, as many heads at a time as the caches hold. In fp32 and fp64 on a CPU, V
    of a long one is not gathered at all: `embedding_bag` adds up its rows where they lie.

    Source: Dao et al., "FlashAttention", NeurIPS 2022, for what torch does; Kwon et al.,
    "Efficient memory management for large language model serving with PagedAttention",
    SOSP 2023, for attention over block tables.
    """

    def __init__(self, pool: Pool) -> None:
        """Attend to the blocks of `pool`."""
        cpu = pool.device.type == "cpu"
        sums = cpu and pool.dtype in {torch.float32, torch.float64}
        self._pool = pool
        room, piece = (NARROW, 2 * NARROW * torch.get_num_threads()) if cpu else (BROAD, BROAD)
        self._planner = Planner(pool, room, piece, sums)
        self._buffers: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the gather buffers, which grow as needed and are used again."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def plan(self, rows: Rows, tables: list[Tensor]) -> Work:
        """Return what `attend` needs; block tables are on the host."""
        return Work(rows, tables)

    def attend(
        self,
        layer: int,
        work: Work,
        queries: Tensor,
        scale: float | None,
        window: int | None,
        sinks: int,
    ) -> Tensor:
        """Return attention's output, `[tokens, query_heads, value_dim]`."""
        layout = self._pool.layout
        tokens, heads, width = queries.shape
        group = heads // layout.kv_heads
        kind = group, window, sinks
        if kind not in work.jobs:
            work.jobs[kind] = [*self._planner.jobs(work.rows, work.tables, *kind)]
        grouped = queries.reshape(tokens, layout.kv_heads, group, width)
        out = queries.new_empty(tokens, layout.kv_heads, group, layout.value_dim)
        for job in work.jobs[kind]:
            if isinstance(job, Batch):
                self._batch(layer, job, grouped, out, scale)
                continue
            mask = work.mask(job.reach, self._pool)
            if job.reach.length == 1:
                self._single(layer, job, grouped, out, scale, mask)
            else:
                self._chunk(layer, job, grouped, out, scale, mask)
        return out.view(tokens, heads, layout.value_dim)

    def _batch(
        self, layer: int, job: Batch, queries: Tensor, out: Tensor, scale: float | None
    ) -> None:
        pool, layout = self._pool, self._pool.layout
        shape = len(job.rows), layout.kv_heads, -1
        keys = self._gathered("keys", pool.keys[layer].tokens, job.keys)
        values = self._gathered("values", pool.values[layer].tokens, job.values)
        found = scaled_dot_product_attention(
            queries.index_select(0, job.rows),
            keys.view(*shape, layout.head_dim),
            values.view(*shape, layout.value_dim),
            attn_mask=job.mask,
            scale=scale,
        )
        out.index_copy_(0, job.rows, found)

    def _single(
        self,
        layer: int,
        tile: Tile,
        queries: Tensor,
        out: Tensor,
        scale: float | None,
        mask: Tensor | None,
    ) -> None:
        asked = queries[tile.row, tile.heads]
        keys = self._keys(layer, tile)
        if tile.sums is None:
            values = self._values(layer, tile)
            found = scaled_dot_product_attention(
                asked[None], keys[None], values[None], attn_mask=mask, scale=scale
            )
        else:
            scale = 1 / sqrt(asked.shape[-1]) if scale is None else scale
            scores = torch.bmm(asked * scale, keys.transpose(1, 2))
            if mask is not None:
                scores.masked_fill_(~mask, -torch.inf)
            found = embedding_bag(
                tile.sums[0],
                self._pool.values[layer].tokens,
                tile.sums[1],
                mode="sum",
                per_sample_weights=scores.softmax(-1).flatten(),
            )
        place = out[tile.row, tile.heads]
        place.copy_(found.view(place.shape))

    def _chunk(
        self,
        layer: int,
        tile: Tile,
        queries: Tensor,
        out: Tensor,
        scale: float | None,
        mask: Tensor | None,
    ) -> None:
        rows = slice(tile.row, tile.row + tile.reach.length)
        asked = queries[rows].permute(1, 2, 0, 3)
        shared = -1, asked.shape[1], -1, -1
        found = scaled_dot_product_attention(
            asked,
            self._keys(layer, tile)[:, None].expand(shared),
            self._values(layer, tile)[:, None].expand(shared),
            attn_mask=mask,
            is_causal=tile.reach.causal,
            scale=scale,
        )
        out[rows] = found.permute(2, 0, 1, 3)

    def _keys(self, layer: int, tile: Tile) -> Tensor:
        """Gather K of a tile, `[heads, total, head_dim]`."""
        found = self._gathered("keys", self._pool.keys[layer].runs, tile.keys)
        heads = tile.heads.stop - tile.heads.start
        return found.view(heads, -1, self._pool.layout.head_dim)[:, : tile.reach.total]

    def _values(self, layer: int, tile: Tile) -> Tensor:
        """Gather V of a tile, `[heads, total, value_dim]`."""
        found = self._gathered("values", self._pool.values[layer].runs, tile.values)
        heads = tile.heads.stop - tile.heads.start
        return found.view(heads, -1, self._pool.layout.value_dim)[:, : tile.reach.total]

    def _gathered(self, name: str, rows: Tensor, index: Tensor) -> Tensor:
        """Gather rows into the buffer of that name."""
        count, width = len(index), rows.shape[1]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count * width:
            self._buffers[name] = buffer = rows.new_empty(count * width)
        out = buffer[: count * width].view(count, width)
        return torch.index_select(rows, 0, index, out=out)
