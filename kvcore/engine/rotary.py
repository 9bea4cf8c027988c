"""Rotary position embeddings: that of a layer, and the angles of the keys of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvcore.engine.batch import Tensor
from kvcore.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())


@attrs.frozen
class Rotary:
    """The rotary embedding of a layer, which puts positions into its keys and queries.

    Dimension i and its partner are rotated by `position * speeds[i]` radians. A key at
    position p that is rotated by d more is the key at p + d.

    Attributes:
        speeds: radians a position, for each pair of dimensions.
        adjacent: whether partners are 2i and 2i + 1; else i and i + half the rotated width.
            Dimensions beyond twice the `speeds` are not rotated.

    Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021.
    """

    speeds: tuple[float, ...]
    adjacent: bool = False

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the angles at `positions`, each `[..., speeds]`, in fp64.

        `positions` may be negative: differences between positions.
        """
        positions = positions.double()
        angles = positions[..., None] * positions.new_tensor(self.speeds)
        return angles.cos(), angles.sin()

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return `x`, `[..., width]`, with its pairs of dimensions rotated.

        `cos` and `sin` are those of `angles`, `[..., speeds]`, and broadcast. Averages of them
        over several positions give the average of the rotated `x`.
        """
        return _rotated(x, cos.to(x.dtype), sin.to(x.dtype), adjacent=self.adjacent)

    def rotation(self, positions: Tensor) -> Rotation:
        """Return the rotation of the keys of a step, whose tokens are at `positions`, `[rows]`.

        It is the same for all layers with this embedding. Angles are computed in fp64: in fp32
        the angle of position 100,000 would be wrong by 0.004 radians. Tables are in fp32, which
        is enough for keys of up to 32 bits.
        """
        cos, sin = self.angles(positions)
        return Rotation(cos.float(), sin.float(), adjacent=self.adjacent)


@attrs.frozen(eq=False)
class Rotation:
    """The angles by which the keys of a step are rotated: rows of tables, for `store_rotated`.

    Tables have a row for each new token, as `Rotary.rotation` makes them, or a row for each
    position of the longest text, as serving engines keep them; `places` then names rows.

    Attributes:
        cos, sin: cosines and sines, `[n, pairs]`, tensors of the backend in fp32 or fp64.
            Twice the pairs are at most the width of a key; the other numbers are not rotated.
        places: row of the tables for each new token, integers, `[rows]`; None: row i is that
            of token i.
        adjacent: whether partners are 2i and 2i + 1, as GPT-J has them; else i and i + pairs,
            as GPT-NeoX and Llama do.
    """

    cos: Tensor
    sin: Tensor
    places: Tensor | None = None
    adjacent: bool = attrs.field(default=False, kw_only=True)

    @property
    def pairs(self) -> int:
        """Number of pairs of dimensions that are rotated."""
        return int(self.cos.shape[1])

    def rotate(self, keys: Tensor) -> Tensor:
        """Return `keys`, `[rows, kv_heads, head_dim]`, rotated: a torch tensor.

        Computed in the dtype of the tables or of the keys, whichever is wider, and rounded to
        the dtype of the keys once.
        """
        keys = torch.as_tensor(keys)
        cos, sin = (torch.as_tensor(table).to(keys.device) for table in (self.cos, self.sin))
        if self.places is not None:
            places = torch.as_tensor(self.places).to(keys.device)
            cos, sin = cos[places], sin[places]
        turned = _rotated(keys, cos[:, None], sin[:, None], adjacent=self.adjacent)
        return turned.to(keys.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, adjacent: bool) -> Tensor:
    """Return `x`, `[..., width]`, rotated by angles that broadcast, `[..., pairs]`."""
    pairs = cos.shape[-1]
    if adjacent:
        a, b = x[..., : 2 * pairs].unflatten(-1, (pairs, 2)).unbind(-1)
    else:
        a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack(turned, -1).flatten(-2) if adjacent else torch.cat(turned, -1)
    return torch.cat((rotated, x[..., 2 * pairs :]), -1)
