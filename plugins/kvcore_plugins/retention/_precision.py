"""The precision in which scores are computed."""

from __future__ import annotations

from kvcore.engine import Tensor


def wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, or in fp64 if it is."""
    import torch  # noqa: PLC0415 - not in a simulation

    return x.to(torch.promote_types(x.dtype, torch.float32))
