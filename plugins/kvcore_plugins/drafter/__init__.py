"""The built-in drafter of simulations."""

from kvcore.lazy import former
from kvcore_plugins.drafter.acceptance import Acceptance

__all__ = ["Acceptance"]

__getattr__ = former(__name__)
