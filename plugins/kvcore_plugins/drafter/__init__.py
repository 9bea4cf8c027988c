"""The built-in drafter of simulations."""

from kvcore_plugins.drafter.acceptance import Acceptance

__all__ = ["Acceptance"]
