"""The built-in retention policy without tensors."""

from kvcore_plugins.retention.full import Full

__all__ = ["Full"]
