"""Registers the built-in backends."""

from __future__ import annotations

from kvcore import Backend, hookimpl
from kvcore_plugins.backend.torch_cpu import TorchCPU
from kvcore_plugins.backend.torch_cuda import TorchCUDA


@hookimpl
def kvcore_backends() -> list[type[Backend]]:
    """Return the built-in backends."""
    return [TorchCPU, TorchCUDA]
