"""K/V in the memory of the host."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import attrs

from kvcore.engine import DeviceMemory
from kvcore_plugins.backend.torch_backend import TorchBackend

MEMINFO = Path("/proc/meminfo")


@attrs.define(slots=False, eq=False)
class TorchCPU(TorchBackend):
    """Keep K/V in host memory and attend to it with torch's CPU kernels.

    Takes fp64, fp32, fp16 and bf16, and any head size. Uses as many threads as torch is
    set to (`OMP_NUM_THREADS`). Needs torch.

    Options:
        attention: what computes attention; `sdpa` is torch's own function over gathered K/V.
    """

    name: ClassVar[str] = "torch-cpu"

    def memory(self) -> DeviceMemory:
        """Return what Linux reports as available; elsewhere free and total are unknown."""
        free, total = _host_memory()
        return DeviceMemory(self.allocated, free, total)


def _host_memory() -> tuple[int | None, int | None]:
    """Return the available and the total bytes of the host; None where unknown."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None, None
    sizes = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    free, total = (
        int(sizes[name].split()[0]) * 1024 if name in sizes else None
        for name in ("MemAvailable", "MemTotal")
    )
    return free, total
