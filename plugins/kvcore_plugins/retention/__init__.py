"""The built-in retention policies."""

from kvcore_plugins.retention.window import Window

__all__ = ["Window"]
