"""K/V in the memory of the host."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore.engine import DeviceMemory
from kvcore_engine.backend.torch_backend import TorchBackend
from kvcore_plugins.host import memory


@attrs.define(slots=False, eq=False)
class TorchCPU(TorchBackend):
    """Keep K/V in host memory and attend to it with torch's CPU kernels.

    Takes fp64, fp32, fp16 and bf16, and any head size. Needs torch.

    Options:
        attention: implementation of attention: `sdpa` is torch's own function over gathered
            K/V, `triton` the kernel for GPUs, for tests: in Triton's interpreter
            (`TRITON_INTERPRET=1`). None: `triton` if it works here, else `sdpa`.
    """

    name: ClassVar[str] = "torch-cpu"
    moved_bytes: ClassVar[int] = 1 << 20  # blocks put aside stay in a core's own cache

    def memory(self) -> DeviceMemory:
        """Return the limits of the process on Linux; elsewhere free and total are unknown."""
        free, total = memory()
        return DeviceMemory(self.allocated, free, total)
