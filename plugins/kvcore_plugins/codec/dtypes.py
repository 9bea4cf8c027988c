"""Torch's dtypes by the names that options give them. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor

TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""Dtypes that K/V can be computed in: those of `TENSOR_DTYPES`."""

PLANE_DTYPES = TORCH_DTYPES | {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "fp8-e4m3": torch.float8_e4m3fn,
    "fp8-e5m2": torch.float8_e5m2,
}
"""Dtypes that a `Plane` may have."""


def widened(x: Tensor) -> Tensor:
    """Return `x` in fp32, or in fp64 if it is in fp64: the precision of sums and scores."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
