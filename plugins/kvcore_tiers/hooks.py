"""Registers the tiers."""

from __future__ import annotations

from kvcore import hookimpl


@hookimpl
def kvcore_tiers() -> dict[str, str]:
    """Return the tiers."""
    return {
        "disk": "kvcore_tiers.tier.disk:Disk",
        "host": "kvcore_tiers.tier.host:Host",
        "redis": "kvcore_tiers.tier.redis:Redis",
    }
