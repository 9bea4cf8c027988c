"""The host tier: K/V in memory that is allocated as it is used."""

import mmap
from contextlib import closing
from pathlib import Path

import pytest
from helpers.tiers import SIZE, blocks, read, write

from kvcore import InputError
from kvcore_tiers.tier import Host, host

SLOTS = 8


def opened(slots=SLOTS):
    """Open a store that closes at the end of a `with`."""
    return closing(Host(memory=slots * SIZE).open(slots, SIZE, b"model"))


def test_slots_occupy_memory_once_they_are_written(monkeypatch):
    """Slots that are not written occupy no memory, and the system reserves none for them."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    # Python 3.11 has no name for the flag.
    monkeypatch.setattr(mmap, "MAP_NORESERVE", 0x4000, raising=False)
    real, flags = mmap.mmap, []
    monkeypatch.setattr(
        mmap, "mmap", lambda *size, **how: flags.append(how["flags"]) or real(*size, **how)
    )
    before = resident()
    with opened(100_000) as store:
        write(store, blocks([99_999]))
        assert resident() - before < 100_000 * SIZE / 10
    assert flags == [mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_NORESERVE]


def test_a_freed_slot_has_no_block():
    """A block is read from its slot until another is written there, or it is dropped."""
    first, second = blocks([0]), blocks([0], text=1)
    with opened() as store:
        write(store, first)
        assert (read(store, first), read(store, second)) == (1, 0)
        write(store, second)
        assert (read(store, first), read(store, second)) == (0, 1)
        store.drop([0, 1])
        assert read(store, second) == 0


def test_a_tier_larger_than_the_free_memory_is_refused(monkeypatch):
    """A tier larger than the free memory of the host is refused when it is opened."""
    monkeypatch.setattr(host, "host_memory", lambda: (SIZE, None))
    reason = (
        r"memory=23\.4 KiB is more than the 2\.93 KiB that this host has free: give it less"
    )
    with pytest.raises(InputError, match=reason):
        opened()
    monkeypatch.setattr(host, "host_memory", lambda: (SLOTS * SIZE, None))
    with opened() as store:
        write(store, blocks(range(SLOTS)))


def test_memory_that_cannot_be_mapped_is_refused(monkeypatch):
    """If the system cannot map the memory, InputError gives its size and the reason."""

    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(InputError, match=r"23\.4 KiB cannot be had: .*Cannot allocate"):
        opened()
