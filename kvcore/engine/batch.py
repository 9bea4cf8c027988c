"""The tokens of one step, as the executor passes them to the generator and the backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, TypeVar

import attrs

T = TypeVar("T")

Tensor: TypeAlias = Any
"""A tensor of the backend's library."""


class Sampling(NamedTuple):
    """The way in which the tokens of a sequence are drawn from logits.

    Attributes:
        temperature: divides the logits; 0: the likeliest token is taken.
        top_k: number of the likeliest tokens to draw from; None: all.
        top_p: probability that the likeliest tokens to draw from have together, or more.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0


@attrs.frozen
class RaggedBatch:
    """The new tokens of one step: all sequences one after another, without padding.

    The tensors of the step have one row for each new token: the first `lengths[0]` rows
    belong to sequence 0, the next `lengths[1]` rows to sequence 1, and so on. A backend
    reads `block_tables`, `contexts` and `lengths`; a generator reads `lengths` and the
    fields below it. A caller of only one of them leaves the fields of the other empty.

    Attributes:
        block_tables: block ids of each sequence, from its first block to the block of its
            last new token, `[sequences]` of ids. The slots of new tokens are allocated.
        contexts: number of tokens whose K/V the blocks hold already, `[sequences]`.
        lengths: number of new tokens, 1 or more, `[sequences]`.
        token_ids: token id of each row, `[rows]`.
        positions: position of each row's token in its sequence, `[rows]`. The first row of
            a sequence is at its context, or further on by the tokens that a retention
            policy has dropped from the blocks.
        output_indices: index in its output of the token that the step generates for the
            sequence, from 0; None for an inner chunk of a prefill, `[sequences]`.
        seeds: seed of the samples of each sequence, `[sequences]`.
        samplings: how the tokens of each sequence are drawn, `[sequences]`; None: as those of
            the generator. Empty: all are.
        held_positions: of each sequence that has lost tokens, by its index, the position in
            the text of each of its `contexts` held ones, as integers: `[context]` if all
            layers and heads hold the same tokens, `[layers, kv_heads, context]` after a
            compaction. In layers with a window a backend reads it, and `positions`; empty if
            no layer has one.
        fuses_rotation: whether a generator may leave the rotation of its keys to `attend`,
            with the option `rotation`, and should: it costs no pass of its own there.
    """

    block_tables: Sequence[Sequence[int]] = ()
    contexts: Sequence[int] = ()
    lengths: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    positions: Sequence[int] = ()
    output_indices: Sequence[int | None] = ()
    seeds: Sequence[int] = ()
    samplings: Sequence[Sampling | None] = ()
    held_positions: Mapping[int, Any] = attrs.field(factory=dict)
    fuses_rotation: bool = False

    @property
    def total_tokens(self) -> int:
        """Number of new tokens of all sequences."""
        return sum(self.lengths)

    @property
    def last_rows(self) -> list[int]:
        """Row of the last new token of each sequence, `[sequences]`."""
        return [end - 1 for end in accumulate(self.lengths)]

    @property
    def sampled_rows(self) -> list[int]:
        """Row of the last new token of each sequence that generates a token."""
        rows = zip(self.last_rows, self.output_indices, strict=True)
        return [row for row, index in rows if index is not None]

    def spread(self, generated: Iterable[T]) -> list[T | None]:
        """Return a value for each sequence, None where it generates no token.

        `generated` has a value for each of `sampled_rows`, in order.
        """
        values = iter(generated)
        return [None if index is None else next(values) for index in self.output_indices]


def row_positions(starts: Iterable[int], lengths: Iterable[int]) -> list[int]:
    """Return `RaggedBatch.positions` of sequences that go on from `starts` by `lengths`."""
    parts = zip(starts, lengths, strict=True)
    return [place for start, n in parts for place in range(start, start + n)]
