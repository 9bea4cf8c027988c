"""Medusa: heads that read the model's hidden state, and predict further ahead than its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs
from attrs.validators import ge, gt, lt

from kvcore import Backend, Generator, InputError, LatencyModel
from kvcore.engine import RaggedBatch, Tensor, attend_through
from kvcore.lazy import LazyModule
from kvcore.serving import StepWork
from kvcore_engine.drafter.token_drafter import Draft, DraftSequence, TokenDrafter
from kvcore_plugins.drafter.cost import HeadCost

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())

TEXTS = 32
"""Texts that are generated at a time to fit the heads."""


@attrs.define(slots=False, eq=False)
class Medusa(TokenDrafter):
    """Draft with heads on the served model: head i predicts the token i places after the next.

    Heads are linear maps from the hidden state that the next token was drawn from to the
    vocabulary. They are fitted to texts that the model itself continues (self-distillation),
    by ridge regression, before the run, in the blocks of its pool: seconds for a tiny model.
    Those of the paper have a residual layer each, are trained by gradients, and draft several
    candidates in a tree. Needs a generator that exposes its hidden states: `transformer`.

    Options:
        tokens: number of heads, k.
        texts, length: number of texts that the heads are fitted to, and tokens of each.
        ridge: weight of the penalty on the size of the heads, above 0 and finite.

    Raises:
        InputError: the generator exposes no hidden states, or the pool has no room for a text.

    Source: Cai et al., "Medusa: simple LLM inference acceleration framework with multiple
    decoding heads", ICML 2024.
    """

    name: ClassVar[str] = "medusa"

    tokens: int = attrs.field(default=4)
    texts: int = attrs.field(default=64, validator=ge(1))
    length: int = attrs.field(default=64, validator=ge(2))
    ridge: float = attrs.field(default=1.0, validator=[gt(0), lt(float("inf"))])

    _heads: Tensor = attrs.field(init=False, repr=False, default=None)
    _states: dict[int | str, Tensor] = attrs.field(init=False, repr=False, factory=dict)
    _generator: Generator = attrs.field(init=False, repr=False)
    _cost: HeadCost = attrs.field(init=False, repr=False)

    def load(self, generator: Generator, backend: Backend, seed: int) -> None:
        """Fit the heads to texts that the model writes."""
        self._generator = generator
        blocks = -(-self.length // backend.layout.block_size)
        room = backend.layout.blocks // blocks
        if not room:
            msg = (
                f"medusa: a text of {self.length} tokens needs {blocks} blocks, and the pool "
                f"has {backend.layout.blocks}: give more, or a smaller length"
            )
            raise InputError(msg)
        states, tokens = [], []
        for first in range(0, self.texts, min(room, TEXTS)):
            count = min(room, TEXTS, self.texts - first)
            written = self._written(backend, seed, range(first, first + count), blocks)
            states.append(written[0])
            tokens.append(written[1])
        inputs, outputs = torch.cat(states).double(), torch.cat(tokens)
        self._heads = torch.stack(
            [
                self._fitted(inputs[:, :-ahead], outputs[:, ahead:])
                for ahead in range(1, self.tokens + 1)
            ]
        )
        hidden, vocabulary = self._heads.shape[1:]
        self._cost = HeadCost(self.latency, self.tokens * hidden * vocabulary)

    def attach(self, latency: LatencyModel, seed: int = 0) -> None:
        """Check that texts are longer than the heads look ahead."""
        super().attach(latency, seed)
        if self.tokens >= self.length:
            msg = f"medusa: length={self.length} must be above tokens={self.tokens}"
            raise InputError(msg)

    def drafts(self, sequences: Sequence[DraftSequence]) -> list[Draft]:
        """Return the likeliest token of each head."""
        states = torch.stack([self._states[sequence.request] for sequence in sequences])
        states = states.to(self._heads.dtype)
        heads = self._heads[: max(sequence.most for sequence in sequences)]
        # Head by head: the scores of all heads and sequences may be a large tensor.
        ahead = torch.stack([(states @ head).argmax(-1) for head in heads], 1).tolist()
        return [
            Draft(tokens[: sequence.most])
            for sequence, tokens in zip(sequences, ahead, strict=True)
        ]

    def on_drawn(self, requests: Sequence[int | str], rows: Sequence[int]) -> None:
        """Keep the states that the newest tokens were drawn from."""
        states = self._generator.states
        for name, row in zip(requests, rows, strict=True):
            # A copy: a view would keep the states of the whole step in memory.
            self._states[name] = states[row].clone()

    def on_end(self, requests: Sequence[int | str]) -> None:
        """Drop the states of requests."""
        for request in requests:
            self._states.pop(request, None)

    def duration(self, work: StepWork, drafts: Sequence[int]) -> int:
        """Return the time of the heads."""
        return self._cost.duration(work, drafts)

    def _fitted(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return a head, `[hidden, vocabulary]`: from states to the tokens that came."""
        inputs = states.flatten(0, 1)
        wanted = torch.nn.functional.one_hot(tokens.flatten(), self._generator.vocabulary)
        penalty = self.ridge * torch.eye(inputs.shape[1], dtype=inputs.dtype)
        return torch.linalg.solve(
            inputs.T @ inputs + penalty.to(inputs), inputs.T @ wanted.to(inputs)
        )

    def _written(
        self, backend: Backend, seed: int, texts: range, blocks: int
    ) -> tuple[Tensor, Tensor]:
        """Return states, `[texts, length, hidden]`, and the tokens drawn from them."""
        generator, count = self._generator, len(texts)
        tables = [range(n * blocks, (n + 1) * blocks) for n in range(count)]
        newest = [(seed + 1 + 7919 * text) % generator.vocabulary for text in texts]
        states, tokens = [], []
        for position in range(self.length):
            batch = RaggedBatch(
                block_tables=[
                    [*table[: position // backend.layout.block_size + 1]] for table in tables
                ],
                contexts=[position] * count,
                lengths=[1] * count,
                token_ids=newest,
                positions=[position] * count,
                output_indices=[position] * count,
                seeds=[*texts],
            )
            attend = attend_through(backend.plan(batch), backend.store_rotated, backend.attend)
            newest = [token or 0 for token in generator.forward(batch, attend)]
            if generator.states is None:
                msg = (
                    f"medusa: generator {generator.name!r} does not tell its hidden states: "
                    "take `transformer`"
                )
                raise InputError(msg)
            states.append(generator.states)
            tokens.append(torch.tensor(newest, device=generator.states.device))
        return torch.stack(states, 1), torch.stack(tokens, 1)
