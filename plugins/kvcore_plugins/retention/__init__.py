"""The built-in retention policy without tensors."""

from kvcore.lazy import former
from kvcore_plugins.retention.full import Full

__all__ = ["Full"]

__getattr__ = former(__name__)
