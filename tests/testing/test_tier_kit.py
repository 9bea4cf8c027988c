"""The conformance tests of tiers reject stores with a bug."""

from __future__ import annotations

from typing import ClassVar

import attrs
import pytest

from kvcore.testing import TierTests
from kvcore_tiers.tier import Host
from kvcore_tiers.tier.host import HostStore

SLOT = 1000
"""Bytes of a block in the kit."""


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


class Borrowing(HostStore):
    """A store that keeps the memory of the caller in place of a copy."""

    def write(self, blocks, data):
        """Keep a view of each block."""
        self.kept = getattr(self, "kept", {})
        rows = memoryview(data).cast("B")
        super().write(blocks, data)
        for index, block in enumerate(blocks):
            self.kept[block.slot] = rows[index * SLOT : (index + 1) * SLOT]

    def read(self, blocks, into):
        """Read the views."""
        found, rows = super().read(blocks, into), memoryview(into).cast("B")
        for index, block in enumerate(blocks[:found]):
            rows[index * SLOT : (index + 1) * SLOT] = self.kept[block.slot]
        return found


class BorrowingTests(TierTests):
    """Conformance tests of a tier whose store keeps the memory of the caller."""

    class Borrower(Host):
        """A tier whose store keeps no copies."""

        name: ClassVar[str] = "borrower"

        def open(self, slots, slot_bytes, identity):
            """Return the store."""
            return Borrowing(slots, slot_bytes)

    tier = Borrower


@pytest.mark.parametrize("test", ["reads_written_blocks", "takes_a_matrix"])
def test_a_store_that_keeps_the_memory_of_its_caller_is_found(test):
    """A store that copies nothing reads what its caller has written there since."""
    with pytest.raises(AssertionError, match="write\\(\\) must copy what it keeps"):
        getattr(BorrowingTests(), f"test_{test}")()


def test_bytes_that_nothing_damages_are_told():
    """A kit without `pieces` fails, unless it says that damage is not tested."""

    class Silent(TierTests):
        tier = Host

    class Unchecked(Silent):
        unchecked = True

    with pytest.raises(AssertionError, match="unchecked = True if nobody else can write"):
        Silent().test_flipped_bits_are_found(closed=False)
    with pytest.raises(pytest.skip.Exception, match="damage is not tested"):
        Unchecked().test_flipped_bits_are_found(closed=False)


def test_a_piece_without_bytes_is_told():
    """An empty piece, in which no bit can be flipped, is said to be empty."""

    class Empty(TierTests):
        tier = Host

        def pieces(self, block):
            return [(b"", lambda _: None)]

    with pytest.raises(AssertionError, match="a piece without bytes"):
        Empty().test_flipped_bits_are_found(closed=False)
