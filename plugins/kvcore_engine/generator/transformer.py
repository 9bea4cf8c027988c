"""A small decoder-only transformer with random weights: real matrix products, any shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from kvcore import Backend, InputError, StorageError
from kvcore.engine import Attend, RaggedBatch, Rotary, Tensor
from kvcore.models.codec import PLANE_BYTES
from kvcore.models.spec import ModelSpec
from kvcore.units import format_bytes
from kvcore_engine.generator._shape import resized
from kvcore_engine.generator.sampling import SamplingGenerator

if TYPE_CHECKING:
    from kvcore_engine.generator._decoder import Decoder


TINY = ModelSpec(
    name="tiny",
    layers=2,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    hidden_size=64,
    parameters=1,
    dtype="fp32",
)
"""The default shape. Its parameters are counted when the options are known."""


@attrs.define(slots=False, eq=False)
class Transformer(SamplingGenerator):
    """A decoder-only model of Llama's architecture, with seeded random weights.

    Pre-norm layers of grouped-query attention and a gated MLP: RMSNorm, rotary positions
    (keys are cached rotated), SwiGLU. Its texts make no sense, but every number of them is
    as hard to get right as a trained model's. Weights are drawn on the host in fp32,
    layer after layer, so they are the same numbers on every device and, rounded, in every
    dtype, and a model with fewer layers has the first of them. The MLP of a model with
    experts is a dense one.

    Options:
        model: a name of the catalogue; in code also a `ModelSpec`; None: a tiny model of 2
            layers, 64 wide, with 4 heads of 16 and 2 K/V heads.
        layers, hidden, heads, kv_heads, head_dim: sizes in place of the model's.
        mlp: width of the MLP; None: 8/3 of `hidden`, rounded up to a multiple of 16.
        vocab_size: number of token ids.
        window: number of tokens that no layer attends beyond; None: the model's windows.
        rope_theta: base of the rotary wavelengths.
        seed: seed of the weights.
        temperature: divides the logits before sampling; 0: greedy.
        top_k: number of the likeliest tokens to sample from; None: all.

    Raises:
        InputError: the model is unknown or has a latent (MLA), the sizes do not fit, or
            `head_dim` is odd.

    Source: Touvron et al., "LLaMA", 2023; Su et al., "RoFormer", 2021; Zhang and Sennrich,
    "Root mean square layer normalization", 2019; Shazeer, "GLU variants improve
    transformer", 2020; Ainslie et al., "GQA", 2023.
    """

    name: ClassVar[str] = "transformer"
    capturable: ClassVar[bool] = True

    model: str | ModelSpec | None = attrs.field(default=None)
    layers: int | None = attrs.field(default=None)
    hidden: int | None = attrs.field(default=None)
    heads: int | None = attrs.field(default=None)
    kv_heads: int | None = attrs.field(default=None)
    head_dim: int | None = attrs.field(default=None)
    mlp: int | None = attrs.field(default=None)
    vocab_size: int = attrs.field(default=512)
    window: int | None = attrs.field(default=None)
    rope_theta: float = attrs.field(default=10_000.0)
    seed: int = attrs.field(default=0)
    temperature: float = attrs.field(default=0.0)
    top_k: int | None = attrs.field(default=None)

    _spec: ModelSpec = attrs.field(init=False, repr=False)
    _width: int = attrs.field(init=False, repr=False)
    _decoder: Decoder = attrs.field(init=False, default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        """Look up the model's shape and count its parameters."""
        spec = resized(
            TINY if self.model is None else self.model,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden=self.hidden,
        )
        self._width = -(-spec.hidden_size // 6) * 16 if self.mlp is None else self.mlp
        self._check(spec)
        parameters = self._parameters(spec)
        spec = attrs.evolve(
            spec,
            experts=0,
            experts_per_token=0,
            extra_bytes=0,
            extra_expert_bytes=0,
            parameters=parameters,
            active_parameters=parameters,
        )
        self._spec = spec if self.window is None else spec.with_window(self.window)

    @property
    def spec(self) -> ModelSpec:
        """The shape of the model, its parameters counted."""
        return self._spec

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.vocab_size

    @property
    def rotary(self) -> tuple[Rotary | None, ...]:
        """The rotary embedding, the same in all layers."""
        return (self._decoder.rotary,) * self._spec.layers

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of all weights."""
        return self._spec.parameters * PLANE_BYTES[dtype]

    def load(self, backend: Backend, dtype: str) -> None:
        """Draw the weights and put them on the backend's device.

        Raises:
            InputError: no tensor has this dtype.
            StorageError: the weights do not fit into memory.
        """
        from kvcore_engine.generator._decoder import Decoder  # noqa: PLC0415 - torch

        super().load(backend, dtype)
        try:
            self._decoder = Decoder(
                self._spec,
                mlp=self._width,
                vocabulary=self.vocab_size,
                theta=self.rope_theta,
                seed=self.seed,
                place=lambda weights: backend.tensor(weights, dtype),
            )
        except (RuntimeError, MemoryError) as error:
            size, (reason, *_) = self.weight_bytes(dtype), str(error).split("\n")
            msg = (
                f"the weights of {self._spec.name}, {format_bytes(size)} in {dtype}, cannot be "
                "made: give fewer layers, as in layers=2, a smaller dtype, or another model "
                f"({reason or 'too little memory'})"
            )
            raise StorageError(msg) from error

    def logits(self, batch: RaggedBatch, attend: Attend) -> Tensor:
        """Run a step; return the logits of the sequences that sample, before temperature.

        `[sequences with an output index, vocabulary]`.
        """
        tensor = self.backend.tensor
        tokens, positions = tensor(batch.token_ids), tensor(batch.positions)
        states = self._decoder.states(tokens, positions, attend, fused=batch.fuses_rotation)
        rows = batch.sampled_rows
        self.states = states if len(rows) == len(states) else states[rows]
        return self._decoder.logits(self.states)

    def _parameters(self, spec: ModelSpec) -> int:
        """Return the count of numbers in all weight matrices and norms."""
        hidden = spec.hidden_size
        queries, keys = spec.query_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        values, outputs = spec.kv_heads * spec.value_dim, spec.query_heads * spec.value_dim
        layer = hidden * (queries + keys + values + outputs + 3 * self._width + 2)
        return 2 * self.vocab_size * hidden + spec.layers * layer + hidden

    def _check(self, spec: ModelSpec) -> None:
        """Raise InputError for options that `ModelSpec` cannot check."""
        problem = None
        if spec.head_dim % 2:
            problem = f"rotary positions turn pairs: head_dim must be even, not {spec.head_dim}"
        elif self._width < 1:
            problem = f"mlp must be 1 or more, not {self._width}"
        elif self.vocab_size < 1:
            problem = f"vocab_size must be 1 or more, not {self.vocab_size}"
        elif not 0 <= self.seed < 2**63:
            problem = f"seed must be 0 to 2^63 - 1, not {self.seed}"
        elif not self.rope_theta > 0:
            problem = f"rope_theta must be above 0, not {self.rope_theta}"
        elif not 0 <= self.temperature < float("inf"):
            problem = f"temperature must be 0 (greedy) or above, not {self.temperature}"
        elif self.top_k is not None and self.top_k < 1:
            problem = f"top_k must be 1 or more, not {self.top_k}"
        if problem:
            msg = f"transformer: {problem}"
            raise InputError(msg)
