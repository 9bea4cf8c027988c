"""Next tokens: from hashes, or from logits, greedily or sampled.

Whatever looks random depends on a seed and a position alone, never on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvcore.engine import RaggedBatch

if TYPE_CHECKING:
    from torch import Tensor


def hashed(*parts: int) -> int:
    """Return a 64-bit hash of all of `parts`."""
    written = " ".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(written, digest_size=8).digest(), "little")


def uniform(*parts: int) -> float:
    """Return a number in [0, 1), one of 2^53 evenly spaced, derived from all of `parts`."""
    return (hashed(*parts) >> 11) / 2**53


def sample(
    logits: Tensor, marks: Sequence[tuple[int, int]], temperature: float, top_k: int | None
) -> list[int]:
    """Return a token id for each row of `[sequences, vocabulary]` logits.

    By inversion: the first token at which the cumulated probability passes a number in
    [0, 1) derived from the row's mark. So rows do not influence one another.

    Args:
        logits: one row for each token to sample.
        marks: for each row the seed of its sequence, and the index of the token in the
            output.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: number of the likeliest tokens to sample from (with those as likely as the
            last); None: all.
    """
    import torch  # noqa: PLC0415 - hashes need no torch

    if not temperature:
        likeliest: list[int] = logits.argmax(dim=-1).tolist()
        return likeliest
    reached = probabilities(logits, temperature, top_k).cumsum(dim=-1)
    sums = reached[:, -1:].contiguous()
    levels = reached.new_tensor([uniform(*mark) for mark in marks]).unsqueeze(-1)
    tokens = torch.searchsorted(reached, levels * sums, right=True)
    # A level that rounding lifts to the sum is the last token's that has a probability.
    tokens = tokens.minimum(torch.searchsorted(reached, sums))
    drawn: list[int] = tokens.squeeze(-1).tolist()
    return drawn


def probabilities(logits: Tensor, temperature: float, top_k: int | None = None) -> Tensor:
    """Return what `sample` draws from, in fp64: 1 for the likeliest token without temperature.

    The arguments are as for `sample`.
    """
    import torch  # noqa: PLC0415 - hashes need no torch

    scores = logits.double()
    if not temperature:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1)
    # The likeliest token has 0, so that no quotient is infinite but where nothing is drawn.
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        least = scores.topk(top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    return scores.softmax(dim=-1)


def sampled_rows(batch: RaggedBatch) -> list[int]:
    """Return the last row of each sequence that generates a token in this step."""
    rows = zip(batch.last_rows, batch.output_indices, strict=True)
    return [row for row, index in rows if index is not None]


def next_tokens(
    batch: RaggedBatch, logits: Tensor, temperature: float, top_k: int | None = None
) -> list[int | None]:
    """Return the next token of each sequence of a step, None where it generates none.

    `logits` has a row for each of `sampled_rows`; the rest is as for `sample`.
    """
    marks = [
        (seed, index)
        for seed, index in zip(batch.seeds, batch.output_indices, strict=True)
        if index is not None
    ]
    drawn = iter(sample(logits, marks, temperature, top_k))
    return [None if index is None else next(drawn) for index in batch.output_indices]
