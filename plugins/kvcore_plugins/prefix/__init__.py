"""The built-in prefix caches."""

from kvcore_plugins.prefix.none import NoPrefix
from kvcore_plugins.prefix.radix import Radix

__all__ = ["NoPrefix", "Radix"]
