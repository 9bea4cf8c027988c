"""A generator: a model, as far as its K/V and its next tokens go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from kvcore import Backend
from kvcore.engine import Attend, RaggedBatch
from kvcore.lazy import LazyModule
from kvcore.models.spec import ModelSpec
from kvcore_engine.generator.sampling import SamplingGenerator

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())


@attrs.define(slots=False, eq=False)
class Example(SamplingGenerator):
    """One layer of attention over random embeddings, without positions: a bag of tokens.

    Options:
        vocab_size: number of token ids.
        heads, head_dim: heads of the layer, and their width.
        seed: seed of the embeddings.
        temperature: divides the logits before sampling; 0: the likeliest token is taken.
    """

    name: ClassVar[str] = "example"
    vocab_size: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    heads: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    head_dim: int = attrs.field(default=16, validator=attrs.validators.ge(2))
    seed: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    temperature: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))

    @property
    def spec(self) -> ModelSpec:
        """The shape of the model: layers, heads, widths."""
        return ModelSpec(
            name=self.name,
            layers=1,
            query_heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.head_dim,
            hidden_size=self.heads * self.head_dim,
            parameters=3 * self.vocab_size * self.heads * self.head_dim,
            dtype="fp32",
        )

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.vocab_size

    def load(self, backend: Backend, dtype: str) -> None:
        """Draw the queries, keys and values of all tokens, and put them on the device."""
        super().load(backend, dtype)
        source = torch.Generator().manual_seed(self.seed)
        shape = 3, self.vocab_size, self.heads, self.head_dim
        self._embeddings = backend.tensor(torch.randn(shape, generator=source), dtype)

    def logits(self, batch: RaggedBatch, attend: Attend) -> Any:
        """Run a step; return the logits of the sequences that sample."""
        queries, keys, values = self._embeddings[:, self.backend.tensor(batch.token_ids)]
        heads = attend(0, queries, keys, values)[batch.sampled_rows]
        return heads.flatten(1) @ self._embeddings[2].flatten(1).T
