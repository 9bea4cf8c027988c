"""What the layers of a step share: block tables as tensors, and slots of new tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor

from kvcore import InputError
from kvcore.engine import Rows
from kvcore_plugins.backend.pool import Part, Pool


@attrs.frozen(eq=False)
class Step:
    """A `Rows`, ready for `store` and `attend` of every layer.

    Attributes:
        rows: new tokens of all sequences.
        key_slots, value_slots: a row of `Part.tokens` for each new token and head.
        work: what the attention kernel has made of it.
    """

    rows: int
    key_slots: Tensor
    value_slots: Tensor
    work: Any


def host_tables(rows: Rows, pool: Pool) -> list[Tensor]:
    """Return block tables in host memory, cut to what their sequences hold. O(blocks).

    Raises:
        InputError: a sequence that computes nothing or has too few blocks, or a block that
            there is not.
    """
    size, blocks = pool.layout.block_size, pool.layout.blocks
    tables = []
    for number, (table, context, length) in enumerate(
        zip(rows.tables, rows.contexts, rows.lengths, strict=True)
    ):
        needed = -(-(context + length) // size)
        if context < 0 or length < 1:
            msg = (
                f"sequence {number} has {length} new tokens after {context}: 1 or more, after 0"
            )
            raise InputError(msg)
        if len(table) < needed:
            msg = (
                f"sequence {number} has {len(table)} blocks of {size} tokens for {context} and "
                f"{length} new tokens: {needed} are needed"
            )
            raise InputError(msg)
        ids = torch.frombuffer(array("q", table[:needed]), dtype=torch.int64)
        low, high = torch.aminmax(ids)
        if low < 0 or high >= blocks:
            wrong = int(low if low < 0 else high)
            msg = f"sequence {number} has block {wrong}: there are 0 to {blocks - 1}"
            raise InputError(msg)
        tables.append(ids)
    return tables


def token_rows(part: Part, pool: Pool, blocks: Tensor, offsets: Tensor) -> Tensor:
    """Return the rows of `part.tokens` of tokens, by block and offset: a dimension for heads.

    `[tokens]` makes `[kv_heads, tokens]`, `[n, tokens]` makes `[n, kv_heads, tokens]`.
    """
    heads = torch.arange(pool.layout.kv_heads)[:, None]
    size = pool.layout.block_size
    return (blocks[..., None, :] * part.step + heads) * size + offsets[..., None, :]


def slots(rows: Rows, tables: list[Tensor], pool: Pool) -> tuple[Tensor, Tensor]:
    """Return the rows of K and of V of the new tokens, `[tokens * kv_heads]`, on the host."""
    size = pool.layout.block_size
    lengths = torch.tensor(rows.lengths)
    sequence = torch.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths - torch.tensor(rows.contexts)
    positions = torch.arange(len(sequence)) - starts[sequence]
    firsts = torch.tensor([0, *accumulate(map(len, tables[:-1]))])
    blocks = torch.cat(tables)[firsts[sequence] + positions // size]
    keys, values = (
        token_rows(parts[0], pool, blocks, positions % size).t().flatten()
        for parts in (pool.keys, pool.values)
    )
    return keys, values


def make_step(rows: Rows, pool: Pool, plan: Callable[[Rows, list[Tensor]], Any]) -> Step:
    """Return the step of `rows`; `plan` is the attention kernel's part of it.

    Raises:
        InputError: no sequences, or block tables that do not hold them.
    """
    if not rows.tables:
        msg = "a step computes at least one sequence; there is none"
        raise InputError(msg)
    tables = host_tables(rows, pool)
    keys, values = (pool.upload(index) for index in slots(rows, tables, pool))
    return Step(rows.total, keys, values, plan(rows, tables))
