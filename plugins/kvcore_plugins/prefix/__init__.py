"""The built-in prefix indexes."""

from kvcore.lazy import deferred_plugins
from kvcore_plugins.hooks import kvcore_prefix_indexes

__getattr__, __dir__ = deferred_plugins(__name__, kvcore_prefix_indexes())
