"""The built-in tiers."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore_plugins.tier.disk import Disk
    from kvcore_plugins.tier.host import Host
    from kvcore_plugins.tier.redis import Redis
else:
    __getattr__, __dir__ = deferred(
        __name__,
        {
            "disk": "Disk",
            "host": "Host",
            "redis": "Redis",
        },
    )

__all__ = ["Disk", "Host", "Redis"]
