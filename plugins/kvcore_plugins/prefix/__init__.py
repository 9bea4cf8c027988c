"""The built-in prefix indexes."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore_plugins.prefix.hashed import Hashed
    from kvcore_plugins.prefix.none import NoPrefix
    from kvcore_plugins.prefix.radix import Radix
else:
    __getattr__, __dir__ = deferred(
        __name__,
        {
            "hashed": "Hashed",
            "none": "NoPrefix",
            "radix": "Radix",
        },
    )

__all__ = ["Hashed", "NoPrefix", "Radix"]
