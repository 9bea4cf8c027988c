"""Next tokens from logits: the likeliest, or samples."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import attrs

from kvcore import Backend, Generator, InputError
from kvcore.engine import Attend, RaggedBatch
from kvcore.lazy import LazyModule
from kvcore_engine.tokens import uniform

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch", globals())


@attrs.define(slots=False, eq=False, auto_attribs=False)
class SamplingGenerator(Generator):
    """A generator that samples from logits with torch: a derived class defines `logits`.

    A sample depends on the logits, the seed of its sequence and its index in the output
    alone, never on the other sequences of a batch.

    Attributes:
        temperature: divides the logits before sampling; 0: the likeliest token is taken. An
            option where a derived class makes it one, as is `top_k`.
        top_k: number of the likeliest tokens to sample from; None: all.
    """

    temperature: float = 0.0
    top_k: int | None = None

    @classmethod
    def unavailable(cls) -> str | None:
        """Return that torch is needed, if it is not installed."""
        return None if find_spec("torch") else "needs torch: pip install 'kvcore[torch]'"

    def load(self, backend: Backend, dtype: str) -> None:
        """Set the backend and the dtype.

        Raises:
            InputError: the tensors of the backend are not those of torch, or no tensor has this
                dtype.
        """
        super().load(backend, dtype)
        if not isinstance(backend.tensor([0]), torch.Tensor):
            msg = (
                f"generator {self.name!r} computes with torch, and the tensors of backend "
                f"{backend.name!r} are others: take torch-cpu, or generator `sincos`"
            )
            raise InputError(msg)

    def forward(self, batch: RaggedBatch, attend: Attend) -> list[int | None]:
        """Run a step; return the likeliest tokens, or samples."""
        marks = [
            (seed, index)
            for seed, index in zip(batch.seeds, batch.output_indices, strict=True)
            if index is not None
        ]
        logits = self.logits(batch, attend)
        return batch.spread(sample(logits, marks, self.temperature, self.top_k))

    def probabilities(self, batch: RaggedBatch, attend: Attend) -> Tensor:
        """Run a step; return the distributions that tokens are sampled from."""
        return probabilities(self.logits(batch, attend), self.temperature, self.top_k)


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
    """Return the distributions of `sample`, in fp64; without temperature 1 for one token.

    The arguments are as for `sample`.
    """
    scores = logits.double()
    if not temperature:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1)
    # The likeliest token has 0, so that no quotient is infinite but where nothing is drawn.
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        least = scores.topk(top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    return scores.softmax(dim=-1)
