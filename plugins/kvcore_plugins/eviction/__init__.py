"""The built-in eviction policies."""

from kvcore.lazy import deferred_plugins
from kvcore_plugins.hooks import kvcore_eviction_policies

__getattr__, __dir__ = deferred_plugins(__name__, kvcore_eviction_policies())
