"""The new tokens of a step, divided into parts that are computed by one call each.

They are divided once for all layers of a kind: a chunk of a prefill into *tiles*, the tokens of
decoding sequences into *groups* of about equal context, or, where the context is long, into
tiles of some heads each. A kernel that attends to blocks in place takes all single tokens, and
chunks too if it can.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import neg
from typing import Any, ClassVar, NamedTuple, TypeAlias

import attrs
import torch
from torch import Tensor

from kvcore.engine import RaggedBatch
from kvcore_engine.backend._pool import Pool, Writes

BAG_BYTES = 3 << 19
"""Bytes of V of a head up to which its rows are added up in place, not gathered.

Each query head that shares them adds them up again: they must stay in a core's own cache.
With four query heads that took 0.93 of the time at 1 MiB, and 1.2 times it at 3 MiB.
"""

MAX_MASK_PAIRS = 1 << 24
"""Pairs of tokens that a mask may have; longer chunks are cut into tiles."""

KEPT_MASK_BYTES = 1 << 26
"""Bytes of masks that a step keeps from layer to layer."""

GROUP_SPREAD = 64
"""Contexts of a group differ by at most this many tokens, or an eighth of the longest."""

BY_POSITION = "a window is by the positions of a sequence that has lost tokens"
"""Why torch computes a single token although there is a kernel."""

LEARNED = "kernels have no scores of learned sinks"
"""Likewise, for all tokens of a layer."""


class LayerKind(NamedTuple):
    """The properties of a layer by which a step is divided.

    Attributes:
        group: number of query heads that share a K/V head.
        window, sinks: as in `Backend.attend`.
        weighed: whether attention weights are summed up.
        learned: whether there are `sink_logits`.
    """

    group: int
    window: int | None
    sinks: int
    weighed: bool = False
    learned: bool = False

    def attended(self, context: int) -> int:
        """Return the number of tokens that the token after `context` tokens attends to."""
        total = context + 1
        return total if self.window is None else min(total, self.window + self.sinks)


class NewToken(NamedTuple):
    """A new token of a sequence, or several one after the other.

    Attributes:
        number: number of the sequence in the step.
        row: row of the first of the tokens in the step.
        context: number of tokens before it.
        length: number of the tokens.
    """

    number: int
    row: int
    context: int
    length: int = 1


class AttentionKernel(ABC):
    """Computes attention of new tokens over blocks in place, instead of torch.

    Attributes:
        plans_on_device: whether there is `plan_decode`.
    """

    plans_on_device: ClassVar[bool] = False

    @abstractmethod
    def refusal(self, kind: LayerKind) -> str | None:
        """Return why the kernel leaves layers of a kind to torch; None if it does not."""

    def takes_chunks(self, kind: LayerKind) -> bool:
        """Return True if the kernel also computes several new tokens of one sequence."""
        return False

    @abstractmethod
    def plan(self, tokens: list[NewToken], tables: list[Tensor], kind: LayerKind) -> Any:
        """Return what the layers of a kind share; tables of all sequences are on the host.

        The tokens are single ones, or chunks if the kernel takes them.
        """

    def plan_decode(self, tables: Tensor, contexts: Tensor, kind: LayerKind) -> Any:
        """Return the plan of a step of single tokens, made on the device, for graphs.

        Without reading a number there, and in shapes that do not depend on the contexts. Needs
        `plans_on_device`.
        """
        raise NotImplementedError

    @abstractmethod
    def attend(
        self,
        layer: int,
        plan: Any,
        queries: Tensor,
        out: Tensor,
        scale: float | None,
        sums: list[Tensor] | None,
    ) -> None:
        """Compute the rows of the plan, `[rows, kv_heads, group, value_dim]` of `out`.

        Attention weights are added to `sums`, if it is given, as `Sdpa.attend` does.
        """


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
    def from_lengths(
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

        None if no mask is needed: for a triangle, and if all tokens are attended to.
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
            reach has no window then.
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
    """Single new tokens, or chunks, that an `AttentionKernel` computes, by its own plan."""

    plan: Any


Part: TypeAlias = Tile | DecodeGroup | KernelPart
"""Some of the new tokens of a step."""


@attrs.frozen
class Divider:
    """Divides the new tokens of steps into tiles and groups.

    Attributes:
        pool: the pool whose blocks are attended to.
        group_bytes: bytes of K/V of a layer that a group may gather.
        tile_bytes: bytes of K/V that a tile of a single token may gather.
        bags: whether tiles of a single token get `Tile.bags`.
        kernel: computes what it can; None: torch does, in groups and tiles.
        on_fallback: called with the reason why torch computes tokens although there is a
            kernel for them.
    """

    pool: Pool
    group_bytes: int
    tile_bytes: int
    bags: bool
    kernel: AttentionKernel | None
    on_fallback: Callable[[str], None]

    def divide(
        self,
        batch: RaggedBatch,
        tables: list[Tensor],
        kind: LayerKind,
        lengths: Sequence[int] | None = None,
    ) -> Iterator[Part]:
        """Yield parts that together hold every new token of the step once.

        With `lengths`, only the first so many new tokens of each sequence. Tables are on the
        host. O(blocks), and O(tokens) of groups.
        """
        firsts = [0, *accumulate(batch.lengths)]
        singles: list[NewToken] = []
        chunks: list[NewToken] = []
        kernel = self._kernel_for(kind)
        takes_chunks = kernel is not None and kernel.takes_chunks(kind)
        for index, (context, length) in enumerate(
            zip(batch.contexts, batch.lengths if lengths is None else lengths, strict=True)
        ):
            if not length:
                continue
            new = NewToken(index, firsts[index], context, length)
            by_position = kind.window is not None and index in batch.held_positions
            in_place = length == 1 or takes_chunks
            if in_place and not by_position:
                (singles if length == 1 else chunks).append(new)
                continue
            if in_place and kernel is not None:
                self.on_fallback(BY_POSITION)
            yield from self._chunk(new, tables[index], kind, by_position=by_position)
        if chunks:
            assert kernel is not None
            yield KernelPart(kernel.plan(chunks, tables, kind))
        if singles and kernel is not None:
            reason = kernel.refusal(kind)
            if reason is None:
                yield KernelPart(kernel.plan(singles, tables, kind))
                return
            self.on_fallback(reason)
        # Longest contexts first, so that those of a group are next to one another.
        ordered = sorted(
            ((kind.attended(token.context), token) for token in singles), reverse=True
        )
        attended = [tokens for tokens, _ in ordered]
        first = 0
        while first < len(ordered):
            count = self._group_size(attended, first)
            members = [token for _, token in ordered[first : first + count]]
            first += count
            if count > 1:
                yield self._group(members, [tables[token.number] for token in members], kind)
            else:
                (single,) = members
                size = self.pool.layout.block_size
                reach = Reach.from_lengths(single.context, 1, kind.window, kind.sinks, size)
                yield from self._tiles(single, reach, tables[single.number], kind.group)

    def _kernel_for(self, kind: LayerKind) -> AttentionKernel | None:
        """Return the kernel, which no layer with learned sinks has."""
        if kind.learned and self.kernel is not None:
            self.on_fallback(LEARNED)
            return None
        return self.kernel

    def _chunk(
        self,
        chunk: NewToken,
        table: Tensor,
        kind: LayerKind,
        *,
        by_position: bool,
    ) -> Iterator[Tile]:
        """Yield the tiles of the new tokens of a sequence."""
        size = self.pool.layout.block_size
        # Positions are in no order, so that nothing is left out by its place.
        window, sinks = (None, 0) if by_position else (kind.window, kind.sinks)
        sequence, row, context, length = chunk
        full_reach = Reach.from_lengths(context, length, window, sinks, size)
        masks = self.pool.layout.kv_heads if by_position else 1
        causal = full_reach.causal and not by_position
        step = length if causal else max(1, MAX_MASK_PAIRS // full_reach.total // masks)
        for done in range(0, length, step):
            part = min(step, length - done)
            reach = Reach.from_lengths(context + done, part, window, sinks, size)
            begin = NewToken(sequence, row + done, context + done, part)
            yield from self._tiles(begin, reach, table, kind.group, by_position=by_position)

    @property
    def _token_bytes(self) -> int:
        """Bytes of K/V of one token in one head."""
        layout = self.pool.layout
        return (layout.head_dim + layout.value_dim) * self.pool.dtype.itemsize

    def _group_size(self, tokens: list[int], first: int) -> int:
        """Return how many sequences the group from `first` takes; `tokens` is sorted downwards.

        One if K/V cannot be read token by token.
        """
        if not self.pool.by_token:
            return 1
        longest = tokens[first]
        limit = self.group_bytes // (longest * self.pool.layout.kv_heads * self._token_bytes)
        least = longest - max(GROUP_SPREAD, longest // 8)
        similar = bisect_right(tokens, -least, first, key=neg) - first
        return max(1, min(limit, similar))

    def _tiles(
        self,
        begin: NewToken,
        reach: Reach,
        table: Tensor,
        group: int,
        *,
        by_position: bool = False,
    ) -> Iterator[Tile]:
        """Yield a tile for each range of heads of the tokens of a reach, from `begin` on."""
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
        value_bytes = reach.total * pool.layout.value_dim * pool.dtype.itemsize
        with_bags = self.bags and single and value_bytes <= BAG_BYTES
        if with_bags:
            positions = torch.arange(reach.total)
            tokens = pool.values[0].token_rows(blocks[positions // size], positions % size)
        for first in range(0, count, step):
            some = slice(first, min(first + step, count))
            bags = None
            if with_bags:
                rows = tokens[some, None].repeat(1, group, 1).flatten()
                begins = torch.arange(0, len(rows), reach.total)
                bags = pool.upload(rows), pool.upload(begins)
            yield Tile(
                begin.number,
                begin.row,
                some,
                reach,
                pool.upload(keys[some].flatten()),
                pool.upload(values[some].flatten()),
                bags,
                blocks,
                by_position,
            )

    def _group(
        self, members: list[NewToken], tables: list[Tensor], kind: LayerKind
    ) -> DecodeGroup:
        """Return the group of the new tokens `members`, with the tables of their sequences."""
        pool, size = self.pool, self.pool.layout.block_size
        own = torch.tensor([token.context for token in members])[:, None]
        counts = torch.tensor([kind.attended(token.context) for token in members])[:, None]
        positions = torch.arange(int(counts.max())).expand(len(members), -1)
        mask = positions < counts
        # Tokens between the sinks and the window are left out. Places past the end of a
        # sequence are its new token again: they are masked, but must have been stored.
        positions = torch.where(positions < kind.sinks, positions, positions + own + 1 - counts)
        positions = positions.minimum(own)
        firsts = torch.tensor([0, *accumulate(map(len, tables[:-1]))])[:, None]
        blocks = torch.cat(tables)[firsts + positions // size]
        keys, values = (
            pool.upload(parts[0].token_rows(blocks, positions % size).flatten())
            for parts in (pool.keys, pool.values)
        )
        return DecodeGroup(
            [token.number for token in members],
            pool.upload(torch.tensor([token.row for token in members])),
            positions,
            keys,
            values,
            None if bool(mask.all()) else pool.upload(mask[:, None, None]),
        )


@attrs.frozen(eq=False)
class StepPlan:
    """A `RaggedBatch`, ready for `store` and `attend` of every layer.

    Parts are made once for each kind of layer. Masks are kept for the layers that follow, up
    to `KEPT_MASK_BYTES` of them.

    Attributes:
        batch: the batch.
        tables: its block tables, in host memory.
        divider: divides the batch into parts.
        key_slots, value_slots: a row of `LayerTensor.by_token` for each new token and head,
            `[rows * kv_heads]`.
        writes: the new tokens by block, where a codec codes blocks.
        on_device: tables, `[sequences, blocks]`, and contexts of a step of single tokens that
            is planned on the device; `tables` is empty then.
    """

    batch: RaggedBatch
    tables: list[Tensor]
    divider: Divider
    key_slots: Tensor
    value_slots: Tensor
    writes: Writes | None
    on_device: tuple[Tensor, Tensor] | None = None
    _parts: dict[Any, list[Part]] = attrs.field(init=False, factory=dict)
    _masks: dict[Reach, Tensor] = attrs.field(init=False, factory=dict)

    def parts(self, kind: LayerKind, lengths: Sequence[int] | None = None) -> list[Part]:
        """Return the parts of layers of a kind; `lengths` as for `Divider.divide`."""
        key = kind, None if lengths is None else tuple(lengths)
        if key not in self._parts:
            kernel = self.divider.kernel
            if self.on_device is None:
                divided = self.divider.divide(self.batch, self.tables, kind, lengths)
                self._parts[key] = [*divided]
            else:
                assert kernel is not None
                self._parts[key] = [KernelPart(kernel.plan_decode(*self.on_device, kind))]
        return self._parts[key]

    @property
    def recordable(self) -> bool:
        """Whether a kernel that plans on the device has computed all parts so far."""
        kernel = self.divider.kernel
        parts = (part for parts in self._parts.values() for part in parts)
        return (
            kernel is not None
            and kernel.plans_on_device
            and all(isinstance(part, KernelPart) for part in parts)
        )

    def mask(self, tile: Tile, layer: int, kind: LayerKind) -> Tensor | None:
        """Return what each token of `tile` attends to; None if no mask is needed.

        Bool, `[length, total]`, or `[heads, length, total]` for a tile by position.
        """
        if tile.by_position:
            return self._mask_by_position(tile, layer, kind)
        pool, reach = self.divider.pool, tile.reach
        mask = self._masks.get(reach)
        if mask is None:
            mask = reach.mask(pool.layout.block_size, pool.device)
            kept = sum(other.nbytes for other in self._masks.values())
            if mask is not None and kept + mask.nbytes <= KEPT_MASK_BYTES:
                self._masks[reach] = mask
        return mask

    def _mask_by_position(self, tile: Tile, layer: int, kind: LayerKind) -> Tensor:
        """Return the mask of a tile by the positions of the held tokens."""
        batch, sequence, end = self.batch, tile.sequence, tile.row + tile.reach.length
        held_positions = torch.as_tensor(batch.held_positions[sequence])
        # Where whole blocks were dropped, all layers and heads hold the same tokens.
        held_positions = (
            held_positions[layer, tile.heads]
            if held_positions.dim() > 1
            else held_positions[None]
        )
        first = tile.row - (tile.reach.context - batch.contexts[sequence])
        new = torch.tensor(batch.positions[first:end])
        positions = torch.cat((held_positions, new.expand(len(held_positions), -1)), 1)[:, None]
        here = new[tile.row - first :, None]
        assert kind.window is not None
        near = (positions > here - kind.window) | (positions < kind.sinks)
        return self.divider.pool.upload((positions <= here) & near)
