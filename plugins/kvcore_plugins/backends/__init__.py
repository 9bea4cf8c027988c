"""Built-in backends."""

from kvcore_plugins.backends.torch_cpu import TorchCPU
from kvcore_plugins.backends.torch_cuda import TorchCUDA

__all__ = ["TorchCPU", "TorchCUDA"]
