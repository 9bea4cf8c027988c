"""Built-in backends."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore_plugins.backend.torch_cpu import TorchCPU
    from kvcore_plugins.backend.torch_cuda import TorchCUDA
else:
    __getattr__, __dir__ = deferred(
        __name__,
        {
            "torch_cpu": "TorchCPU",
            "torch_cuda": "TorchCUDA",
        },
    )

__all__ = ["TorchCPU", "TorchCUDA"]
