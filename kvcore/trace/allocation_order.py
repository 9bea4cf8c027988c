"""The order in which a traced cache must have taken its blocks."""

from __future__ import annotations

from array import array

from kvcore.cache.pool import BlockPool, Ids
from kvcore.trace.events import encode_runs
from kvcore.trace.spans import violated


class Supply:
    """Free blocks in the order of ids, those included that a call has just evicted.

    Of the victims of a call its own ALLOC and COPY lines take all, after every block that
    was free: none is evicted while there are enough, and never more than are missing. The
    victims of a call that failed are free, as if it had taken its blocks and given them
    back.
    """

    def __init__(self, blocks: int) -> None:
        """Start with `blocks` free blocks, none of them used before."""
        self.pool = BlockPool(blocks)
        self._victims: Ids = array("i")
        self._beneficiary: int | str | None = None
        self._copied = False

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return self.pool.free_blocks + len(self._victims)

    def evicted(self, ids: Ids, beneficiary: int | str) -> None:
        """Take in victims, evicted because request `beneficiary` needs blocks."""
        self.serve(beneficiary)
        self._victims.extend(ids)

    def expired(self, ids: Ids) -> None:
        """Take in blocks that were dropped as expired: they are free at once."""
        self.settle()
        self.pool.free(ids, len(ids))

    def take(self, ids: Ids, beneficiary: int | str, *, copy: bool = False) -> None:
        """Let a sequence of request `beneficiary` take `ids`, which must be the next.

        A `copy` takes one block, and may leave victims for the ALLOC that follows it.

        Raises:
            ViolationError: there are not as many, too many were evicted, or others are next.
        """
        self.serve(beneficiary)
        victims, count, room = self._victims, len(ids), self.free
        if not 0 < count <= room:
            violated(f"{count} blocks are taken; {room} are free")
        if victims and count < room and not copy:
            violated(f"{room - count} more blocks were evicted than were missing")
        order = self.pool.allocate(min(count, self.pool.free_blocks))
        rest = count - len(order)
        order.extend(victims[:rest])
        del victims[:rest]
        if ids != order:
            violated(f"the pool gives {encode_runs(order)}, not {encode_runs(ids)}")
        self._copied = copy

    def serve(self, beneficiary: int | str) -> None:
        """Settle what was evicted for another request."""
        if beneficiary != self._beneficiary:
            self.settle()
            self._beneficiary = beneficiary

    def settle(self) -> None:
        """Free what a call evicted that failed before it could use it."""
        if self._victims:
            if self._copied:
                violated(f"{len(self._victims)} more blocks were evicted than were missing")
            ids = self.pool.allocate(self.pool.free_blocks) + self._victims
            self.pool.free(ids[::-1], len(ids))
            self._victims = array("i")
        self._copied = False
