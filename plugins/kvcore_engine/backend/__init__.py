"""Built-in backends."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred_plugins

if TYPE_CHECKING:
    from kvcore_engine.backend.torch_cpu import TorchCPU
    from kvcore_engine.backend.torch_cuda import TorchCUDA
else:
    from kvcore_engine.hooks import kvcore_backends

    __getattr__, __dir__ = deferred_plugins(__name__, kvcore_backends())

__all__ = ["TorchCPU", "TorchCUDA"]
