"""K/V in 8-bit floating point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

from kvcore import InputError
from kvcore.lazy import LazyModule
from kvcore.models.codec import Codec, Part, Plane

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch", globals())


@attrs.define(slots=False, eq=False)
class _FP8(Codec):
    """Stores numbers divided by a scale, in a format of 8 bits.

    Attributes:
        greatest: the greatest number of the format.
    """

    greatest: ClassVar[float]

    scale: Literal["tensor", "head"] = attrs.field(
        default="tensor", validator=attrs.validators.in_(("tensor", "head")), kw_only=True
    )
    factor: float = attrs.field(
        default=1.0,
        # Beyond these, K/V in fp32 would be all zero, or infinite.
        validator=(attrs.validators.ge(1e-30), attrs.validators.le(1e30)),
        kw_only=True,
    )

    def __attrs_post_init__(self) -> None:
        """Check that there is a factor only if it is used."""
        if self.scale == "head" and self.factor != 1:
            msg = (
                f"{self.name}: factor={self.factor} is for scale=tensor: leave one of them out"
            )
            raise InputError(msg)

    def planes(self, part: Part, tokens: int, width: int) -> tuple[Plane, ...]:
        """Return `numbers` and, for scales by head, `scales` in fp16."""
        numbers = Plane("numbers", self.name, (tokens, width))
        if self.scale == "tensor":
            return (numbers,)
        return numbers, Plane("scales", "fp16", (tokens, 1))

    def encode(self, part: Part, rows: Any) -> tuple[Any, ...]:
        """Return the numbers, and their scales if these are by head.

        Greater numbers than the format has, infinite ones too, become its greatest; by head,
        numbers are cut to the range of fp16 first. NaN stays NaN, by head in the whole row.
        """
        from kvcore_plugins.codec._uniform import rounded_up, saturated  # noqa: PLC0415 - torch
        from kvcore_plugins.codec.dtypes import PLANE_DTYPES  # noqa: PLC0415 - torch

        dtype = PLANE_DTYPES[self.name]
        if self.scale == "tensor":
            scaled = rows / self.factor
            return (scaled.clamp(-self.greatest, self.greatest).to(dtype),)
        rows = saturated(rows)
        scales = rounded_up(rows.abs().amax(-1, keepdim=True) / self.greatest)
        return (rows / torch.where(scales == 0, 1, scales)).to(dtype), scales

    def decode(self, part: Part, planes: tuple[Any, ...]) -> Any:
        """Return the numbers times their scale, in fp32."""
        numbers = _widened(planes[0])
        return numbers.mul_(self.factor if self.scale == "tensor" else planes[1].float())


def _widened(numbers: Tensor) -> Tensor:
    """Return fp8 as fp32. E4M3 by way of the bits of fp16, much faster on a CPU than torch."""
    if numbers.dtype == torch.float8_e5m2:
        return numbers.float()
    # s eeee mmm becomes s 0eeee mmm0000000: as fp16, a 256th of the number.
    bits = numbers.view(torch.int8).short()
    bits <<= 7
    bits &= ~0x4000
    # NaN is the one with all bits set, which a carry finds: it gets the exponent of NaN.
    bits |= (bits + 0x80) & 0x4000
    return bits.view(torch.half).float().mul_(256)


class E4M3(_FP8):
    """Store K/V in fp8 with 4 bits of exponent: 3 of precision, up to 448.

    Options:
        scale: `tensor`, the same `factor` for all numbers, or `head`, a scale for each token
            and head, stored beside.
        factor: divisor of all numbers, with `scale=tensor`.

    Source: Micikevicius et al., "FP8 formats for deep learning", 2022.
    """

    name: ClassVar[str] = "fp8-e4m3"
    greatest = 448.0


class E5M2(_FP8):
    """Store K/V in fp8 with 5 bits of exponent: 2 of precision, up to 57,344.

    Options:
        scale: `tensor`, the same `factor` for all numbers, or `head`, a scale for each token
            and head, stored beside.
        factor: divisor of all numbers, with `scale=tensor`.

    Source: Micikevicius et al., "FP8 formats for deep learning", 2022.
    """

    name: ClassVar[str] = "fp8-e5m2"
    greatest = 57344.0
