"""Next tokens from logits: the likeliest, or samples that their marks alone decide."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcore_plugins.generator.hashing import uniform


def sample(
    logits: Tensor, marks: Sequence[tuple[int, int]], temperature: float, top_k: int | None
) -> list[int]:
    """Return a token for each row of `[sequences, vocabulary]` logits.

    By inversion: the first token at which the cumulated probability passes a number in
    [0, 1) made of the row's mark, its seed and its place. Rows never see one another.

    Args:
        logits: a row for each token to draw.
        marks: seed and place of each.
        temperature: 0 takes the likeliest.
        top_k: how many of the likeliest to draw from (with those as likely as the last).
    """
    if not temperature:
        likeliest: list[int] = logits.argmax(dim=-1).tolist()
        return likeliest
    scores = logits.double() / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        least = scores.topk(top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    reached = scores.softmax(dim=-1).cumsum(dim=-1)
    sums = reached[:, -1:].contiguous()
    levels = reached.new_tensor([uniform(*mark) for mark in marks]).unsqueeze(-1)
    tokens = torch.searchsorted(reached, levels * sums, right=True)
    # A level that rounding lifts to the sum is the last token's that has a probability.
    tokens = tokens.minimum(torch.searchsorted(reached, sums))
    drawn: list[int] = tokens.squeeze(-1).tolist()
    return drawn
