"""The conformance tests of tiers reject stores with a bug."""

from __future__ import annotations

from typing import ClassVar

import attrs
import pytest

from kvcore.testing import TierTests
from kvcore_tiers.tier import Host
from kvcore_tiers.tier.host import HostStore


class Remembering(HostStore):
    """A store that drops nothing."""

    def drop(self, slots):
        """Do nothing."""


@attrs.define(eq=False, kw_only=True)
class Hoarder(Host):
    """A tier whose store drops nothing."""

    name: ClassVar[str] = "hoarder"

    def open(self, slots, slot_bytes, identity):
        """Return the store."""
        return Remembering(slots, slot_bytes)


class HoarderTests(TierTests):
    """Conformance tests of the tier that drops nothing."""

    tier = Hoarder


def test_random_calls_find_a_block_that_was_dropped():
    """A store that still has what was dropped is found by random calls."""
    with pytest.raises(AssertionError):
        HoarderTests().test_random_calls(0)


def test_a_piece_without_bytes_is_told():
    """An empty piece, in which no bit can be flipped, is said to be empty."""

    class Empty(TierTests):
        tier = Host

        def pieces(self, block):
            return [(b"", lambda _: None)]

    with pytest.raises(AssertionError, match="a piece without bytes"):
        Empty().test_flipped_bits_are_found(closed=False)
