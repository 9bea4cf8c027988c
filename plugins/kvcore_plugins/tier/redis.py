"""A Redis or Valkey server."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore.tiers import Tier, bandwidth


@attrs.define(eq=False, kw_only=True)
class Redis(Tier):
    """Rest in a Redis or Valkey server, which others may use too.

    The defaults of its link are those of a network of 10 Gbit/s.

    Attributes:
        url: where the server is.
    """

    name: ClassVar[str] = "redis"

    url: str = "redis://127.0.0.1:6379/0"
    read_bandwidth: int | str = bandwidth("1.2GB")
    write_bandwidth: int | str = bandwidth("1.2GB")
    latency: float = 5e-4
