"""The built-in prefix indexes."""

from kvcore_plugins.prefix.hashed import Hashed
from kvcore_plugins.prefix.none import NoPrefix
from kvcore_plugins.prefix.radix import Radix

__all__ = ["Hashed", "NoPrefix", "Radix"]
