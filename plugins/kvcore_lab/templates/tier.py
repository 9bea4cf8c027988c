"""A tier: a memory for blocks below the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar
from zlib import crc32

import attrs

from kvcore.cache.tiers import StoredBlock, Tier, TierStore, bandwidth


@attrs.define(eq=False, kw_only=True)
class Example(Tier):
    """Store blocks in a dictionary, behind a link of the given bandwidths."""

    name: ClassVar[str] = "example"

    read_bandwidth: int | str = bandwidth("20GB")
    write_bandwidth: int | str = bandwidth("10GB")
    latency: float = 2e-5

    def open(self, slots: int, slot_bytes: int, identity: bytes) -> TierStore:
        """Return an empty store."""
        del slots, identity
        return DictStore(slot_bytes)


class DictStore(TierStore):
    """Keeps the bytes of blocks by slot, with what tells which block they are, undamaged."""

    def __init__(self, slot_bytes: int) -> None:
        """Store the bytes of a slot."""
        self._size = slot_bytes
        # Position, chain and checksum of the block of each slot, and its bytes.
        self.heads: dict[int, tuple[int, bytes, int]] = {}
        self.content: dict[int, bytes] = {}

    def write(self, blocks: Sequence[StoredBlock], data: memoryview) -> None:
        """Store blocks in place of the content of their slots."""
        data = data.cast("B")
        for index, block in enumerate(blocks):
            content = bytes(data[index * self._size : (index + 1) * self._size])
            self.heads[block.slot] = block.position, block.chain, crc32(content)
            self.content[block.slot] = content

    def read(self, blocks: Sequence[StoredBlock], into: memoryview) -> int:
        """Read blocks, up to the first that is not in its slot, or is damaged there."""
        into = into.cast("B")
        for index, block in enumerate(blocks):
            content = self.content.get(block.slot, b"")
            right = block.position, block.chain, crc32(content)
            if self.heads.get(block.slot) != right:
                return index
            into[index * self._size : (index + 1) * self._size] = content
        return len(blocks)

    def drop(self, slots: Sequence[int]) -> None:
        """Forget the blocks of `slots`, which are freed."""
        for slot in slots:
            self.heads.pop(slot, None)
            self.content.pop(slot, None)
