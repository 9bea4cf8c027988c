"""The hardware and software that a benchmark runs on."""

from __future__ import annotations

import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from shutil import which
from typing import Any

from kvcore.distributions import version
from kvcore_plugins.host import cpus, memory

CPUINFO = Path("/proc/cpuinfo")
PACKAGES = ("torch", "triton", "flashinfer-python", "ai-dynamo-runtime", "libcachesim")


def describe_machine(*, gpu: bool = False) -> dict[str, Any]:
    """Return what results depend on: kvcore, date, CPU, packages; with `gpu`, the current GPU.

    Nothing that identifies the machine. `gpu` needs torch, and a GPU that it can use.
    """
    machine: dict[str, Any] = {
        "kvcore": version("kvcore") or "not installed",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cpus": cpus(),
        "memory_bytes": memory()[1],
        "packages": {name: known for name in PACKAGES if (known := version(name))},
    }
    return machine | {"gpu": _gpu()} if gpu else machine


def _cpu() -> str:
    try:
        named = re.search(r"^model name\s*: (.*)$", CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        named = None
    return named[1] if named else platform.processor() or platform.machine()


def _gpu() -> dict[str, Any]:
    import torch  # noqa: PLC0415 - for this alone

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None if it cannot be found."""
    program = which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    lines = done.stdout.split()
    return lines[0] if lines else None
