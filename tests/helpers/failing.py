"""Policies that fail, in a module of their own: other processes have to import them."""

import os
from typing import ClassVar

import attrs

from kvcore_plugins.eviction import LRU


@attrs.define(slots=False, eq=False)
class Failing(LRU):
    """A policy that fails."""

    name: ClassVar[str] = "failing"

    def victim(self, now):
        """Fail."""
        msg = "no idea"
        raise ValueError(msg)


@attrs.define(slots=False, eq=False)
class Deadly(LRU):
    """A policy that ends its process."""

    name: ClassVar[str] = "deadly"

    def victim(self, now):
        """End it."""
        os._exit(7)
