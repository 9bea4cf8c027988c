"""Blocks for the stores of tiers, whose bytes are drawn from the chain of the block."""

from random import Random

from kvcore.cache.tiers import StoredBlock

SIZE = 3000


def blocks(slots, *, text=0):
    """Return the first blocks of a prompt, placed in `slots`."""
    chains = [b"", *(b"%8d%8d" % (text, index) for index in range(len(slots)))]
    return [
        StoredBlock(slot, index, f"{text}-{index}", chains[index + 1], chains[index])
        for index, slot in enumerate(slots)
    ]


def data(path):
    """Return the expected bytes of blocks."""
    return b"".join(Random(block.chain).randbytes(SIZE) for block in path)


def write(store, path):
    """Write blocks with their expected bytes."""
    store.write(path, memoryview(data(path)))


def read(store, path):
    """Return the number of leading blocks read as valid, and check their bytes."""
    into = memoryview(bytearray(SIZE * len(path)))
    right = store.read(path, into)
    assert into[: right * SIZE] == data(path[:right]), "wrong K/V are given for right"
    return right
