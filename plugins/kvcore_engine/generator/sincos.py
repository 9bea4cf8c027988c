"""K/V without a model: sines and cosines of token, position, layer and dimension."""

from __future__ import annotations

from functools import cache
from math import sin, tau
from typing import Any, ClassVar

import attrs

from kvcore import Backend, Generator, InputError
from kvcore.engine import Attend, RaggedBatch, Tensor
from kvcore.models.spec import ModelSpec
from kvcore_engine.generator._shape import resized
from kvcore_engine.tokens import hashed

PERIOD = 2**18
"""Steps of phase in a circle: phases are whole steps, and no vocabulary in use is larger."""


# Odd, hence invertible, and far from round: neighbours are far apart on the circle.
TOKEN, PLACE, LAYER = 162_013, 108_583, 200_717


QUERY, VALUE = PERIOD // 8, PERIOD // 4


@attrs.define(slots=False, eq=False)
class SinCos(Generator):
    """Computes K/V that costs next to nothing and identifies its token: sines, no weights.

    In steps of 1 / 2^18 of a circle, dimension d (counted over all heads) has the phase

        (2d + 1) · 162,013 · token + (d + 1) · 108,583 · position + 200,717 · layer

    A key is its sine, a value its cosine, and a query the sine an eighth of a circle later.
    No two pairs of a token and a position below 2^18 have the same phases. Phases are
    integers and sines are looked up, so the same token at the same position has the same
    bytes in any batch. The next token is a hash of the sequence's seed, the token's place
    in the output, and the token before it; the output of attention is not used.

    Options:
        model: a name of the catalogue; in code also a `ModelSpec`. K/V has its size.
        layers, heads, kv_heads, head_dim: sizes in place of the model's.
        vocab_size: number of token ids, at most 2^18.

    Raises:
        InputError: the model is unknown or has a latent (MLA), or the sizes do not fit.
    """

    name: ClassVar[str] = "sincos"

    model: str | ModelSpec = attrs.field(default="llama-3.1-8b")
    layers: int | None = attrs.field(default=None)
    heads: int | None = attrs.field(default=None)
    kv_heads: int | None = attrs.field(default=None)
    head_dim: int | None = attrs.field(default=None)
    vocab_size: int = attrs.field(default=32_768)

    _spec: ModelSpec = attrs.field(init=False, repr=False)
    _sines: Tensor = attrs.field(init=False, default=None, repr=False)
    _rates: tuple[Tensor, Tensor] = attrs.field(init=False, default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        """Resolve the model's shape."""
        self._spec = resized(
            self.model,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )
        if not 1 <= self.vocab_size <= PERIOD:
            msg = f"sincos: vocab_size must be 1 to {PERIOD:,}, not {self.vocab_size}"
            raise InputError(msg)

    @property
    def spec(self) -> ModelSpec:
        """The shape of K/V. Its parameters are those of the model, and not used."""
        return self._spec

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.vocab_size

    def load(self, backend: Backend, dtype: str) -> None:
        """Tabulate a circle of sines: 2^18 numbers."""
        super().load(backend, dtype)
        spec = self._spec
        width = max(spec.query_heads, spec.kv_heads) * max(spec.head_dim, spec.value_dim)
        self._sines = backend.tensor(_circle(), dtype)
        self._rates = (
            backend.tensor([(2 * d + 1) * TOKEN % PERIOD for d in range(width)]),
            backend.tensor([(d + 1) * PLACE % PERIOD for d in range(width)]),
        )

    def forward(self, batch: RaggedBatch, attend: Attend) -> list[int | None]:
        """Store and attend to sines, layer by layer; return hashes."""
        spec = self._spec
        tokens = self.backend.tensor(batch.token_ids)[:, None]
        positions = self.backend.tensor(batch.positions)[:, None]
        phases = tokens * self._rates[0] + positions * self._rates[1]
        for layer, window in enumerate(spec.windows):
            shifted = phases + LAYER * layer
            attend(
                layer,
                self._waves(shifted + QUERY, spec.query_heads, spec.head_dim),
                self._waves(shifted, spec.kv_heads, spec.head_dim),
                self._waves(shifted + VALUE, spec.kv_heads, spec.value_dim),
                window=window,
            )
        return self._next(batch)

    def _waves(self, phases: Tensor, heads: int, width: int) -> Tensor:
        """Return the sines of the first phases of each row, `[rows, heads, width]`."""
        sines: Any = self._sines[phases[:, : heads * width] % PERIOD]
        return sines.reshape(len(phases), heads, width)

    def _next(self, batch: RaggedBatch) -> list[int | None]:
        """Return a hash of seed, output index and last token of each sequence."""
        sequences = zip(batch.last_rows, batch.output_indices, batch.seeds, strict=True)
        return [
            None
            if index is None
            else hashed(seed, index, batch.token_ids[row]) % self.vocab_size
            for row, index, seed in sequences
        ]


@cache
def _circle() -> list[float]:
    """Return the sines of a whole period."""
    return [sin(tau * i / PERIOD) for i in range(PERIOD)]
