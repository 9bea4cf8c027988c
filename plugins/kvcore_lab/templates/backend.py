"""A backend: the device memory that holds K/V as tensors, and attention over it."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore.engine import DeviceMemory
from kvcore.units import parse_bytes
from kvcore_engine.backend import TorchCPU


@attrs.define(slots=False, eq=False)
class Example(TorchCPU):
    """Keep K/V in host memory as `torch-cpu` does, on a device as small as one likes.

    Options:
        limit: bytes of the device: weights and pools that do not fit are refused.
    """

    name: ClassVar[str] = "example"
    limit: str = "8GiB"

    def memory(self) -> DeviceMemory:
        """Return the memory of the small device, and no more than the host has."""
        host, limit = super().memory(), parse_bytes(self.limit)
        free = max(limit - host.allocated, 0)
        return DeviceMemory(
            host.allocated, free if host.free is None else min(free, host.free), limit
        )
