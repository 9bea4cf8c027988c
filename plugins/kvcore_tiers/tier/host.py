"""A tier in the memory of the host."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

import attrs

from kvcore import InputError
from kvcore.cache.tiers import StoredBlock, Tier, TierStore, bandwidth
from kvcore.units import format_bytes
from kvcore_plugins.host import memory as host_memory


@attrs.define(eq=False, kw_only=True)
class Host(Tier):
    """Store blocks in the memory of the host.

    The defaults of its link are those of PCI Express 5.0 with 16 lanes, one link for each
    GPU: transfers from pinned memory reach 50 of its 63 GB/s.

    In a run on tensors its memory is allocated when it is first used, in huge pages if the
    system has them. A backend on the host copies between its pool and the slots; transfers to
    a GPU use pinned buffers of the backend. Blocks have no checksum, since no other process
    writes to the memory. A block is intact if it is the last one written to its slot.
    """

    name: ClassVar[str] = "host"
    per_device: ClassVar[bool] = True
    parks: ClassVar[bool] = True

    read_bandwidth: int | str = bandwidth("50GB")
    write_bandwidth: int | str = bandwidth("50GB")
    latency: float = 1e-5

    def open(self, slots: int, slot_bytes: int, identity: bytes) -> TierStore:
        """Return a store in memory.

        Raises:
            InputError: less memory is free.
        """
        free, _ = host_memory()
        if free is not None and slots * slot_bytes > free:
            msg = (
                f"tier host: memory={format_bytes(slots * slot_bytes)} is more than the "
                f"{format_bytes(free)} that this host has free: give it less"
            )
            raise InputError(msg)
        return HostStore(slots, slot_bytes)


class HostStore(TierStore):
    """Keeps blocks in memory, which the system allocates when slots are first written."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        """Reserve the memory."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        flags |= getattr(mmap, "MAP_NORESERVE", 0)
        try:
            memory = mmap.mmap(-1, slots * slot_bytes, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            msg = f"tier host: {format_bytes(slots * slot_bytes)} cannot be had: {error}"
            raise InputError(msg) from error
        with suppress(AttributeError, OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(memory).cast("B", (slots, slot_bytes))
        self._memory = memoryview(memory)
        self._size = slot_bytes
        self._held: dict[int, tuple[int, bytes]] = {}

    def write(self, blocks: Sequence[StoredBlock], data: memoryview) -> None:
        """Copy blocks into their slots."""
        data, size = data.cast("B"), self._size
        for index, block in enumerate(blocks):
            start = block.slot * size
            self._memory[start : start + size] = data[index * size : (index + 1) * size]
            self._held[block.slot] = block.position, block.chain

    def read(self, blocks: Sequence[StoredBlock], into: memoryview) -> int:
        """Copy blocks from their slots, up to the first that is not in its slot."""
        into, size = into.cast("B"), self._size
        for index, block in enumerate(blocks):
            if self._held.get(block.slot) != (block.position, block.chain):
                return index
            start = block.slot * size
            into[index * size : (index + 1) * size] = self._memory[start : start + size]
        return len(blocks)

    def drop(self, slots: Sequence[int]) -> None:
        """Called when `slots` are freed; their memory stays allocated."""
        for slot in slots:
            self._held.pop(slot, None)

    def close(self) -> None:
        """Free the memory."""
        self._held.clear()
        self.memory, self._memory = None, memoryview(b"")
