"""The built-in tiers."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred_plugins

if TYPE_CHECKING:
    from kvcore_tiers.tier.disk import Disk
    from kvcore_tiers.tier.host import Host
    from kvcore_tiers.tier.redis import Redis
else:
    from kvcore_tiers.hooks import kvcore_tiers

    __getattr__, __dir__ = deferred_plugins(__name__, kvcore_tiers())

__all__ = ["Disk", "Host", "Redis"]
