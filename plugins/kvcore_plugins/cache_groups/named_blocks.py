"""Blocks with names: how cache groups find, hold and evict the blocks of their pool.

`kvcore/native/named_blocks.c` is the twin of this file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from kvcore.native import library

Name: TypeAlias = Any
"""The name of a full block in its group: its key, with its position if keys are longer."""

NO_BLOCK: Final = -1
"""Stands in a table where no block is kept, between states."""


class NamedBlocks:
    """The names of blocks, the number of sequences that hold each, and the order of eviction.

    ::

             name()           release()
        bare ------> held <-------------> idle ------> forgotten, and bare again
                              hold()             pop(), then forget()

    A bare block belongs to one sequence, or is free. Only idle blocks can be evicted: the one
    that has been idle longest first. Blocks of one group may have one name, where requests have
    computed the same at the same time: a block stays what it is in a table, since a step that
    is under way reads it there, so a copy is not exchanged for the one that is known. Copies
    form a chain from the oldest, which is hit, to the youngest. All calls take O(1) a block, or
    O(copies) to name or forget one of these.

    Attributes:
        cached: by group, the oldest block of each name.
    """

    __slots__ = ("_group_of", "_holders", "_idle", "_name_of", "_younger", "cached")

    def __init__(self, groups: int) -> None:
        """Know `groups` groups, and no names."""
        self.cached: list[dict[Name, int]] = [{} for _ in range(groups)]
        # By block: its name, None of a bare one; and of a named one, its group and the number
        # of sequences that hold it.
        self._name_of: list[Name] = []
        self._group_of: list[int] = []
        self._holders: list[int] = []
        self._younger: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """Number of blocks that no sequence holds: those that can be evicted."""
        return len(self._idle)

    def place(self, block: int) -> tuple[int, Name]:
        """Return the group and the name of `block`; a bare one has the name None."""
        return self._group_of[block], self._name_of[block]

    def holders(self, block: int) -> int:
        """Return the number of sequences that hold `block`, which has a name."""
        return self._holders[block]

    def count_idle(self, blocks: list[int]) -> int:
        """Return how many of `blocks`, which have names, no sequence holds."""
        holders = self._holders
        return sum(1 for block in blocks if not holders[block])

    def grow(self, blocks: int) -> None:
        """Make room for blocks with ids below `blocks`. They are bare."""
        if unknown := blocks - len(self._name_of):
            self._name_of += [None] * unknown
            self._group_of += [0] * unknown
            self._holders += [0] * unknown

    def name(self, blocks: list[int], names: list[Name], group: int) -> list[int]:
        """Give names in `group` to bare blocks, now held once; return the oldest of each."""
        name_of, group_of, holders = self._name_of, self._group_of, self._holders
        for block, name in zip(blocks, names, strict=True):
            name_of[block] = name
            group_of[block] = group
            holders[block] = 1
        oldest = list(map(self.cached[group].setdefault, names, blocks))
        if oldest != blocks:
            younger = self._younger
            for copy, block in zip(oldest, blocks, strict=True):
                if copy != block:
                    last = copy
                    while last in younger:
                        last = younger[last]
                    younger[last] = block
        return oldest

    def hold(self, blocks: list[int]) -> None:
        """Add a holder to each of `blocks`, which have names."""
        holders, idle = self._holders, self._idle
        for block in blocks:
            if not holders[block]:
                del idle[block]
            holders[block] += 1

    def release(self, blocks: list[int]) -> list[int]:
        """Remove a holder of each of `blocks`, in order, and return the bare ones.

        Named blocks without another holder become idle. `NO_BLOCK` is passed over.
        """
        name_of, holders, idle = self._name_of, self._holders, self._idle
        bare = [block for block in blocks if block != NO_BLOCK and name_of[block] is None]
        if len(bare) < len(blocks):
            for block in blocks:
                if block == NO_BLOCK or name_of[block] is None:
                    continue
                holders[block] -= 1
                if not holders[block]:
                    idle[block] = None
        return bare

    def pop(self, count: int) -> list[int]:
        """Return the `count` blocks that have been idle longest, in order: they shall leave."""
        return [self._idle.popitem(last=False)[0] for _ in range(count)]

    def remove(self, block: int) -> None:
        """Remove `block` from the idle ones: it shall leave."""
        del self._idle[block]

    def forget(self, blocks: list[int]) -> None:
        """Remove the names of `blocks`, which are to leave."""
        name_of, group_of, younger = self._name_of, self._group_of, self._younger
        for block in blocks:
            name, name_of[block] = name_of[block], None
            cached = self.cached[group_of[block]]
            older = cached[name]
            if older != block:
                while younger[older] != block:
                    older = younger[older]
                del younger[older]
                if block in younger:
                    younger[older] = younger.pop(block)
            elif block in younger:
                cached[name] = younger.pop(block)
            else:
                del cached[name]

    def __iter__(self) -> Iterator[tuple[int, tuple[int, Name]]]:
        """Iterate over the blocks with a name, and the group and name of each."""
        for group, cached in enumerate(self.cached):
            for name, oldest in cached.items():
                copy: int | None = oldest
                while copy is not None:
                    yield copy, (group, name)
                    copy = self._younger.get(copy)


def named_blocks(groups: int) -> NamedBlocks:
    """Return the names of blocks of `groups` groups, in C where the core is used."""
    core = library()
    return NamedBlocks(groups) if core is None else core.NamedBlocks(groups)
