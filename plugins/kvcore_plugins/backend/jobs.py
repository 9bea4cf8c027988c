"""What the new tokens of a step attend to: tiles of one sequence, batches of short ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import attrs
import torch
from torch import Tensor

from kvcore.engine import Rows
from kvcore_plugins.backend.pool import Pool
from kvcore_plugins.backend.steps import token_rows

MASKED_PAIRS = 1 << 24
"""Pairs of tokens a mask may have: longer chunks are cut into tiles."""


LEEWAY = 64
"""Contexts of a batch differ by so many tokens, or an eighth of the longest, at most."""


@attrs.frozen(kw_only=True)
class Reach:
    """The blocks that consecutive tokens of a sequence attend to.

    Attributes:
        context, length: tokens before, and tokens.
        window, sinks: as in `Backend.attend`; window is None if it leaves nothing out.
        head, tail: these are the first `head` blocks and those from `tail` on.
        total: tokens in these, up to the last new one.
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
        """Return the reach of `length` tokens after `context`."""
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
        """Whether the mask is the plain triangle."""
        return not self.context and self.window is None and self.length > 1

    def mask(self, block_size: int, device: torch.device) -> Tensor | None:
        """Return which tokens each new one attends to, `[length, total]`.

        None where no mask is needed: for a triangle, and if all are attended to.
        """
        if self.causal or (self.window is None and self.length == 1):
            return None
        places = torch.arange(self.total, device=device)
        places[self.head * block_size :] += (self.tail - self.head) * block_size
        own = torch.arange(self.context, self.context + self.length, device=device)[:, None]
        seen = places <= own
        if self.window is not None:
            seen &= (places > own - self.window) | (places < self.sinks)
        return seen


@attrs.frozen(eq=False)
class Tile:
    """Consecutive new tokens of one sequence, in some of its K/V heads.

    Attributes:
        row: of the first of them in the step.
        heads: which ones.
        reach: what they attend to.
        keys, values: the rows of `Part.runs` that hold it, head after head.
        sums: for a single token, if the kernel wants them: the rows of `Part.tokens` of the
            values, once for each query head, and where each of these begins.
    """

    row: int
    heads: slice
    reach: Reach
    keys: Tensor
    values: Tensor
    sums: tuple[Tensor, Tensor] | None


@attrs.frozen(eq=False)
class Batch:
    """A new token of each of some sequences whose contexts are about as long.

    Attributes:
        rows: of the new tokens in the step, `[sequences]`.
        keys, values: rows of `Part.tokens`, `[sequences * kv_heads * tokens]`. A sequence
            that is shorter than others is filled up with its new token.
        mask: which ones are no filling, `[sequences, 1, 1, tokens]`; None: all.
    """

    rows: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None


@attrs.frozen(eq=False)
class Planner:
    """Divides steps into jobs.

    Attributes:
        pool: whose blocks are attended to.
        room, piece: bytes of K/V of a layer that a batch may gather, and the heads of a
            single sequence.
        sums: whether single tokens get `Tile.sums`.
    """

    pool: Pool
    room: int
    piece: int
    sums: bool

    def jobs(
        self, rows: Rows, tables: list[Tensor], group: int, window: int | None, sinks: int
    ) -> Iterator[Tile | Batch]:
        """Yield the jobs of a step, in which `group` query heads share a K/V head.

        Every new token is in one of them. Tables are on the host. O(blocks), and O(tokens)
        of batches.
        """
        size = self.pool.layout.block_size
        firsts = [0, *accumulate(rows.lengths)]
        singles = []
        for number, (context, length) in enumerate(
            zip(rows.contexts, rows.lengths, strict=True)
        ):
            if length == 1:
                singles.append((_attended(context, window, sinks), number))
                continue
            whole = Reach.of(context, length, window, sinks, size)
            step = length if whole.causal else max(1, MASKED_PAIRS // whole.total)
            for done in range(0, length, step):
                part = min(step, length - done)
                reach = Reach.of(context + done, part, window, sinks, size)
                yield from self._tiles(firsts[number] + done, reach, tables[number], group)
        singles.sort(reverse=True)
        while singles:
            count = self._fitting([tokens for tokens, _ in singles])
            members = [number for _, number in singles[:count]]
            del singles[:count]
            if count > 1:
                contexts = [rows.contexts[number] for number in members]
                held = [tables[number] for number in members]
                starts = [firsts[number] for number in members]
                yield self._batch(starts, contexts, held, window, sinks)
            else:
                (number,) = members
                reach = Reach.of(rows.contexts[number], 1, window, sinks, size)
                yield from self._tiles(firsts[number], reach, tables[number], group)

    @property
    def _token(self) -> int:
        """Bytes that a token has for a head."""
        layout = self.pool.layout
        return (layout.head_dim + layout.value_dim) * self.pool.dtype.itemsize

    def _fitting(self, tokens: list[int]) -> int:
        """Return how many sequences, longest first, are about as long and have room."""
        longest = tokens[0]
        most = self.room // (longest * self.pool.layout.kv_heads * self._token)
        least = longest - max(LEEWAY, longest // 8)
        alike = sum(1 for count in tokens if count >= least)
        return max(1, min(most, alike))

    def _tiles(self, row: int, reach: Reach, table: Tensor, group: int) -> Iterator[Tile]:
        pool, size = self.pool, self.pool.layout.block_size
        end = -(-(reach.context + reach.length) // size)
        blocks = torch.cat((table[: reach.head], table[reach.tail : end]))
        single = reach.length == 1
        count = pool.layout.kv_heads
        step = max(1, self.piece // (len(blocks) * size * self._token)) if single else count
        heads = torch.arange(count)[:, None]
        keys, values = (blocks * parts[0].step + heads for parts in (pool.keys, pool.values))
        if self.sums and single:
            places = torch.arange(reach.total)
            tokens = token_rows(pool.values[0], pool, blocks[places // size], places % size)
        for first in range(0, count, step):
            some = slice(first, min(first + step, count))
            sums = None
            if self.sums and single:
                rows = tokens[some, None].repeat(1, group, 1).flatten()
                begins = torch.arange(0, len(rows), reach.total)
                sums = pool.upload(rows), pool.upload(begins)
            yield Tile(
                row,
                some,
                reach,
                pool.upload(keys[some].flatten()),
                pool.upload(values[some].flatten()),
                sums,
            )

    def _batch(
        self,
        starts: list[int],
        contexts: list[int],
        tables: list[Tensor],
        window: int | None,
        sinks: int,
    ) -> Batch:
        pool, size = self.pool, self.pool.layout.block_size
        own = torch.tensor(contexts)[:, None]
        counts = torch.tensor([_attended(context, window, sinks) for context in contexts])
        places = torch.arange(int(counts.max())).expand(len(contexts), -1)
        mask = places < counts[:, None]
        full = bool(mask.all())
        # What is left out lies between the sinks and the window.
        gap = own + 1 - counts[:, None]
        places = torch.where(places < sinks, places, places + gap).minimum(own)
        firsts = torch.tensor([0, *accumulate(map(len, tables[:-1]))])[:, None]
        blocks = torch.cat(tables)[firsts + places // size]
        keys, values = (
            pool.upload(token_rows(parts[0], pool, blocks, places % size).flatten())
            for parts in (pool.keys, pool.values)
        )
        rows = pool.upload(torch.tensor(starts))
        return Batch(rows, keys, values, None if full else pool.upload(mask[:, None, None]))


def _attended(context: int, window: int | None, sinks: int) -> int:
    """Return how many tokens the one after `context` attends to."""
    total = context + 1
    return total if window is None else min(total, window + sinks)
