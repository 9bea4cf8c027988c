"""Attention over block tables by way of torch's scaled_dot_product_attention.

The new tokens of a step are divided once for all layers of a kind: a chunk of a prefill into
*tiles*, the tokens of decoding sequences into *groups* of about equal context, or, where the
context is long, into tiles of some heads each. Every layer then gathers the K/V of one tile
or group after the other into a buffer, and calls torch on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from math import sqrt
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

from kvcore import InputError
from kvcore.engine import RaggedBatch
from kvcore_plugins.backend._decode_kernel import DecodeKernel, Single
from kvcore_plugins.backend._pool import Gather, LayerTensor, Pool, Writes

CPU_GATHER_BYTES, GPU_GATHER_BYTES = 1 << 21, 1 << 30
"""Bytes of K/V gathered at a time: what caches hold on a CPU, what occupies a GPU."""


BAG_BYTES = 3 << 19
"""Bytes of V of a head up to which its rows are added up where they lie, not gathered.

Each query head that shares them adds them up again: they must stay in a core's own cache.
With four query heads that took 0.93 of the time at 1 MiB, and 1.2 times it at 3 MiB.
"""


MAX_MASK_PAIRS = 1 << 24
"""Pairs of tokens that a mask may have; longer chunks are cut into tiles."""


KEPT_MASK_BYTES = 1 << 26
"""Bytes of masks that a step keeps from layer to layer."""


WEIGHED_BYTES = 1 << 24
"""Bytes of attention weights held at a time where they are summed up."""


BY_POSITION = "a window is by the positions of a sequence that has lost tokens"
"""Why torch computes a single token though there is a kernel."""


GROUP_SPREAD = 64
"""Contexts of a group differ by at most this many tokens, or an eighth of the longest."""


@attrs.frozen(kw_only=True)
class Reach:
    """The blocks that consecutive new tokens of one sequence attend to.

    Without a window these are all blocks of the sequence. With one, they are the first
    `head` blocks, which hold the sinks, and the blocks from `tail` on:

        | 0 ... head-1 |   not attended to   | tail ...      context | new tokens |
          sinks                                window of the first new token

    Attributes:
        context: number of tokens before the new ones.
        length: number of new tokens.
        window, sinks: as in `Backend.attend`; window is None if it leaves nothing out.
        head, tail: bounds of the blocks that are left out, `[head, tail)`.
        total: number of tokens in the other blocks, up to the last new token.
    """

    context: int
    length: int
    window: int | None
    sinks: int
    head: int
    tail: int
    total: int

    @classmethod
    def of(
        cls, context: int, length: int, window: int | None, sinks: int, block_size: int
    ) -> Reach:
        """Return the reach of `length` new tokens after `context` tokens."""
        end = context + length
        head = tail = 0
        if window is not None and end <= window:
            window = None
        if window is not None:
            head = -(-sinks // block_size)
            tail = max(0, context - window + 1) // block_size
            if head >= tail:
                head = tail = 0
        return cls(
            context=context,
            length=length,
            window=window,
            sinks=sinks,
            head=head,
            tail=tail,
            total=end - (tail - head) * block_size,
        )

    @property
    def causal(self) -> bool:
        """Whether the mask is the plain triangle, which torch needs no tensor for."""
        return not self.context and self.window is None and self.length > 1

    def mask(self, block_size: int, device: torch.device) -> Tensor | None:
        """Return which tokens each new one attends to, bool `[length, total]`.

        None where no mask is needed: for a triangle, and if all are attended to.
        """
        if self.causal or (self.window is None and self.length == 1):
            return None
        # The position of each gathered token: those behind the gap are further on.
        positions = torch.arange(self.total, device=device)
        positions[self.head * block_size :] += (self.tail - self.head) * block_size
        own = torch.arange(self.context, self.context + self.length, device=device)[:, None]
        seen = positions <= own
        if self.window is not None:
            seen &= (positions > own - self.window) | (positions < self.sinks)
        return seen

    def add(self, sums: Tensor, weights: Tensor, block_size: int) -> None:
        """Add weights of the first gathered tokens, `[heads, n]`, to those of all tokens."""
        gathered, cut = weights.shape[1], self.head * block_size
        gap = (self.tail - self.head) * block_size
        sums[:, :cut] += weights[:, :cut]
        sums[:, cut + gap : gathered + gap] += weights[:, cut:]


@attrs.frozen(eq=False)
class Tile:
    """Consecutive new tokens of one sequence, in some of its K/V heads.

    Attributes:
        sequence: number of the sequence in the step.
        row: row in the step of the first of the tokens.
        heads: the K/V heads, a range of them.
        reach: the blocks that the tokens attend to.
        keys, values: rows of `LayerTensor.by_head` with their K/V, head after head,
            `[heads * blocks]`.
        bags: for a single token whose V is not gathered: the rows of
            `LayerTensor.by_token` of V, once for each query head, and where each query
            head begins in them; None otherwise.
        blocks: the blocks of the reach, on the host.
        by_position: whether a window leaves out tokens by `RaggedBatch.held_positions`; the
            reach is without a window then.
    """

    sequence: int
    row: int
    heads: slice
    reach: Reach
    keys: Tensor
    values: Tensor
    bags: tuple[Tensor, Tensor] | None
    blocks: Tensor
    by_position: bool


@attrs.frozen(eq=False)
class DecodeGroup:
    """One new token for each of several sequences with contexts of about equal length.

    Attributes:
        sequences: numbers of the sequences in the step.
        rows: rows in the step of the new tokens, `[sequences]`.
        places: places in their sequences of the gathered tokens, `[sequences, tokens]`, on
            the host.
        keys, values: rows of `LayerTensor.by_token`, `[sequences * kv_heads * tokens]`. A
            sequence that is shorter than the longest is padded with its new token.
        mask: which of them are no padding, bool `[sequences, 1, 1, tokens]`; None: all.
    """

    sequences: list[int]
    rows: Tensor
    places: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None


@attrs.frozen(eq=False)
class KernelPart:
    """Single new tokens that a `DecodeKernel` computes, as it has planned it."""

    plan: Any


Part: TypeAlias = Tile | DecodeGroup | KernelPart
"""Some of the new tokens of a step."""


@attrs.frozen
class _Divider:
    """Divides the new tokens of steps into tiles and groups.

    Attributes:
        pool: the pool whose blocks are attended to.
        group_bytes: bytes of K/V of a layer that a group may gather.
        tile_bytes: bytes of K/V that a tile of a single token may gather.
        bags: whether tiles of a single token get `Tile.bags`.
        kernel: what computes single tokens; None: torch, in groups and tiles.
        state: is told why torch computes single tokens though there is a kernel.
    """

    pool: Pool
    group_bytes: int
    tile_bytes: int
    bags: bool
    kernel: DecodeKernel | None
    state: Callable[[str], None]

    def divide(
        self,
        batch: RaggedBatch,
        tables: list[Tensor],
        group: int,
        window: int | None,
        sinks: int,
        weighed: bool,  # noqa: FBT001 - part of a kind
    ) -> Iterator[Part]:
        """Yield parts that hold every new token of the step once.

        `group` query heads share a K/V head; tables are on the host; `weighed` says that
        attention weights are to be summed up. O(blocks), and O(tokens) of groups.
        """
        size = self.pool.layout.block_size
        firsts = [0, *accumulate(batch.lengths)]
        singles = []
        for number, (context, length) in enumerate(
            zip(batch.contexts, batch.lengths, strict=True)
        ):
            by_position = window is not None and batch.has_lost_tokens(number)
            if length == 1 and not by_position:
                singles.append((_attended(context, window, sinks), number))
                continue
            # Positions are in no order, so that nothing is left out by its place.
            kind = (None, 0) if by_position else (window, sinks)
            whole = Reach.of(context, length, *kind, size)
            masks = self.pool.layout.kv_heads if by_position else 1
            causal = whole.causal and not by_position
            step = length if causal else max(1, MAX_MASK_PAIRS // whole.total // masks)
            for done in range(0, length, step):
                part = min(step, length - done)
                reach = Reach.of(context + done, part, *kind, size)
                row = firsts[number] + done
                yield from self._tiles(
                    number, row, reach, tables[number], group, by_position=by_position
                )
            if length == 1 and self.kernel is not None:
                self.state(BY_POSITION)
        if singles and self._is_for_kernel(group, sinks, weighed=weighed):
            assert self.kernel is not None
            own = [
                Single(number, firsts[number], batch.contexts[number]) for _, number in singles
            ]
            yield KernelPart(self.kernel.plan(own, tables, group, window, sinks))
            return
        singles.sort(reverse=True)
        while singles:
            count = self._group_size([tokens for tokens, _ in singles])
            members = [number for _, number in singles[:count]]
            del singles[:count]
            if count > 1:
                contexts = [batch.contexts[number] for number in members]
                held = [tables[number] for number in members]
                starts = [firsts[number] for number in members]
                yield self._group(members, starts, contexts, held, window, sinks)
            else:
                (number,) = members
                reach = Reach.of(batch.contexts[number], 1, window, sinks, size)
                yield from self._tiles(number, firsts[number], reach, tables[number], group)

    def _is_for_kernel(self, group: int, sinks: int, *, weighed: bool) -> bool:
        """Return True if there is a kernel that takes such layers; state why it does not."""
        if self.kernel is None:
            return False
        reason = self.kernel.refusal(group, sinks, weighed=weighed)
        if reason is not None:
            self.state(reason)
        return reason is None

    @property
    def _token_bytes(self) -> int:
        """Bytes of K/V of one token in one head."""
        layout = self.pool.layout
        return (layout.head_dim + layout.value_dim) * self.pool.dtype.itemsize

    def _group_size(self, tokens: list[int]) -> int:
        """Return how many sequences the next group takes; `tokens` is sorted downwards.

        One if K/V cannot be read token by token.
        """
        if not self.pool.by_token:
            return 1
        longest = tokens[0]
        most = self.group_bytes // (longest * self.pool.layout.kv_heads * self._token_bytes)
        least = longest - max(GROUP_SPREAD, longest // 8)
        alike = sum(1 for count in tokens if count >= least)
        return max(1, min(most, alike))

    def _tiles(
        self,
        sequence: int,
        row: int,
        reach: Reach,
        table: Tensor,
        group: int,
        *,
        by_position: bool = False,
    ) -> Iterator[Tile]:
        """Yield the tiles of consecutive tokens: one for each range of heads."""
        pool, size = self.pool, self.pool.layout.block_size
        end = -(-(reach.context + reach.length) // size)
        blocks = torch.cat((table[: reach.head], table[reach.tail : end]))
        single = reach.length == 1
        count = pool.layout.kv_heads
        step = count
        if single:
            step = max(1, self.tile_bytes // (len(blocks) * size * self._token_bytes))
        heads = torch.arange(count)[:, None]
        keys, values = (
            blocks * parts[0].row_stride + heads for parts in (pool.keys, pool.values)
        )
        held = reach.total * pool.layout.value_dim * pool.dtype.itemsize
        with_bags = self.bags and single and held <= BAG_BYTES
        if with_bags:
            places = torch.arange(reach.total)
            tokens = pool.values[0].token_rows(blocks[places // size], places % size)
        for first in range(0, count, step):
            some = slice(first, min(first + step, count))
            bags = None
            if with_bags:
                rows = tokens[some, None].repeat(1, group, 1).flatten()
                begins = torch.arange(0, len(rows), reach.total)
                bags = pool.upload(rows), pool.upload(begins)
            yield Tile(
                sequence,
                row,
                some,
                reach,
                pool.upload(keys[some].flatten()),
                pool.upload(values[some].flatten()),
                bags,
                blocks,
                by_position,
            )

    def _group(
        self,
        members: list[int],
        starts: list[int],
        contexts: list[int],
        tables: list[Tensor],
        window: int | None,
        sinks: int,
    ) -> DecodeGroup:
        """Return the group of sequences whose new tokens are the rows `starts`."""
        pool, size = self.pool, self.pool.layout.block_size
        own = torch.tensor(contexts)[:, None]
        counts = torch.tensor([_attended(context, window, sinks) for context in contexts])
        places = torch.arange(int(counts.max())).expand(len(contexts), -1)
        mask = places < counts[:, None]
        full = bool(mask.all())
        # What is left out lies between the sinks and the window. Places past the end of a
        # sequence are its new token again: they are masked, but must have been stored.
        gap = own + 1 - counts[:, None]
        places = torch.where(places < sinks, places, places + gap).minimum(own)
        firsts = torch.tensor([0, *accumulate(map(len, tables[:-1]))])[:, None]
        blocks = torch.cat(tables)[firsts + places // size]
        keys, values = (
            pool.upload(parts[0].token_rows(blocks, places % size).flatten())
            for parts in (pool.keys, pool.values)
        )
        rows = pool.upload(torch.tensor(starts))
        masked = None if full else pool.upload(mask[:, None, None])
        return DecodeGroup(members, rows, places, keys, values, masked)


def _attended(context: int, window: int | None, sinks: int) -> int:
    """Return the number of tokens that the one after `context` attends to."""
    total = context + 1
    return total if window is None else min(total, window + sinks)


@attrs.frozen(eq=False)
class StepPlan:
    """A `RaggedBatch`, ready for `store` and `attend` of every layer.

    Parts are made once for each kind of layer, which is how many query heads share a K/V
    head, a window, sinks, and whether weights are summed up. Masks are kept for the layers
    that follow, up to `KEPT_MASK_BYTES` of them.

    Attributes:
        batch: the batch.
        tables: its block tables, in host memory.
        key_slots, value_slots: a row of `LayerTensor.by_token` for each new token and head,
            `[rows * kv_heads]`.
        writes: the new tokens by block, where a codec codes blocks.
    """

    batch: RaggedBatch
    tables: list[Tensor]
    key_slots: Tensor
    value_slots: Tensor
    writes: Writes | None
    _parts: dict[tuple[int, int | None, int, bool], list[Part]] = attrs.field(
        init=False, factory=dict
    )
    _masks: dict[Reach, Tensor] = attrs.field(init=False, factory=dict)

    def parts(
        self,
        divider: _Divider,
        group: int,
        window: int | None,
        sinks: int,
        *,
        weighed: bool = False,
    ) -> list[Part]:
        """Return the parts of layers of a kind."""
        kind = group, window, sinks, weighed
        if kind not in self._parts:
            self._parts[kind] = [*divider.divide(self.batch, self.tables, *kind)]
        return self._parts[kind]

    def mask(self, reach: Reach, pool: Pool) -> Tensor | None:
        """Return `Reach.mask`, perhaps of an earlier layer."""
        found = self._masks.get(reach)
        if found is None:
            found = reach.mask(pool.layout.block_size, pool.device)
            kept = sum(mask.nbytes for mask in self._masks.values())
            if found is not None and kept + found.nbytes <= KEPT_MASK_BYTES:
                self._masks[reach] = found
        return found

    def mask_by_position(
        self, tile: Tile, layer: int, window: int | None, sinks: int, pool: Pool
    ) -> Tensor:
        """Return what each token of `tile` attends to, bool `[heads, length, total]`."""
        batch, number, end = self.batch, tile.sequence, tile.row + tile.reach.length
        held = torch.as_tensor(batch.held_positions[number])
        # Of a hole in the blocks all layers and heads have the same.
        held = held[layer, tile.heads] if held.dim() > 1 else held[None]
        first = tile.row - (tile.reach.context - batch.contexts[number])
        new = torch.tensor(batch.positions[first:end])
        there = torch.cat((held, new.expand(len(held), -1)), 1)[:, None]
        here = new[tile.row - first :, None]
        assert window is not None
        seen = (there <= here) & ((there > here - window) | (there < sinks))
        return pool.upload(seen)


class Sdpa:
    """Gathers the attended K/V piece by piece, and calls torch on each piece.

    Nothing is repeated for the query heads that share a K/V head: of a single query they
    are the rows of one small matrix, for a chunk K/V is expanded without a copy. Neither
    blocks out of the window are read nor slots behind a sequence's last token.

    Of single queries, those of short contexts are gathered and computed together, a long
    one by itself, as many heads at a time as the caches hold. In fp32 and fp64 on a CPU, V
    of a long one is not gathered at all: `embedding_bag` adds up its rows where they lie.

    Source: Dao et al., "FlashAttention", NeurIPS 2022, for what torch does; Kwon et al.,
    "Efficient memory management for large language model serving with PagedAttention",
    SOSP 2023, for attention over block tables.
    """

    def __init__(
        self, pool: Pool, kernel: DecodeKernel | None, state: Callable[[str], None]
    ) -> None:
        group_bytes = tile_bytes = GPU_GATHER_BYTES
        on_cpu = pool.device.type == "cpu"
        if on_cpu:
            group_bytes = CPU_GATHER_BYTES
            tile_bytes = 2 * CPU_GATHER_BYTES * torch.get_num_threads()
        bags = on_cpu and isinstance(pool.values[0], LayerTensor)
        bags = bags and pool.dtype in {torch.float32, torch.float64}
        self._pool = pool
        self._divider = _Divider(pool, group_bytes, tile_bytes, bags, kernel, state)
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
        writes = self._pool.writes(batch, tables)
        return StepPlan(batch, tables, *self._pool.slots(batch, tables), writes)

    def attend(
        self,
        layer: int,
        plan: StepPlan,
        queries: Tensor,
        scale: float | None,
        window: int | None,
        sinks: int,
        sums: list[Tensor] | None = None,
    ) -> Tensor:
        """Return attention's output, `[rows, query_heads, value_dim]`.

        Attention weights are added to `sums` where these are given, `[kv_heads, tokens]` for
        each sequence.
        """
        layout = self._pool.layout
        rows, heads, width = queries.shape
        group = heads // layout.kv_heads
        grouped = queries.reshape(rows, layout.kv_heads, group, width)
        out = queries.new_empty(rows, layout.kv_heads, group, layout.value_dim)
        weighs = sums is not None
        for part in plan.parts(self._divider, group, window, sinks, weighed=weighs):
            if isinstance(part, KernelPart):
                assert self._divider.kernel is not None
                self._divider.kernel.attend(layer, part.plan, grouped, out, scale, sums)
                continue
            if isinstance(part, DecodeGroup):
                self._attend_group(layer, part, grouped, out, scale, sums)
                continue
            mask: Tensor | None
            if part.by_position:
                mask = plan.mask_by_position(part, layer, window, sinks, self._pool)
            else:
                mask = plan.mask(part.reach, self._pool)
            weighed = None if sums is None else sums[part.sequence][part.heads]
            if part.reach.length == 1:
                self._attend_single(layer, part, grouped, out, scale, mask, weighed)
            elif weighed is None:
                self._attend_chunk(layer, part, grouped, out, scale, mask)
            else:
                self._weigh_chunk(layer, part, grouped, out, scale, mask, weighed)
        return out.view(rows, heads, layout.value_dim)

    def _attend_group(
        self,
        layer: int,
        group: DecodeGroup,
        queries: Tensor,
        out: Tensor,
        scale: float | None,
        sums: list[Tensor] | None,
    ) -> None:
        """Compute one token of each sequence; query heads of a K/V head are its rows."""
        pool, layout = self._pool, self._pool.layout
        shape = len(group.rows), layout.kv_heads, -1
        keys = pool.keys[layer].tokens(group.keys, self.gather("keys"))
        values = pool.values[layer].tokens(group.values, self.gather("values"))
        keys, values = keys.view(*shape, layout.head_dim), values.view(*shape, layout.value_dim)
        asked = queries.index_select(0, group.rows)
        if sums is None:
            found = scaled_dot_product_attention(
                asked, keys, values, attn_mask=group.mask, scale=scale
            )
        else:
            weights = _weights(asked, keys, scale, group.mask)
            found = weights.to(values.dtype) @ values
            places = pool.upload(group.places)
            for number, there, got in zip(group.sequences, places, weights.sum(2), strict=True):
                sums[number].index_add_(1, there, got)
        out.index_copy_(0, group.rows, found)

    def _attend_single(
        self,
        layer: int,
        tile: Tile,
        queries: Tensor,
        out: Tensor,
        scale: float | None,
        mask: Tensor | None,
        sums: Tensor | None,
    ) -> None:
        """Compute one token in some heads, without gathering V where the tile has bags."""
        asked = queries[tile.row, tile.heads]
        keys = self._keys(layer, tile)
        if tile.bags is None and sums is None:
            values = self._values(layer, tile)
            found = scaled_dot_product_attention(
                asked[None], keys[None], values[None], attn_mask=mask, scale=scale
            )
        else:
            weights = _weights(asked, keys, scale, mask)
            if tile.bags is None:
                found = weights.to(keys.dtype) @ self._values(layer, tile)
            else:
                stored = self._pool.values[layer]
                assert isinstance(stored, LayerTensor)
                found = embedding_bag(
                    tile.bags[0],
                    stored.by_token,
                    tile.bags[1],
                    mode="sum",
                    per_sample_weights=weights.flatten(),
                )
            if sums is not None:
                tile.reach.add(sums, weights.sum(1), self._pool.layout.block_size)
        place = out[tile.row, tile.heads]
        place.copy_(found.view(place.shape))

    def _attend_chunk(
        self,
        layer: int,
        tile: Tile,
        queries: Tensor,
        out: Tensor,
        scale: float | None,
        mask: Tensor | None,
    ) -> None:
        """Compute several tokens of one sequence, with K/V expanded to the query heads."""
        rows = slice(tile.row, tile.row + tile.reach.length)
        asked = queries[rows].permute(1, 2, 0, 3)  # [kv_heads, group, length, head_dim]
        shared = -1, asked.shape[1], -1, -1
        found = scaled_dot_product_attention(
            asked,
            self._keys(layer, tile)[:, None].expand(shared),
            self._values(layer, tile)[:, None].expand(shared),
            attn_mask=mask[:, None] if tile.by_position and mask is not None else mask,
            is_causal=mask is None and tile.reach.causal,
            scale=scale,
        )
        out[rows] = found.permute(2, 0, 1, 3)

    def _weigh_chunk(
        self,
        layer: int,
        tile: Tile,
        queries: Tensor,
        out: Tensor,
        scale: float | None,
        mask: Tensor | None,
        sums: Tensor,
    ) -> None:
        """Compute what `_attend_chunk` does, some tokens at a time, and sum up the weights."""
        keys, values, reach = self._keys(layer, tile), self._values(layer, tile), tile.reach
        heads, group = queries.shape[1:3]
        exact = sums.dtype.itemsize
        step = max(1, WEIGHED_BYTES // (heads * group * reach.total * exact))
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
            asked = queries[rows].transpose(0, 1)  # [kv_heads, rows, group, head_dim]
            part = part.repeat_interleave(group, -2)
            weights = _weights(asked.flatten(1, 2), keys[:, :seen], scale, part)
            found = weights.to(values.dtype) @ values[:, :seen]
            out[rows] = found.view(*asked.shape[:3], -1).transpose(0, 1)
            reach.add(sums, weights.sum(1), self._pool.layout.block_size)

    def _keys(self, layer: int, tile: Tile) -> Tensor:
        """Gather K of a tile, `[heads, total, head_dim]`."""
        half, gather = self._pool.keys[layer], self.gather("keys")
        return half.heads(tile.keys, tile.blocks, tile.heads, gather)[:, : tile.reach.total]

    def _values(self, layer: int, tile: Tile) -> Tensor:
        """Gather V of a tile, `[heads, total, value_dim]`."""
        half, gather = self._pool.values[layer], self.gather("values")
        return half.heads(tile.values, tile.blocks, tile.heads, gather)[:, : tile.reach.total]

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


def _weights(queries: Tensor, keys: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    """Return attention weights in fp32 or better, `[..., rows, tokens]`.

    Queries are `[..., rows, head_dim]`, keys `[..., tokens, head_dim]`.
    """
    scale = 1 / sqrt(queries.shape[-1]) if scale is None else scale
    scores = (queries * scale) @ keys.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return scores.softmax(-1)
