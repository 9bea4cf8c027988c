"""Next tokens from logits: the likeliest, or samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import repeat
from typing import TYPE_CHECKING, ClassVar

import attrs

from kvcore import Backend, Generator, InputError
from kvcore.engine import Attend, RaggedBatch, Sampling
from kvcore.lazy import LazyModule
from kvcore_engine.tokens import uniform

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch", globals())


_LEAST = 1e-300
"""A probability that no token has."""


@attrs.define(slots=False, eq=False, auto_attribs=False)
class SamplingGenerator(Generator):
    """A generator that samples from logits with torch: a derived class defines `logits`.

    A sample depends on the logits, the seed of its sequence and its index in the output
    alone, never on the other sequences of a batch.

    Attributes:
        temperature: divides the logits before sampling; 0: the likeliest token is taken. An
            option where a derived class makes it one, as is `top_k`.
        capturable: whether `logits` of a step in which each row samples launches the same work
            whatever the batch holds, and takes `token_ids` and `positions` on the device, so
            that a graph of it can be replayed.
        top_k: number of the likeliest tokens to sample from; None: all.
    """

    takes_sampling: ClassVar[bool] = True
    capturable: ClassVar[bool] = False

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
        return self.sampled(self.logits(batch, attend), batch)

    def sampled(self, logits: Tensor, batch: RaggedBatch) -> list[int | None]:
        """Return the likeliest tokens, or samples, of the logits of a step."""
        sequences = zip(batch.seeds, batch.output_indices, strict=False)
        marks = [(seed, index) for seed, index in sequences if index is not None]
        return batch.spread(sample(logits, marks, self._samplings(batch)))

    def probabilities(self, batch: RaggedBatch, attend: Attend) -> Tensor:
        """Run a step; return the distributions that tokens are sampled from."""
        logits = self.logits(batch, attend).double()
        samplings = self._samplings(batch)
        rows = [row for row, sampling in enumerate(samplings) if sampling.temperature]
        if len(rows) == len(samplings):
            return probabilities(logits, samplings)
        chances = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
        if rows:
            chances[rows] = probabilities(logits[rows], [samplings[row] for row in rows])
        return chances

    def _samplings(self, batch: RaggedBatch) -> list[Sampling]:
        """Return how the token of each sequence is drawn, where one is generated."""
        own = Sampling(self.temperature, self.top_k)
        sequences = zip(batch.output_indices, batch.samplings or repeat(own), strict=False)
        return [sampling or own for index, sampling in sequences if index is not None]


def sample(
    logits: Tensor, marks: Sequence[tuple[int, int]], samplings: Sequence[Sampling]
) -> list[int]:
    """Return a token id for each row of `[sequences, vocabulary]` logits.

    By inversion: the first token at which the cumulated probability passes a number in
    [0, 1) derived from the row's mark. So rows do not influence one another.

    Args:
        logits: one row for each token to sample.
        marks: for each row the seed of its sequence, and the index of the token in the
            output.
        samplings: for each row the way in which it is drawn.

    Raises:
        InputError: a row that is sampled has NaN, or infinite logits.
    """
    rows = [row for row, sampling in enumerate(samplings) if sampling.temperature]
    tokens: list[int] = []
    if len(rows) < len(samplings):
        tokens = logits.argmax(dim=-1).tolist()
        if not rows:
            return tokens
        logits = logits[rows]
    chances = probabilities(logits, [samplings[row] for row in rows]).cumsum(dim=-1)
    sums = chances[:, -1:].contiguous()
    levels = chances.new_tensor([uniform(*marks[row]) for row in rows]).unsqueeze(-1)
    ids = torch.searchsorted(chances, levels * sums, right=True)
    # A level that rounding lifts to the sum is the last token's that has a probability.
    drawn: list[int] = ids.minimum(torch.searchsorted(chances, sums)).squeeze(-1).tolist()
    if max(drawn, default=0) >= logits.shape[-1]:
        msg = (
            "the logits of a step are NaN or infinite, so that no token can be sampled: look "
            "at the weights, or compute in a dtype of a larger range, such as fp32"
        )
        raise InputError(msg)
    if not tokens:
        return drawn
    for row, token in zip(rows, drawn, strict=True):
        tokens[row] = token
    return tokens


def probabilities(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return the distributions of `sample`, in fp64; all temperatures are above 0.

    Of tokens as likely as the last that `top_k` or `top_p` keeps, all are kept.
    """
    scores = logits.double()
    vocabulary = scores.shape[-1]

    def column(values: Iterable[float]) -> Tensor:
        return scores.new_tensor(list(values)).unsqueeze(-1)

    # The likeliest token has 0, so that no quotient is infinite but where nothing is drawn.
    scores = (scores - scores.amax(-1, keepdim=True)) / column(
        sampling[0] for sampling in samplings
    )
    ranks = [min(sampling.top_k or vocabulary, vocabulary) for sampling in samplings]
    if min(ranks, default=vocabulary) < vocabulary:
        ranked = scores.topk(max(ranks)).values
        least = ranked.gather(-1, column(ranks).long() - 1)
        scores = scores.masked_fill(scores < least, float("-inf"))
    chances = scores.softmax(dim=-1)
    if any(sampling.top_p < 1 for sampling in samplings):
        ranked = chances.sort(descending=True).values
        likelier = ranked.cumsum(dim=-1) - ranked
        # Rounding may lift a sum above 1, which must cut off nothing of other rows.
        # The likeliest token, with nothing before it, stays whatever the limit.
        limits = column(
            max(sampling.top_p, _LEAST) if sampling.top_p < 1 else 2.0 for sampling in samplings
        )
        least = ranked.masked_fill(likelier >= limits, 2.0).amin(dim=-1, keepdim=True)
        chances = scores.masked_fill(chances < least, float("-inf")).softmax(dim=-1)
    return chances
