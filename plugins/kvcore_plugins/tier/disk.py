"""A file on a disk, which outlives the process."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import attrs

from kvcore.tiers import Tier, bandwidth


@attrs.define(eq=False, kw_only=True)
class Disk(Tier):
    """Rest on a disk, and be found again by the next process.

    The defaults of its link are those of one NVMe disk on four lanes of PCI Express 4.0.

    Attributes:
        path: the directory of its files, which one process has at a time; None: for
            simulations alone.
    """

    name: ClassVar[str] = "disk"

    path: Path | None = None
    read_bandwidth: int | str = bandwidth("7GB")
    write_bandwidth: int | str = bandwidth("5GB")
    latency: float = 1e-4
