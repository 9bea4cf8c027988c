"""Policies that fail, in a module of their own, so that other processes can import them."""

import os
from typing import ClassVar

import attrs

from kvcore_plugins.eviction import LRU


@attrs.define(slots=False, eq=False)
class Failing(LRU):
    """A policy whose `victim` raises."""

    name: ClassVar[str] = "failing"

    def victim(self, now):
        """Raise ValueError."""
        msg = "no idea"
        raise ValueError(msg)


@attrs.define(slots=False, eq=False)
class Deadly(LRU):
    """A policy that ends its process."""

    name: ClassVar[str] = "deadly"

    def victim(self, now):
        """Exit the process with code 7."""
        os._exit(7)
