"""The pool of physical blocks: which are free, and in which order they are taken."""

from __future__ import annotations

from array import array
from typing import TypeAlias

from kvcore.errors import InputError, OutOfBlocks

Ids: TypeAlias = "array[int]"
"""Ids of blocks, in an array of machine integers."""

MOST_BLOCKS = 2**31 - 1


class CountingPool:
    """Counts free blocks, for runs in which nobody reads a block id.

    Decides nothing differently from `BlockPool`: no policy sees an id. All methods O(1).
    """

    __slots__ = ("blocks", "free")

    def __init__(self, blocks: int) -> None:
        """Start with `blocks` free blocks. Costs nothing until they are used."""
        if type(blocks) is not int or not 0 < blocks <= MOST_BLOCKS:
            msg = f"a pool of {blocks!r} blocks was asked for; it must have 1 to {MOST_BLOCKS}"
            raise InputError(msg)
        self.blocks = blocks
        self.free = blocks

    def take(self, count: int) -> Ids | None:
        """Take `count` free blocks. Raises OutOfBlocks when fewer are free."""
        if count > self.free:
            msg = f"{count} blocks were asked for; {self.free} of {self.blocks} are free"
            raise OutOfBlocks(msg)
        self.free -= count
        return None

    def give(self, ids: Ids | None, count: int) -> None:
        """Take back `count` blocks."""
        del ids
        self.free += count


class BlockPool(CountingPool):
    """Hands out block ids: freed ones first, last freed first; then unused, ascending.

    Ids move by slices of arrays, never one by one. Ids never used are not stored, so a
    pool of any size costs nothing until it is used.

    A private block may have several owners after a fork. `owners` counts those beyond
    the first; `release` frees only what has no other owner.
    """

    __slots__ = ("_freed", "minted", "owners")

    def __init__(self, blocks: int) -> None:
        """Start with the ids 0 to `blocks` - 1 free."""
        super().__init__(blocks)
        self._freed: Ids = array("i")
        self.minted = 0
        self.owners: dict[int, int] = {}

    def take(self, count: int) -> Ids:
        """Take `count` ids, in the pool's order. O(count) in C."""
        super().take(count)
        freed = self._freed
        stacked = len(freed)
        if count <= stacked:
            ids = freed[: stacked - count - 1 if count < stacked else None : -1]
            del freed[stacked - count :]
            return ids
        ids = freed[::-1]
        del freed[:]
        fresh = count - stacked
        ids.extend(range(self.minted, self.minted + fresh))
        self.minted += fresh
        return ids

    def give(self, ids: Ids | None, count: int) -> None:
        """Take back `ids` so that the last of them is the next to be taken."""
        assert ids is not None
        self.free += count
        self._freed.extend(ids)

    def share(self, ids: Ids) -> None:
        """Give every block of `ids` one more owner."""
        owners = self.owners
        for block in ids:
            owners[block] = owners.get(block, 0) + 1

    def release(self, ids: Ids) -> Ids:
        """Give up one ownership of `ids`; free those without another owner.

        Returns the freed ids, in the order of `ids`.
        """
        owners = self.owners
        if owners:
            ids = array("i", [block for block in ids if not self.disown(block)])
        self.give(ids, len(ids))
        return ids

    def disown(self, block: int) -> bool:
        """Give up one ownership of `block`; return whether it has another owner."""
        others = self.owners.get(block, 0)
        if others > 1:
            self.owners[block] = others - 1
        elif others:
            del self.owners[block]
        return others > 0

    def freed(self) -> Ids:
        """Return the ids that were used and are free, next to be taken last."""
        return self._freed[:]
