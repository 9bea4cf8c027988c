"""The generator contract: a model, as far as its K/V and its next tokens go."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, TypedDict, Unpack

import attrs

from kvcore.engine.backend import Backend, Tensor
from kvcore.models.spec import ModelSpec
from kvcore.plugins.base import Plugin

if TYPE_CHECKING:
    from kvcore.serving.latency import Windows


class AttendOptions(TypedDict, total=False):
    """How a layer attends, as `Backend.attend` explains it; what is left out is as there."""

    scale: float | None
    window: int | None
    sinks: int


class Attend(Protocol):
    """What a generator is given to reach the cache."""

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        **how: Unpack[AttendOptions],
    ) -> Tensor:
        """Store K/V of the step's tokens in the paged cache; return attention's output.

        Shapes and options are those of `Backend.store` and `Backend.attend`.
        """


@attrs.frozen
class TokenStep:
    """The tokens of one step: a ragged batch, the rows of its sequences one after another.

    Attributes:
        tokens, positions: token ids, and their places in their sequences, a row each.
        lengths: rows of each sequence.
        draws: for each sequence, whether the step ends with a new token, and which one of
            its sequence's output that is, from 0; None: it is an inner chunk of a prefill.
        seeds: for each sequence, what its samples are drawn from.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    lengths: Sequence[int]
    draws: Sequence[int | None]
    seeds: Sequence[int]


class Generator(Plugin):
    """Turns tokens into K/V and next tokens, layer by layer, through a paged cache.

    Deterministic: what a sequence generates depends on its own tokens and seed alone, never
    on what else is in the batch.

    Attributes:
        backend: where its tensors live; set by `load`.
        dtype: what it computes in, one of `TENSOR_DTYPES`.
    """

    kind: ClassVar[str] = "generator"

    backend: Backend
    dtype: str = "fp32"

    @property
    @abstractmethod
    def spec(self) -> ModelSpec:
        """The shape of the model: layers, heads, widths."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """How many token ids there are, from 0."""

    @property
    def windows(self) -> Windows:
        """The attention window of each layer."""
        return self.spec.windows

    @property
    def ends(self) -> frozenset[int]:
        """The token ids that end a text; none, unless overridden."""
        return frozenset()

    def load(self, backend: Backend, dtype: str) -> None:
        """Put the weights on the backend's device. Called once, before the pool is allocated.

        Of the backend it needs `tensor` alone.

        Raises:
            InputError: a dtype it cannot compute in.
        """
        self.backend = backend
        self.dtype = dtype

    @abstractmethod
    def forward(self, step: TokenStep, attend: Attend) -> list[int | None]:
        """Run a step; return the next token of each sequence, None where `draws` is None."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`: a word each, hashed, where there is no tokenizer."""
        from kvcore.request import word_tokens  # noqa: PLC0415 - hashing is for texts alone

        return word_tokens(text, self.vocabulary)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`: their ids, where there is no tokenizer."""
        return " ".join(map(str, tokens))
