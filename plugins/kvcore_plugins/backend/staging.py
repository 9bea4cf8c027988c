"""The way of K/V from the host into the blocks, in three stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Staging:
    """Brings tensors from the host to a CUDA device, beside what the device computes.

    Nothing waits on the host: the copy runs on a stream of its own, and what comes next on
    the current stream waits for it there. The pinned memory is torch's cache of it, which
    does not hand out again what a copy still reads.
    """

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        """Make the stream. Without `pin` copies are from pageable memory, and block."""
        self._device = device
        self._pin = pin
        make: Any = torch.cuda.Stream  # which has no types
        self._stream = make(device)

    def stage(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in pinned memory: the first stage."""
        return tensor.pin_memory() if self._pin else tensor

    def copy(self, staged: Tensor) -> Tensor:
        """Return `staged` on the device: the second stage. The third scatters it."""
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = staged.to(self._device, non_blocking=True)
        current.wait_stream(self._stream)
        moved.record_stream(current)
        return moved
