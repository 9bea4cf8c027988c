"""A codec: how K/V is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvcore import Codec
from kvcore.engine import Plane
from kvcore.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())

LEVELS = 127
"""Largest code; -128 stands for what is no number."""


class Example(Codec):
    """Store numbers as 8-bit codes, times the largest number of each token and head."""

    name: ClassVar[str] = "example"

    def planes(self, part: Any, tokens: int, width: int) -> tuple[Plane, ...]:
        """Return what is stored: a byte for each number, and a scale for each token."""
        del part
        return Plane("codes", "int8", (tokens, width)), Plane("scales", "fp32", (tokens, 1))

    def encode(self, part: Any, rows: Any) -> tuple[Any, Any]:
        """Return the codes and scales of `rows`; what is infinite becomes 2^100."""
        del part
        rows = rows.float().clamp(-(2.0**100), 2.0**100)
        scales = rows.nan_to_num().abs().amax(-1, keepdim=True).clamp_min(2.0**-100) / LEVELS
        codes = (rows / scales).round().nan_to_num(-LEVELS - 1)
        return codes.to(torch.int8), scales

    def decode(self, part: Any, planes: Sequence[Any]) -> Any:
        """Return the numbers of codes and scales."""
        del part
        codes, scales = planes
        return codes.float().masked_fill(codes == -LEVELS - 1, torch.nan) * scales
