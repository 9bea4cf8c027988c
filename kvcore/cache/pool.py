"""The pool of physical blocks: which are free, and in which order they are allocated."""

from __future__ import annotations

from array import array
from typing import TypeAlias

from kvcore.errors import InputError, OutOfBlocks

Ids: TypeAlias = "array[int]"
"""Ids of blocks, in an array of machine integers."""

MOST_BLOCKS = 2**31 - 1
"""Ids have 4 bytes."""


class CountingPool:
    """Counts free blocks, for runs that do not need block ids.

    A cache makes the same decisions with it as with a `BlockPool`, since no policy sees an
    id. All methods are O(1).

    Attributes:
        blocks: number of blocks.
        free_blocks: number of free blocks.
    """

    __slots__ = ("blocks", "free_blocks")

    def __init__(self, blocks: int) -> None:
        """Store the size; all `blocks` are free. Costs nothing until they are used."""
        if type(blocks) is not int or not 0 < blocks <= MOST_BLOCKS:
            msg = f"a pool of {blocks!r} blocks was asked for; it must have 1 to {MOST_BLOCKS}"
            raise InputError(msg)
        self.blocks = blocks
        self.free_blocks = blocks

    def allocate(self, count: int) -> Ids | None:
        """Allocate `count` blocks.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if count > self.free_blocks:
            msg = f"{count} blocks were asked for; {self.free_blocks} of {self.blocks} are free"
            raise OutOfBlocks(msg)
        self.free_blocks -= count
        return None

    def free(self, ids: Ids | None, count: int) -> None:
        """Free `count` blocks; `ids` are their ids, or None in a pool that only counts."""
        del ids
        self.free_blocks += count

    def release(self, ids: Ids | None, count: int) -> Ids | None:
        """Remove an owner from `count` blocks, and free those without another owner.

        A pool that only counts has one owner of each. Returns the ids of the freed blocks.
        """
        self.free(ids, count)
        return ids


class BlockPool(CountingPool):
    """Allocates block ids: freed ones first, last freed first; then unused, ascending.

    Ids move by slices of arrays, never one by one. Ids never used are not stored, so a
    pool of any size costs nothing until it is used.

    A private block may have several owners after a fork; `release` frees only what has no
    other owner.

    Attributes:
        high_water: the lowest id that has never been used.
        owners: by id, the number of owners of a block beyond the first; 0 is left out.
    """

    __slots__ = ("_freed", "high_water", "owners")

    def __init__(self, blocks: int) -> None:
        """Store the size; the ids 0 to `blocks` - 1 are free."""
        super().__init__(blocks)
        self._freed: Ids = array("i")
        self.high_water = 0
        self.owners: dict[int, int] = {}

    def allocate(self, count: int) -> Ids:
        """Allocate `count` ids, in the pool's order. O(count) in C.

        `allocate(a + b)` gives the same ids as `allocate(a)` and then `allocate(b)`.
        """
        super().allocate(count)
        freed = self._freed
        left = len(freed) - count
        if left >= 0:
            ids = freed[: left - 1 if left else None : -1]  # from the last one down
            del freed[left:]
            return ids
        ids = freed[::-1]
        del freed[:]
        fresh = -left
        ids.extend(range(self.high_water, self.high_water + fresh))
        self.high_water += fresh
        return ids

    def free(self, ids: Ids | None, count: int) -> None:
        """Free `ids`; the last of them is the next to be allocated."""
        assert ids is not None
        self.free_blocks += count
        self._freed.extend(ids)

    def share(self, ids: Ids) -> None:
        """Add an owner to every block of `ids`."""
        owners = self.owners
        for block in ids:
            owners[block] = owners.get(block, 0) + 1

    def release(self, ids: Ids | None, count: int = 0) -> Ids:
        """Remove an owner from every block of `ids`; free those without another owner.

        Returns the freed ids, in the order of `ids`.
        """
        del count
        assert ids is not None
        if self.owners:
            ids = array("i", [block for block in ids if not self.unshare(block)])
        self.free(ids, len(ids))
        return ids

    def unshare(self, block: int) -> bool:
        """Remove an owner from `block`; return True if it has another."""
        others = self.owners.get(block, 0)
        if others > 1:
            self.owners[block] = others - 1
        elif others:
            del self.owners[block]
        return others > 0

    def free_ids(self) -> Ids:
        """Return the ids that were used and are free; the last is allocated next."""
        return self._freed[:]
