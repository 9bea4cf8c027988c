"""The built-in workloads: recorded traces of several formats, and synthetic requests."""

from kvcore.lazy import deferred_plugins
from kvcore_plugins.hooks import kvcore_workloads

__getattr__, __dir__ = deferred_plugins(__name__, kvcore_workloads())
