"""Bandwidth of memory: copies, reads, and the link of a GPU. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcore_engine.bench.clocks import Call, clock_of

COPY, READ = "copy", "read-only sum"
TO_HOST, FROM_HOST = "device to host", "host to device"

BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""Bytes of the tensors that are copied and read: more than caches hold."""


def measure_ceilings(device: torch.device, seconds: float) -> dict[str, float]:
    """Return the rates of memory in bytes a second, by name.

    A copy counts the bytes read and the bytes written. Reading is the faster of torch's sum
    and, if Triton is installed, of a kernel that combines all words.
    """
    clock = clock_of(device)
    size = BYTES[device.type]
    source, target = (
        torch.zeros(size // 4, dtype=torch.float32, device=device) for _ in range(2)
    )

    def fastest(*calls: Call) -> float:
        return min(timing.seconds for timing in clock([[call] for call in calls], seconds))

    rates = {
        COPY: 2 * size / fastest(lambda: target.copy_(source)),
        READ: size / fastest(source.sum, *_kernels(source)),
    }
    if device.type == "cuda":
        host = torch.zeros(size // 4, dtype=torch.float32, pin_memory=True)
        rates[TO_HOST] = size / fastest(lambda: host.copy_(source, non_blocking=True))
        rates[FROM_HOST] = size / fastest(lambda: target.copy_(host, non_blocking=True))
    return rates


def _kernels(source: Tensor) -> list[Callable[[], Any]]:
    """Return calls of the reading kernel, in some shapes; none without Triton or a GPU."""
    if source.device.type != "cuda":
        return []
    try:
        from kvcore_engine.bench._read import readers  # noqa: PLC0415 - needs Triton
    except ImportError:
        return []
    return readers(source)
