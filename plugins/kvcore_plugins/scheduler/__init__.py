"""Built-in schedulers."""

from kvcore.lazy import deferred_plugins
from kvcore_plugins.hooks import kvcore_schedulers

__getattr__, __dir__ = deferred_plugins(__name__, kvcore_schedulers())
