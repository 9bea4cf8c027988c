"""The memory of the host, beside the GPUs."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore.tiers import Tier, bandwidth


@attrs.define(eq=False, kw_only=True)
class Host(Tier):
    """Rest in the memory of the host.

    The defaults of its link are those of PCI Express 5.0 with 16 lanes as transfers from
    pinned memory reach it, 50 of 63 GB/s, one link for each GPU.
    """

    name: ClassVar[str] = "host"
    per_device: ClassVar[bool] = True
    parks: ClassVar[bool] = True

    read_bandwidth: int | str = bandwidth("50GB")
    write_bandwidth: int | str = bandwidth("50GB")
    latency: float = 1e-5
