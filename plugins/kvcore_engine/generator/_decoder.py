"""The network of the `transformer` generator: weights, and a pass over a ragged batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from kvcore.engine import Attend, Rotary, Rotation
from kvcore.models.spec import ModelSpec

EPSILON = 1e-6


@attrs.frozen(eq=False)
class Layer:
    """The weights of a layer, `[in, out]`.

    Attributes:
        attention_norm, mlp_norm: gains of the norms before attention and MLP, `[hidden]`.
        qkv: projection to queries, keys and values, side by side.
        out: projection of the heads' outputs, back to `hidden`.
        gate_up: projection to the MLP's gate and up values, side by side.
        down: projection of the MLP back to `hidden`.
    """

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """A stack of layers between an embedding and a head, with random weights.

    Matrices have a standard deviation of 1 / sqrt(in), so that outputs are as large as
    inputs; gains are near 1.

    Args:
        spec: layers, heads, widths, windows.
        mlp: width of the MLP.
        vocabulary: number of token ids.
        theta: base of the rotary wavelengths.
        seed: seed of the weights.
        place: returns weights, which are drawn in fp32 on the host, on the device and in
            the dtype of the model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        mlp: int,
        vocabulary: int,
        theta: float,
        seed: int,
        place: Callable[[Tensor], Tensor],
    ) -> None:
        source = torch.Generator().manual_seed(seed)
        normal = partial(torch.randn, generator=source, dtype=torch.float32)

        def matrix(rows: int, columns: int) -> Tensor:
            return place(normal(rows, columns) / rows**0.5)

        def gain() -> Tensor:
            return place(1 + normal(spec.hidden_size) / 10)

        hidden = spec.hidden_size
        self.spec = spec
        # Heads and width of the queries, keys and values that a layer computes.
        self.shapes = (
            (spec.query_heads, spec.head_dim),
            (spec.kv_heads, spec.head_dim),
            (spec.kv_heads, spec.value_dim),
        )
        self.widths = [heads * width for heads, width in self.shapes]
        self.embedding = place(normal(vocabulary, hidden))
        self.head = matrix(hidden, vocabulary)
        self.last_gain = gain()
        self.layers = [
            Layer(
                gain(),
                matrix(hidden, sum(self.widths)),
                matrix(spec.query_heads * spec.value_dim, hidden),
                gain(),
                matrix(hidden, 2 * mlp),
                matrix(mlp, hidden),
            )
            for _ in range(spec.layers)
        ]
        pairs = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
        speeds = theta**-pairs
        self.rotary = Rotary(tuple(speeds.tolist()))
        self.speeds = speeds.to(self.embedding.device)

    def states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, *, fused: bool = False
    ) -> Tensor:
        """Return the hidden states after the last layer, `[rows, hidden]`.

        `tokens` and `positions` are `[rows]`. With `fused`, which is
        `RaggedBatch.fuses_rotation`, `attend` gets keys with their rotation.
        """
        spec = self.spec
        x = self.embedding[tokens]
        angles = positions[:, None] * self.speeds
        wide = torch.promote_types(x.dtype, torch.float32)
        rotation = Rotation(angles.cos().to(wide), angles.sin().to(wide))
        for index, (layer, window) in enumerate(zip(self.layers, spec.windows, strict=True)):
            y = self._normed(x, layer.attention_norm) @ layer.qkv
            queries, keys, values = (
                part.reshape(-1, *shape)
                for part, shape in zip(
                    torch.split(y, self.widths, dim=-1), self.shapes, strict=True
                )
            )
            turned = rotation.rotate(queries)
            heads: Tensor = (
                attend(index, turned, keys, values, window=window, rotation=rotation)
                if fused
                else attend(index, turned, rotation.rotate(keys), values, window=window)
            )
            x = x + heads.flatten(1) @ layer.out
            gate, up = (self._normed(x, layer.mlp_norm) @ layer.gate_up).chunk(2, dim=-1)
            x = x + (silu(gate) * up) @ layer.down
        return x

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of hidden states, `[rows, vocabulary]`."""
        return self._normed(states, self.last_gain) @ self.head

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        return rms_norm(x, gain.shape, gain, EPSILON)
