"""Loops over a whole workload, compiled by numba. Imported when the first curve is made.

numba keeps the machine code on disk: in `NUMBA_CACHE_DIR` if that is set, otherwise beside this
file, otherwise in the user's cache directory. If it can write to none of them, each process
compiles the loops again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

from kvcore_replay.belady import belady

Array: TypeAlias = npt.NDArray[np.int64]

Places: TypeAlias = npt.NDArray[np.int32]
"""Half as wide as `Array`: getting fresh memory takes longer than filling it in these loops."""

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

FREE = NONE = -1
"""A slot of a table without a key; and a key without a parent, an owner, or a fault."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: multiplied by it, keys that follow one another lie far apart."""


def compiled(signature: str | None = None) -> Callable[[Kernel], Kernel]:
    """Compile a function for one signature, or load it if it was compiled before.

    Without a signature it is compiled for the types of each call.
    """

    def decorate(function: Kernel) -> Kernel:
        try:
            return cast("Kernel", njit(signature, cache=True)(function))
        except (RuntimeError, OSError):  # No directory can be written.
            return cast("Kernel", njit(signature)(function))

    return decorate


@compiled("i8(i4[:], i8[:], i8)")
def slot_of(table: Places, keys: Array, key: np.int64) -> np.int64:
    """Return the slot that holds `key`, or the free one where it belongs.

    Eight consecutive keys lie side by side, in one line of the processor's cache.
    """
    mask = table.size - 1
    line = np.int64((np.uint64(key >> 3) * GOLDEN) >> np.uint64(32))
    slot = (line << 3 | key & 7) & mask
    while table[slot] != FREE and keys[table[slot]] != key:
        slot = (slot + 1) & mask
    return slot


@compiled()
def follow(
    table: Places,
    keys: Array,
    parents: Places,
    latest: Places,
    runs: tuple[Array, Array, Array],
    found: int,
    serial: int,
    begin: int,
    end: int,
) -> tuple[int, int]:
    """Find the runs of one request, with the keys from `begin` to `end`: see `find_runs`.

    Returns the number of runs so far, and -1, or the place of the first key that followed
    another key in an earlier request.
    """
    owners, wanted, ends = runs
    parent = owner = NONE
    for index in range(begin, end):
        slot = slot_of(table, keys, keys[index])
        first = table[slot]
        if first == FREE:
            first = table[slot] = index
            parents[index] = parent
        elif parents[first] != parent:
            return found, index
        else:
            if latest[first] != owner:
                owner = latest[first]
                owners[found], wanted[found] = owner, serial
                found += 1
            ends[found - 1] = index + 1 - begin
        latest[first] = serial
        parent = first
    return found, NONE


@compiled("Tuple((i8[:], i8[:], i8[:], i8))(i8[:], i8[:])")
def find_runs(keys: Array, lengths: Array) -> tuple[Array, Array, Array, int]:
    """Find the blocks of each request that an earlier one contains, and the latest such one.

    `keys` has the keys of all requests one after another, `lengths` the number of keys of each.
    Blocks of a request with the same latest earlier request are a run. Returns for each run its
    owner (the serial of that earlier request), the serial of the request that wants it, and the
    position in the keys of the latter at which the run ends; and the place of the first key
    that followed another key in an earlier request, or -1. Runs are in order of the requests
    that want them, then of position: their owners go back in time. O(keys).
    """
    # The first place of each key, by hash; as large from the start as it may have to be, which
    # takes half the time of growing it. By first place: the first place of the key before it,
    # and the latest request that contains it.
    slots = 1
    while 2 * slots < 3 * keys.size:
        slots *= 2
    table = np.full(slots, FREE, np.int32)
    parents, latest = np.empty(keys.size, np.int32), np.empty(keys.size, np.int32)
    runs = (np.empty_like(keys), np.empty_like(keys), np.empty_like(keys))
    runs_found = begin = 0
    wrong = NONE
    for serial in range(lengths.size):
        end = begin + lengths[serial]
        runs_found, wrong = follow(
            table, keys, parents, latest, runs, runs_found, serial, begin, end
        )
        if wrong != NONE:
            break
        begin = end
    owners, wanted, ends = runs
    return owners[:runs_found], wanted[:runs_found], ends[:runs_found], wrong


@compiled("void(i8[:], i8, i8)")
def add(tree: Array, index: int, number: int) -> None:
    """Add `number` at `index`, from 0, of a Fenwick tree."""
    index += 1
    while index < tree.size:
        tree[index] += number
        index += index & -index


@compiled("i8[:](i8[:], i8[:], i8[:], i8[:])")
def reuse_depths(lengths: Array, owners: Array, wanted: Array, ends: Array) -> Array:
    """Return, for each run, the blocks used more recently than its first when it is wanted.

    The last block of a request counts as used first, its first block as used last. So the
    blocks that one request used last are adjacent in the order of recency, and their number is
    all that has to be kept: one number per request, in a Fenwick tree over the requests.
    O((requests + runs) · log requests).

    Source: Bennett and Kruskal, "LRU stack processing", IBM Journal of Research and
    Development, 1975, with a request's blocks for a page.
    """
    tree = np.zeros(lengths.size + 1, np.int64)
    depths = np.empty_like(owners)
    total = run = 0
    for serial in range(lengths.size):
        begin = 0
        while run < owners.size and wanted[run] == serial:
            older = 0
            index = owners[run] + 1
            while index:
                older += tree[index]
                index &= index - 1
            # The `begin` blocks of more recent owners have left the tree, but count.
            depths[run] = total - older + begin
            add(tree, owners[run], begin - ends[run])
            total -= ends[run] - begin
            begin = ends[run]
            run += 1
        add(tree, serial, lengths[serial])
        total += lengths[serial]
    return depths


served_by_belady = compiled("i8(i8[:], i8[:], i8[:], i8[:], i8[:], i8, b1, i8[:])")(belady)
"""`kvcore_replay.belady.belady`, compiled."""
