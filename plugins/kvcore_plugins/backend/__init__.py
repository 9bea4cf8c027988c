"""Built-in backends."""

from kvcore_plugins.backend.torch_cpu import TorchCPU
from kvcore_plugins.backend.torch_cuda import TorchCUDA

__all__ = ["TorchCPU", "TorchCUDA"]
