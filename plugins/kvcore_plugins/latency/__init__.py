"""The built-in latency models."""

from kvcore.lazy import deferred_plugins
from kvcore_plugins.hooks import kvcore_latency_models

__getattr__, __dir__ = deferred_plugins(__name__, kvcore_latency_models())
