"""The built-in prefix indexes."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred_plugins

if TYPE_CHECKING:
    from kvcore_plugins.prefix.hashed import Hashed
    from kvcore_plugins.prefix.none import NoPrefix
    from kvcore_plugins.prefix.radix import Radix
else:
    from kvcore_plugins.hooks import kvcore_prefix_indexes

    __getattr__, __dir__ = deferred_plugins(__name__, kvcore_prefix_indexes())

__all__ = ["Hashed", "NoPrefix", "Radix"]
