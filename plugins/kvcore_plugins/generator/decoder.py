"""The transformer itself, on torch: weights, and a pass over a ragged batch of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from kvcore.engine import Attend
from kvcore.models.spec import ModelSpec

EPSILON = 1e-6


@attrs.frozen(eq=False)
class Layer:
    """The weights of a layer, `[in, out]`.

    Attributes:
        before_attention, before_mlp: gains of the norms, `[hidden]`.
        into: to queries, keys and values, side by side.
        out: from the heads' values.
        widen: to the MLP's gate and its values, side by side.
        narrow: from them.
    """

    before_attention: Tensor
    into: Tensor
    out: Tensor
    before_mlp: Tensor
    widen: Tensor
    narrow: Tensor


class Decoder:
    """A stack of layers between an embedding and a head, with random weights.

    Matrices have a standard deviation of 1 / sqrt(in), so that what comes out is as large
    as what goes in; gains are near 1.

    Args:
        spec: layers, heads, widths, windows.
        mlp: width of the MLP.
        vocabulary: token ids there are.
        theta: base of the rotary wavelengths.
        seed: of the weights.
        place: puts weights, drawn in fp32 on the host, where and into what they belong.
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
        # What a layer computes of a token: queries, keys and values.
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
        self.speeds = (theta**-pairs).to(self.embedding.device)

    def states(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the states after the last layer, `[tokens, hidden]`."""
        spec = self.spec
        x = self.embedding[tokens]
        angles = positions[:, None, None] * self.speeds
        turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for index, (layer, window) in enumerate(zip(self.layers, spec.windows, strict=True)):
            y = self._normed(x, layer.before_attention) @ layer.into
            queries, keys, values = (
                part.reshape(-1, *shape)
                for part, shape in zip(
                    torch.split(y, self.widths, dim=-1), self.shapes, strict=True
                )
            )
            heads: Tensor = attend(
                index,
                rotated(queries, turn),
                rotated(keys, turn),
                values,
                window=window,
            )
            x = x + heads.flatten(1) @ layer.out
            gate, up = (self._normed(x, layer.before_mlp) @ layer.widen).chunk(2, dim=-1)
            x = x + (silu(gate) * up) @ layer.narrow
        return x

    def logits(self, states: Tensor) -> Tensor:
        """Return `[tokens, vocabulary]` logits of states."""
        return self._normed(states, self.last_gain) @ self.head

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        return rms_norm(x, gain.shape, gain, EPSILON)


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn dimension i and i + half of each head by the position's i-th angle."""
    cos, sin = turn
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
