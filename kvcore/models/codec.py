"""The codec contract: how the numbers of K/V lie in a block, and the bytes that they take."""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import Any, ClassVar, Literal, TypeAlias

import attrs

from kvcore.errors import KvcoreError
from kvcore.plugins.base import FAILURES, Plugin, policy_error
from kvcore.plugins.options import spec_of
from kvcore.record import Record

Part: TypeAlias = Literal["keys", "values"]
"""The two halves of K/V, which a codec may code differently."""

PLANE_BYTES = {
    "uint8": 1,
    "int8": 1,
    "fp8-e4m3": 1,
    "fp8-e5m2": 1,
    "fp16": 2,
    "bf16": 2,
    "fp32": 4,
    "fp64": 8,
}
"""Bytes of a number, by the dtypes of planes."""

TENSOR_DTYPES = ("fp64", "fp32", "fp16", "bf16")
"""Dtypes in which K/V can be computed; fp64 is for references."""


@attrs.frozen(repr=False)
class Plane(Record):
    """An array that a block holds for each K/V head of a layer: codes, scales, zeros.

    Attributes:
        name: name of the numbers, such as `codes`.
        dtype: one of `PLANE_BYTES`.
        shape: shape of the array for one head. Where tokens are coded one by one, its first
            axis is the tokens of the block.

    Raises:
        ValueError: no such dtype, or a shape that is not of whole numbers, 1 or more.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        """Check dtype and shape."""
        if self.dtype not in [*PLANE_BYTES]:
            msg = f"{self.name}: no dtype {self.dtype!r}; there are: {', '.join(PLANE_BYTES)}"
            raise ValueError(msg)
        whole = isinstance(self.shape, tuple) and all(type(size) is int for size in self.shape)
        if not whole or min(self.shape, default=1) < 1:
            msg = f"{self.name}: shape {self.shape} is not of whole numbers, 1 or more"
            raise ValueError(msg)

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * PLANE_BYTES[self.dtype]


class Codec(Plugin):
    """Codes the K or V of the tokens of a block into planes, and decodes them.

    Tensors are torch's. A backend stores the planes and nothing else of a block, so their
    sizes are what K/V takes wherever memory is counted: `kvcore size`, `--memory`, the
    pool, the bandwidth of the roofline.

    Attributes:
        dtype: one of `TENSOR_DTYPES` if numbers are stored as they are, which backends then
            read in place; such a codec has one plane. None: they are coded.
    """

    kind: ClassVar[str] = "codec"

    dtype: ClassVar[str | None] = None

    def __str__(self) -> str:
        """Return the codec as text names it, such as `kivi:bits=2`."""
        return str(spec_of(self))

    @abstractmethod
    def planes(self, part: Part, tokens: int, width: int) -> tuple[Plane, ...]:
        """Return the planes of one K/V head in a block of `tokens` tokens of `width` numbers.

        Raises:
            InputError: such a block cannot be coded; names the sizes that can.
        """

    @abstractmethod
    def encode(self, part: Part, rows: Any) -> tuple[Any, ...]:
        """Return `rows`, `[n, tokens, width]`, as planes: `[n, *plane.shape]` each.

        `tokens` is 1 or more where tokens are coded one by one, else those of a block.
        """

    @abstractmethod
    def decode(self, part: Part, planes: tuple[Any, ...]) -> Any:
        """Return the rows of `planes`, `[n, tokens, width]`, in a floating-point dtype."""

    def by_token(self, part: Part) -> bool:
        """Return True if each token is coded by itself: True unless overridden.

        If not, a backend keeps the tokens of a block as they are until the block is full,
        and codes them together then.
        """
        del part
        return True

    def head_bytes(self, tokens: int, key_width: int, value_width: int) -> int:
        """Return the bytes of the K and V of one head in a block of `tokens` tokens.

        A part with a width of 0 takes no bytes.

        Raises:
            InputError: such a block cannot be coded.
            PolicyError: `planes` failed.
        """
        widths: tuple[tuple[Part, int], ...] = (("keys", key_width), ("values", value_width))
        try:
            return sum(
                plane.bytes
                for part, width in widths
                if width
                for plane in self.planes(part, tokens, width)
            )
        except KvcoreError:
            raise
        except FAILURES as error:
            raise policy_error(self, "planes", error) from error
