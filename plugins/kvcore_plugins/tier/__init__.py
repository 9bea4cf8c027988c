"""The built-in tiers."""

from kvcore_plugins.tier.disk import Disk
from kvcore_plugins.tier.host import Host
from kvcore_plugins.tier.redis import Redis

__all__ = ["Disk", "Host", "Redis"]
