"""Registers the tiers."""

from __future__ import annotations

from kvcore import hookimpl


@hookimpl
def kvcore_tiers() -> dict[str, str]:
    """Return the tiers."""
    return {
        "disk": "kvcore_plugins.tier.disk:Disk",
        "host": "kvcore_plugins.tier.host:Host",
        "redis": "kvcore_plugins.tier.redis:Redis",
    }
