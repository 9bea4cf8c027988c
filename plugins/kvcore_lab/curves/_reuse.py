"""Block reuse, read in one pass: LRU's hits at every pool size, Belady's at any.

Order all blocks by recency: those of the last request first, its first block before its last,
then the others in the order that they had. A pool of n blocks under LRU holds the first n
blocks of this list, for every n: it evicts from the end of the list, and a request longer than
the pool keeps its leading blocks, which are the first of the list. So a block hits in every
pool larger than the number of blocks before it in the list when its request starts.

Imported when the first curve is made: numpy and numba are extras.
"""

from __future__ import annotations

import struct
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import count
from typing import Self

import attrs
import numpy as np

from kvcore.cache.layout import BlockLayout
from kvcore.errors import InputError
from kvcore.request import Key, Request
from kvcore_lab.curves._mrc_kernels import Array, find_runs, reuse_depths, served_by_belady

AT_ONCE = 1 << 14
"""Number of keys after which the pending ones are converted, at the end of a request."""

MOST_KEYS = 2**31 - 1
"""The most keys of a workload: their places are integers of 32 bits."""


@attrs.frozen(eq=False, slots=False)
class Reuse:
    """For each block of each request, the latest earlier request that contained it.

    Blocks of a request with the same such owner are a run; `_mrc_kernels.find_runs` gives the
    order of the runs. Requests are identified by their serials. Memory: 8 bytes per request and
    24 per run; during reading, 14 to 20 bytes per key, 8 per distinct key, and a number for
    each key that is no integer.

    Attributes:
        lengths: blocks of each request.
        owners, wanted: for each run, the request that contained it last, and the one that
            contains it next.
        ends: for each run, the position in blocks at which it ends.
    """

    lengths: Array
    owners: Array
    wanted: Array
    ends: Array

    @classmethod
    def read(cls, requests: Iterable[Request], geometry: BlockLayout) -> Self:
        """Read all of `requests`, in `keys` accounting. O(keys).

        Raises:
            InputError: a request cannot be read, has keys that do not fit `geometry`, or has a
                key that followed another key in an earlier request; or there are more keys than
                `MOST_KEYS`.
        """
        names = _Names()
        lengths = array("q")
        for request in requests:
            keys = geometry.prompt(request)[0]
            names.extend(keys)
            lengths.append(len(keys))
        names.flush()
        if len(names.flat) > MOST_KEYS:
            msg = (
                f"the workload has {len(names.flat):,} keys, and an exact curve takes at most "
                f"{MOST_KEYS:,}: give it a part of the workload"
            )
            raise InputError(msg)
        sizes = np.array(lengths, np.int64)
        owners, wanted, ends, wrong = find_runs(np.asarray(names.flat, np.int64), sizes)
        if wrong >= 0:
            serial = int(sizes.cumsum().searchsorted(wrong, "right"))
            msg = (
                f"the request at place {serial} of the workload, from 0: key "
                f"{names.key(wrong)!r} does not follow the keys it followed in an earlier "
                "request, so there is no exact curve: equal keys must mean equal prefixes"
            )
            raise InputError(msg)
        ratio = geometry.ratio
        return cls(sizes * ratio, owners, wanted, ends * ratio)

    @property
    def lookup_blocks(self) -> int:
        """Number of blocks looked up."""
        return int(self.lengths.sum())

    @property
    def hit_blocks(self) -> int:
        """Number of blocks that hit in an unbounded pool."""
        return int(self._sizes.sum())

    @property
    def distinct_blocks(self) -> int:
        """Number of blocks in an unbounded pool after the last request."""
        return self.lookup_blocks - self.hit_blocks

    def lru(self) -> tuple[array[int], array[int]]:
        """Return LRU's hits at every pool size as the corners of a piecewise linear function.

        The corners are (blocks, hits), both ascending from 0. No size beyond the last one hits
        more. O((requests + runs) · log requests).
        """
        depths = self._depths
        # From its depth on, each run adds one hit per block of the pool, up to its size.
        borders = np.concatenate([[0], depths, depths + self._sizes])
        blocks, block = np.unique(borders, return_inverse=True)
        ones = np.ones(depths.size, np.int64)
        bends = np.zeros(blocks.size, np.int64)
        np.add.at(bends, block[1:], np.concatenate([ones, -ones]))
        hits = np.zeros(blocks.size, np.int64)
        np.cumsum(bends.cumsum()[:-1] * np.diff(blocks), out=hits[1:])
        return array("q", blocks.tobytes()), array("q", hits.tobytes())

    def lru_hits(self, blocks: int) -> Array:
        """Return the number of first blocks that each request hits in a pool under LRU.

        O(requests + runs) once the depths of runs are known.
        """
        hits = np.zeros_like(self.lengths)
        np.add.at(hits, self.wanted, (blocks - self._depths).clip(0, self._sizes))
        return hits

    def optimum(self, blocks: int, *, bypass: bool) -> int:
        """Return the hits of Belady's rule in a pool of `blocks` blocks.

        Equal to those of `Belady(bypass).replay`. O(runs · log requests).
        """
        lengths, starts, wanted, ends = self._by_owner
        hits = np.empty_like(lengths)
        served_by_belady(lengths, lengths, starts, wanted, ends, blocks, bypass, hits)
        return int(hits.sum())

    @cached_property
    def _depths(self) -> Array:
        """Number of blocks used more recently than the first of each run, when it is wanted."""
        return reuse_depths(self.lengths, self.owners, self.wanted, self.ends)

    @cached_property
    def _sizes(self) -> Array:
        """Number of blocks of each run."""
        begins = np.zeros_like(self.ends)
        begins[1:] = np.where(self.wanted[1:] == self.wanted[:-1], self.ends[:-1], 0)
        return self.ends - begins

    @cached_property
    def _by_owner(self) -> tuple[Array, Array, Array, Array]:
        """The first four arguments of `belady` but `needs`: lengths, and runs by owner."""
        order = self.owners.argsort(kind="stable")
        starts = np.zeros(self.lengths.size + 1, np.int64)
        np.cumsum(np.bincount(self.owners, minlength=self.lengths.size), out=starts[1:])
        return self.lengths, starts, self.wanted[order], self.ends[order]


class _Names:
    """Converts keys to 64-bit integers: unchanged, or numbered if a key is no such integer.

    Thousands of keys are converted at once: half the work of converting each request's.
    """

    def __init__(self) -> None:
        self.flat = array("q")
        self._fresh: list[Key] = []
        self._numbers: defaultdict[Key, int] | None = None

    def extend(self, keys: Sequence[Key]) -> None:
        """Append `keys`. They are in `flat` after the next `flush`."""
        self._fresh += keys
        if len(self._fresh) >= AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Convert the pending keys."""
        fresh, self._fresh = self._fresh, []
        if self._numbers is None:
            try:
                self.flat.frombytes(struct.pack(f"{len(fresh)}q", *fresh))
            except struct.error:
                self._numbers = defaultdict(count().__next__)
                self.flat = array("q", map(self._numbers.__getitem__, self.flat))
            else:
                return
        self.flat.extend(map(self._numbers.__getitem__, fresh))

    def key(self, place: int) -> Key:
        """Return the key at `place`."""
        number = self.flat[place]
        if self._numbers is None:
            return number
        return next(key for key, named in self._numbers.items() if named == number)
