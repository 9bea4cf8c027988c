"""Memory before paging: each request in one piece, as long as it may ever get."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import attrs

from kvcore.cache import KVCache, Sequence
from kvcore.errors import InputError, OutOfBlocks
from kvcore.plugins.manager import resolve
from kvcore.request import Request
from kvcore.serving.decode_batch import DecodeBatch
from kvcore.serving.job import Job
from kvcore.serving.latency import StepTimes
from kvcore.serving.result import Result
from kvcore.serving.simulate import check_cache
from kvcore.serving.simulate import simulate as simulate_allocated
from kvcore_lab.contiguous.fragmentation import MeasuredAllocator

Allocation = Literal["paged", "contiguous"]
"""How memory is allocated: in blocks, or in one piece for each request."""


def simulate(
    workload: Iterable[Request],
    *,
    cache: KVCache,
    allocation: Allocation = "paged",
    max_output: int | None = None,
    **options: Any,
) -> Result:
    """Serve `workload` as `kvcore.serving.simulate` does, in paged or contiguous memory.

    Args:
        workload: a workload, or any requests in order of arrival.
        cache: where K/V is kept, in `tokens` accounting; a new one for each run.
        allocation: `paged`, or `contiguous`, as servers allocated before paging: memory of
            the size of `cache` in which a request reserves its prompt and the longest
            possible output in one piece, and shares nothing. Of `cache` only the size is
            used then, and the result has another one. Its fragmentation is measured.
        max_output: for `contiguous`, the longest possible output in tokens; a request with a
            longer one reserves that. None: the longest output of the workload, which is read
            once for it.
        options: the other arguments, which are those of `kvcore.serving.simulate` too.

    Raises:
        InputError: as there; or contiguous memory with a trace, tiers or a retention policy.
    """
    if allocation == "paged":
        if max_output is not None:
            msg = f"max_output={max_output} is for allocation='contiguous' alone; leave it out"
            raise InputError(msg)
        return simulate_allocated(workload, cache=cache, **options)
    if allocation != "contiguous":
        msg = f"allocation={allocation!r} is not known; there are: paged, contiguous"
        raise InputError(msg)
    check_cache(cache, "simulate")
    contiguous = contiguous_cache(cache)
    max_output = longest_output(workload, max_output)
    allocator = partial(ContiguousAllocator, max_output=max_output)
    result = simulate_allocated(workload, cache=contiguous, allocator=allocator, **options)
    return attrs.evolve(result, max_output=max_output)


class AddressSpace:
    """Slots from 0 to `size` - 1, allocated in contiguous pieces: first fit.

    A piece is cut from the lower end of the first hole that is long enough; a piece that
    comes back joins the holes beside it. Every call costs O(holes), and there is at most
    one hole more than there are pieces.

    Source: Knuth, The Art of Computer Programming, vol. 1, section 2.5, algorithms A and B.

    Attributes:
        size, free: slots, and those of them in holes.
        holes: (first slot, slot after the last) of each hole, by address.
    """

    __slots__ = ("free", "holes", "size")

    def __init__(self, size: int) -> None:
        """Create a space of `size` free slots: one hole."""
        self.size = self.free = size
        self.holes = [(0, size)]

    @property
    def largest(self) -> int:
        """Slots of the longest hole."""
        return max((end - start for start, end in self.holes), default=0)

    def take(self, length: int) -> int:
        """Allocate `length` slots in one piece; return the first.

        Raises:
            OutOfBlocks: no hole is long enough; nothing has changed.
        """
        for index, (start, end) in enumerate(self.holes):
            if end - start >= length:
                if end - start == length:
                    del self.holes[index]
                else:
                    self.holes[index] = start + length, end
                self.free -= length
                return start
        msg = (
            f"a piece of {length} slots was asked for; {self.free} of {self.size} are free, "
            f"the longest hole has {self.largest}"
        )
        raise OutOfBlocks(msg)

    def give(self, start: int, length: int) -> None:
        """Free the piece of `length` slots that begins at `start`."""
        holes, end = self.holes, start + length
        first = last = bisect(holes, (start, start))
        if first and holes[first - 1][1] == start:
            first -= 1
            start = holes[first][0]
        if last < len(holes) and holes[last][0] == end:
            end = holes[last][1]
            last += 1
        holes[first:last] = [(start, end)]
        self.free += length


class ContiguousAllocator(MeasuredAllocator):
    """Memory before paging: one piece for each request, its prompt and the longest output.

    Growth never fails, and nothing is shared: no prefix hits, no forks. There are no blocks,
    but the size is given in blocks, and the pool of `cache` counts the whole ones that are
    free, so that runs compare with paged ones. Everything else about a sequence (its length,
    its access) is in `cache`, to which the slots of a piece count as reserved.

    Source: Yu et al., "Orca", OSDI 2022, algorithm 1, which reserves a request's most tokens
    on admission.

    Attributes:
        space: which slots are taken.
        max_output: the longest output that is reserved for a request, in tokens. A request
            with a longer output reserves that.
    """

    def __init__(self, cache: KVCache, batch: DecodeBatch, max_output: int) -> None:
        """Create memory of the size of `cache`, which must be new and without prefix cache."""
        super().__init__(cache, batch)
        self.max_output = max_output
        self.space = AddressSpace(self.slots)
        self._pieces: dict[int, tuple[int, int]] = {}

    def piece_length(self, request: Request) -> int:
        """Return the slots that `request` reserves."""
        return request.prompt_tokens + max(self.max_output, request.output_tokens)

    def piece(self, seq: Sequence) -> tuple[int, int]:
        """Return the first slot of `seq`, and how many it has."""
        return self._pieces[seq.id]

    def never_fits(self, request: Request) -> str:
        """Return why no piece can be long enough for `request`, or "" if one can."""
        need, size = self.piece_length(request), self.space.size
        if need <= size:
            return ""
        return (
            f"it needs a piece of {need} slots, {request.prompt_tokens} for its prompt and "
            f"{need - request.prompt_tokens} for the longest output; the memory has {size}"
        )

    def fits(self, job: Job, now: int, reserve: int) -> bool:
        """Return True if there is a hole for the piece of `job`. O(holes)."""
        del now, reserve
        return self.space.largest >= self.piece_length(job.request)

    def is_fragmented(self, request: Request) -> bool:
        """Return True if enough is free for `request`, but not in one piece. O(holes)."""
        space, need = self.space, self.piece_length(request)
        return space.largest < need <= space.free

    def held(self) -> tuple[int, int]:
        """Return the slots that open requests hold; none are cached."""
        return self.space.size - self.space.free, 0

    def slots_of(self, seq: Sequence) -> int:
        """Return how many slots `seq` has."""
        return self.piece(seq)[1]

    def open(
        self,
        job: Job,
        now: int,
        reserve: int,
        most: int | None = None,
        *,
        fits_prompt: bool = True,
    ) -> Sequence | None:
        """Return a new sequence for `job`, or None if no hole is long enough."""
        del reserve, most, fits_prompt  # the running jobs have all the slots they will need
        length = self.piece_length(job.request)
        try:
            start = self.space.take(length)
        except OutOfBlocks:
            return None
        # No blocks are allocated: the sequence has its slots already.
        again = job.admitted is not None
        seq = self._cache.open(job.known_request(), 0, now, resumed=again)
        self._pieces[seq.id] = start, length
        self._cache.settle(seq, job.target)
        self._count_blocks()
        self.idle += length
        self.uncomputed += seq.tokens
        return seq

    def close(self, job: Job, now: int, length: int | None = None) -> None:
        """Free the piece of `job`."""
        del length
        seq = job.seq
        assert seq is not None
        left = job.prefill_left
        self.idle -= self.slots_of(seq) - job.length
        self.uncomputed -= left
        self.space.give(*self._pieces.pop(seq.id))
        self._cache.close(seq, now, 0)
        self._count_blocks()

    def can_extend(self, seq: Sequence) -> bool:
        """Return True: every piece is long enough."""
        del seq
        return True

    def extend(self, seq: Sequence, tokens: int, now: int) -> None:
        """Use `tokens` more slots of the piece of `seq`."""
        del now
        self._cache.settle(seq, seq.tokens + tokens)

    def next_step(self, now: int) -> bool:
        """Count the next step as allocated."""
        del now
        self.allocated_until = self._batch.steps.count + 1
        return True

    def _allocate_ahead(self, steps: int, clock_ps: int, times: StepTimes) -> int:
        """Count `steps` steps as allocated."""
        del clock_ps, times
        self.allocated_until = self._batch.steps.count + steps
        return steps

    def _count_blocks(self) -> None:
        """Make the pool count as many free blocks as free slots are."""
        pool = self._cache.pool
        more = pool.free_blocks - self.space.free // self._block_size
        if more > 0:
            pool.allocate(more)
        else:
            pool.free(None, -more)


def longest_output(workload: Iterable[Request], max_output: int | None) -> int:
    """Return the longest output that a request of `workload` may have, in tokens.

    That is `max_output`; None is the longest of the workload, which is read for it.

    Raises:
        InputError: `max_output` is no number of tokens, or the workload can be read but once.
    """
    if max_output is None:
        if iter(workload) is workload:
            msg = (
                "contiguous allocation reads the workload for its longest output, and then "
                "serves it; this one can be read but once: give max_output, or a list"
            )
            raise InputError(msg)
        return max((request.output_tokens for request in workload), default=0)
    if type(max_output) is not int or max_output < 0:
        msg = f"max_output={max_output!r} must be a number of tokens, 0 or more"
        raise InputError(msg)
    return max_output


def contiguous_cache(cache: KVCache) -> KVCache:
    """Return a new cache of the size of `cache` for a `ContiguousAllocator`.

    Raises:
        InputError: `cache` has a trace, tiers, or a retention policy.
    """
    if cache.tiers is not None:
        msg = (
            "allocation='contiguous' has no blocks that a tier could hold: leave out one "
            "of the two"
        )
        raise InputError(msg)
    if cache.retention is not None:
        msg = (
            f"allocation='contiguous' with retention policy {cache.retention.name!r}: a "
            "piece of memory can only be given back whole; take one of the two"
        )
        raise InputError(msg)
    if cache.trace is not None:
        msg = (
            "a trace of contiguous allocation: traces are of blocks, which there are none of; "
            "leave the trace out, or use allocation='paged'"
        )
        raise InputError(msg)
    return KVCache(
        cache.pool.blocks,
        cache.geometry.block_size,
        prefix=resolve("prefix", None, "none"),
        key_tokens=cache.geometry.key_tokens,
    )
