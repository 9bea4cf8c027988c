"""K/V as it is computed, or rounded to a shorter floating-point format."""

from __future__ import annotations

from typing import Any, ClassVar

from kvcore.models.codec import Codec, Part, Plane


class _Plain(Codec):
    """Stores numbers as they are, in `dtype`."""

    def planes(self, part: Part, tokens: int, width: int) -> tuple[Plane, ...]:
        """Return one plane, `[tokens, width]`."""
        assert self.dtype is not None
        return (Plane("numbers", self.dtype, (tokens, width)),)

    def encode(self, part: Part, rows: Any) -> tuple[Any, ...]:
        """Return the rows rounded to the dtype. Numbers beyond its range become infinite."""
        from kvcore_plugins.codec.dtypes import TORCH_DTYPES  # noqa: PLC0415 - torch

        assert self.dtype is not None
        return (rows.to(TORCH_DTYPES[self.dtype]),)

    def decode(self, part: Part, planes: tuple[Any, ...]) -> Any:
        """Return the numbers."""
        return planes[0]


class FP64(_Plain):
    """Store K/V in double precision, for references: 8 bytes a number."""

    name: ClassVar[str] = "fp64"
    dtype: ClassVar[str] = "fp64"


class FP32(_Plain):
    """Store K/V in single precision: 4 bytes a number."""

    name: ClassVar[str] = "fp32"
    dtype: ClassVar[str] = "fp32"


class FP16(_Plain):
    """Store K/V in half precision: 2 bytes a number, up to 65,504."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[str] = "fp16"


class BF16(_Plain):
    """Store K/V in bfloat16: 2 bytes a number, the range of fp32, 8 bits of precision."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[str] = "bf16"
