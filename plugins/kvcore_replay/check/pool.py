"""The order of a pool's block ids, and the content of its cache, for the check of a trace."""

from __future__ import annotations

from array import array
from typing import Any

from kvcore.cache.pool import BlockPool, Ids
from kvcore.trace.events import violated
from kvcore.trace.fields import encode_runs
from kvcore_replay.state.layout import count_known


class CachedKeys:
    """Number of cached blocks of each key, where a key has `ratio` blocks.

    The hit of a prompt is a bisection over its keys, whatever spans store them.
    """

    def __init__(self, ratio: int) -> None:
        """Start with no cached block."""
        self._ratio = ratio
        self._blocks: dict[Any, int] = {}

    def match(self, keys: list[Any]) -> int:
        """Return the number of cached blocks of a prompt, from the first on. O(log keys)."""
        known = count_known(keys, self._blocks)
        return (known - 1) * self._ratio + self._blocks[keys[known - 1]] if known else 0

    def store(self, keys: list[Any], first: int, end: int) -> bool:
        """Store the blocks `[first, end)` of a prompt; return False if one is stored."""
        cached, ratio = self._blocks, self._ratio
        low, high = first // ratio, (end - 1) // ratio
        later = keys[low + 1 : high + 1]
        if cached.get(keys[low], 0) != first - low * ratio or not cached.keys().isdisjoint(
            later
        ):
            return False
        cached[keys[low]] = ratio
        cached.update(dict.fromkeys(later, ratio))
        cached[keys[high]] = end - high * ratio
        return True

    def begin(self, keys: list[Any], first: int) -> None:
        """Insert the first key of a run that starts at block `first`, perhaps inside it."""
        index, part = divmod(first, self._ratio)
        self._blocks.setdefault(keys[index], part)

    def remove(self, keys: list[Any], first: int, end: int) -> None:
        """Remove the blocks `[first, end)` of a prompt, after which none is stored."""
        index, part = divmod(first, self._ratio)
        for key in keys[index : (end - 1) // self._ratio + 1]:
            self._blocks.pop(key, None)
        if part:
            self._blocks[keys[index]] = part


class AllocationOrder:
    """The order in which a pool hands out blocks, those just evicted included.

    The ALLOC and COPY lines of a call take all of its victims, after every free block. No block
    is evicted while enough are free, and no more than are missing; where whole leaves are
    evicted, no leaf after the one that makes enough, whose other blocks are free then. The
    victims of a call that failed are free, as if it had allocated its blocks and freed them.
    """

    def __init__(self, blocks: int, *, leaves: bool = False) -> None:
        """Start with `blocks` free blocks, none of them used before.

        `leaves` is whether whole leaves are evicted.
        """
        self.pool = BlockPool(blocks)
        self.victims: Ids = array("i")
        self._leaves = leaves
        self._last = 0  # number of victims of the last line
        self._requester: int | str | None = None
        self._copied = False

    @property
    def free(self) -> int:
        """Number of free blocks, victims included."""
        return self.pool.free_blocks + len(self.victims)

    @property
    def owes(self) -> bool:
        """Whether the call takes more blocks: a COPY may leave victims, but no whole leaf."""
        return len(self.victims) >= (self._last if self._copied else 1)

    def evict(self, ids: Ids, requester: int | str) -> None:
        """Record victims, evicted because request `requester` needs blocks."""
        self.serve(requester)
        if self._copied:
            self.settle()
        self.victims.extend(ids)
        self._last = len(ids) if self._leaves else 1

    def expire(self, ids: Ids) -> None:
        """Record blocks that were evicted because they expired: they are free at once."""
        self.settle()
        self.pool.free(ids, len(ids))

    def take(self, ids: Ids, requester: int | str, *, copy: bool = False) -> None:
        """Allocate `ids`, which must be the next, to a sequence of request `requester`.

        A `copy` takes one block, and may leave victims for the ALLOC that follows it.

        Raises:
            ViolationError: too few are free, too many were evicted, or others are next.
        """
        self.serve(requester)
        if self._copied and self.victims and not self.owes and ids[:1] != self.victims[:1]:
            self.settle()  # the call of the copy was over
        victims, count, available = self.victims, len(ids), self.free
        if not 0 < count <= available:
            violated(f"{count} blocks are taken; {available} are free")
        if victims and count <= available - self._last and not copy:
            violated(f"{available - count} more blocks were evicted than were missing")
        order = self.pool.allocate(min(count, self.pool.free_blocks))
        rest = count - len(order)
        order.extend(victims[:rest])
        del victims[:rest]
        if ids != order:
            violated(f"the pool gives {encode_runs(order)}, not {encode_runs(ids)}")
        if self._leaves and victims and not copy:
            self.pool.free(victims, len(victims))
            self.victims = array("i")
        self._copied = copy

    def serve(self, requester: int | str) -> None:
        """Free the victims of another request than `requester`."""
        if requester != self._requester:
            self.settle()
            self._requester = requester

    def settle(self) -> None:
        """Free the victims of a call that failed before it took them."""
        if self.victims:
            if self._copied and self.owes:
                violated(f"{len(self.victims)} more blocks were evicted than were missing")
            ids = self.pool.allocate(self.pool.free_blocks) + self.victims
            self.pool.free(ids if self._copied else ids[::-1], len(ids))
            self.victims = array("i")
        self._copied = False
