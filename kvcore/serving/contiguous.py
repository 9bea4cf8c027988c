"""Memory before paging: each request in one piece, as long as it may ever get."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from typing import Literal, TypeAlias

import attrs

from kvcore.cache import KVCache, Sequence
from kvcore.errors import InputError, OutOfBlocks
from kvcore.plugins.manager import resolve
from kvcore.request import Request
from kvcore.serving.allocator import Growth
from kvcore.serving.decode_batch import Decoders
from kvcore.serving.latency import StepTimes
from kvcore.serving.scheduler import Job

Allocation: TypeAlias = Literal["paged", "contiguous"]


class AddressSpace:
    """Slots from 0 to `size` - 1, lent in contiguous pieces: first fit.

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
        """Start as one hole."""
        self.size = self.free = size
        self.holes = [(0, size)]

    @property
    def largest(self) -> int:
        """Slots of the longest hole."""
        return max((end - start for start, end in self.holes), default=0)

    def take(self, length: int) -> int:
        """Lend `length` slots in one piece; return the first.

        Raises:
            OutOfBlocks: no hole is long enough; nothing has changed.
        """
        for place, (start, end) in enumerate(self.holes):
            if end - start >= length:
                if end - start == length:
                    del self.holes[place]
                else:
                    self.holes[place] = start + length, end
                self.free -= length
                return start
        msg = (
            f"a piece of {length} slots was asked for; {self.free} of {self.size} are free, "
            f"the longest hole has {self.largest}"
        )
        raise OutOfBlocks(msg)

    def give(self, start: int, length: int) -> None:
        """Take back the piece of `length` slots that begins at `start`."""
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


class ContiguousCache(KVCache):
    """A cache that reserves one piece a request: its prompt and the longest possible output.

    So servers allocated before paging. Growth never fails, and nothing is shared: no prefix
    hits, no forks. There is no block, but blocks are what its size is given in, and what
    `pool` counts (the whole ones that are free), so that it compares with a paged cache.

    Args:
        blocks, block_size: its size: so many times so many slots, of a token each.
        max_output: the longest output that a request may ask for. One that asks for more
            all the same gets a piece for its own.
        key_tokens: tokens a request's block key stands for; None: `block_size`.

    Attributes:
        space: which slots are lent.
        max_output: as given.

    Source: Yu et al., "Orca", OSDI 2022, algorithm 1, which reserves a request's most tokens
    on admission.
    """

    def __init__(
        self, blocks: int, block_size: int, max_output: int, *, key_tokens: int | None = None
    ) -> None:
        prefix = resolve("prefix", None, "none")
        super().__init__(blocks, block_size, prefix=prefix, key_tokens=key_tokens)
        self.max_output = max_output
        self.space = AddressSpace(blocks * block_size)
        self._pieces: dict[int, tuple[int, int]] = {}

    def needs(self, request: Request) -> int:
        """Return the slots that `request` reserves."""
        return request.prompt_tokens + max(self.max_output, request.output_tokens)

    def piece(self, seq: Sequence) -> tuple[int, int]:
        """Return the first slot of `seq`, and how many it has."""
        return self._pieces[seq.id]

    def open(
        self,
        request: Request,
        first_tokens: int | None = None,
        now: int | None = None,
        *,
        resumed: bool = False,
        reserve: int = 0,
    ) -> Sequence:
        """Admit `request` if a hole is long enough for all it may need.

        `first_tokens` is as for a paged cache; the piece is the same. `reserve` means nothing
        here: those that run have all they will need.

        Raises:
            InputError: the request's keys are not those the cache was made for.
            OutOfBlocks: no hole is long enough; nothing has changed.
        """
        del reserve
        keys, tokens, _, _, lookup, _ = self.geometry.prompt(request)
        self._at(now)
        length = self.needs(request)
        try:
            start = self.space.take(length)
        except OutOfBlocks as error:
            msg = f"request {request.id}: {error}"
            raise OutOfBlocks(msg) from error
        self._last_id += 1
        self._admissions += 1
        allocated = tokens if first_tokens is None else first_tokens
        blocks = -(-allocated // self.geometry.block_size)
        root = self.tree.root
        seq = Sequence(
            self._last_id, self._admissions, request, keys, 0, lookup, 0, allocated, 0, blocks,
            root,
        )  # fmt: skip
        self.sequences[seq.id] = seq
        self._pieces[seq.id] = start, length
        self._recount()
        self.stats.admitted(lookup, 0, tokens, 0, resumed=resumed)
        return seq

    def extend(self, seq: Sequence, tokens: int, now: int | None = None) -> None:
        """Use `tokens` more slots of the piece of `seq`.

        Raises:
            InputError: it has not so many.
        """
        if self.sequences.get(seq.id) is not seq:
            self._refuse(seq)
        self._at(now)
        length = self.piece(seq)[1]
        if not 0 <= tokens <= length - seq.tokens:
            msg = (
                f"extend of sequence {seq.id} by {tokens} tokens: its piece has {length} "
                f"slots, of which {seq.tokens} are in use; give 0 to {length - seq.tokens}"
            )
            raise InputError(msg)
        seq.tokens += tokens
        seq.blocks = -(-seq.tokens // self.geometry.block_size)

    def close(self, seq: Sequence, now: int | None = None) -> None:
        """Take the piece of `seq` back."""
        if self.sequences.get(seq.id) is not seq:
            self._refuse(seq)
        self._at(now)
        seq.is_open = False
        del self.sequences[seq.id]
        self.space.give(*self._pieces.pop(seq.id))
        self._recount()

    def fork(self, seq: Sequence, now: int | None = None) -> Sequence:
        """Refuse: pieces are not shared."""
        del now
        msg = f"fork of sequence {seq.id}: contiguous memory shares nothing; use KVCache"
        raise InputError(msg)

    def rollback(self, seq: Sequence, tokens: int, now: int | None = None) -> None:
        """Refuse: a piece does not shrink."""
        del now
        msg = f"rollback of {tokens} tokens of sequence {seq.id}: use KVCache for that"
        raise InputError(msg)

    def check_integrity(self) -> None:
        """Check that pieces and holes tile the address space. O(pieces · log pieces).

        Raises:
            AssertionError: they overlap, leave slots out, or two holes touch.
        """
        pieces = [(start, start + length) for start, length in self._pieces.values()]
        end, after_hole = 0, False
        holes = set(self.space.holes)
        for part in sorted([*pieces, *holes]):
            is_hole = part in holes
            if part[0] != end or part[1] <= end or (is_hole and after_hole):
                msg = f"slots {part[0]} to {part[1] - 1} follow slot {end - 1}: {holes=}"
                raise AssertionError(msg)
            end, after_hole = part[1], is_hole
        free = sum(end - start for start, end in holes)
        if (
            end != self.space.size
            or free != self.space.free
            or self._pieces.keys() ^ self.sequences
        ):
            msg = (
                f"{len(pieces)} pieces of {len(self.sequences)} sequences, and {free} free "
                f"slots ({self.space.free} counted), end at {end} of {self.space.size}"
            )
            raise AssertionError(msg)

    def _recount(self) -> None:
        self.pool.free_blocks = self.space.free // self.geometry.block_size


class Reserved(Growth):
    """Growth into what is reserved: it takes nothing and never fails."""

    def __init__(self, cache: ContiguousCache, decoders: Decoders) -> None:
        """Take the memory and the jobs that grow."""
        super().__init__(cache, decoders)
        self._memory = cache

    def held(self) -> tuple[int, int]:
        """Return the slots that open requests hold; none are cached."""
        return self._memory.space.size - self._memory.space.free, 0

    def unfit(self, request: Request) -> str:
        """Say why no piece can be long enough for `request`; nothing if one can."""
        need, size = self._memory.needs(request), self._memory.space.size
        if need <= size:
            return ""
        return (
            f"it needs a piece of {need} slots, {request.prompt_tokens} for its prompt and "
            f"{need - request.prompt_tokens} for the longest output; the memory has {size}"
        )

    def fits(self, job: Job, now: int, spare: int) -> bool:
        """Say whether there is a hole for the piece of `job`. O(holes)."""
        del now, spare
        return self._memory.space.largest >= self._memory.needs(job.request)

    def splintered(self, request: Request) -> bool:
        """Say whether enough is free for `request`, but not in one piece. O(holes)."""
        space, need = self._memory.space, self._memory.needs(request)
        return space.largest < need <= space.free

    def next_step(self, now: int) -> bool:
        """Go on to the next step."""
        del now
        self._decoders.grown = self._decoders.steps.count + 1
        return True

    def ahead(self, steps: int, clock: int, times: StepTimes) -> int:
        """Go on for `steps` steps."""
        del clock, times
        self._decoders.grown = self._decoders.steps.count + steps
        return steps

    def room_for(self, seq: Sequence) -> bool:
        """Say yes."""
        del seq
        return True

    def _slots(self, seq: Sequence) -> int:
        return self._memory.piece(seq)[1]


def growth_in(cache: KVCache, decoders: Decoders) -> Growth:
    """Return how jobs grow in `cache`."""
    if isinstance(cache, ContiguousCache):
        return Reserved(cache, decoders)
    return Growth(cache, decoders)


def contiguous(
    cache: KVCache, workload: Iterable[Request], max_output: int | None
) -> ContiguousCache:
    """Return contiguous memory of the size of `cache`, for requests like those of `workload`.

    Without a `max_output` it is the longest output of the workload, which is read for it.

    Raises:
        InputError: `cache` has a trace, `max_output` is no number of tokens, or the
            workload can be read but once.
    """
    if cache.trace is not None:
        msg = (
            "a trace of contiguous allocation: traces are of blocks, which there are none of; "
            "leave the trace out, or use allocation='paged'"
        )
        raise InputError(msg)
    if max_output is None:
        if iter(workload) is workload:
            msg = (
                "contiguous allocation reads the workload for its longest output, and then "
                "serves it; this one can be read but once: give max_output, or a list"
            )
            raise InputError(msg)
        max_output = max((request.output_tokens for request in workload), default=0)
    elif type(max_output) is not int or max_output < 0:
        msg = f"max_output={max_output!r} must be a number of tokens, 0 or more"
        raise InputError(msg)
    size, key_tokens = cache.geometry.block_size, cache.geometry.key_tokens
    return ContiguousCache(cache.pool.blocks, size, max_output, key_tokens=key_tokens)


@attrs.frozen(kw_only=True)
class Fragmentation:
    """How well a run used its memory. Shares are of the pool's slots, one token each.

    `used + cached + internal` and what was free are the whole pool. Means are over the time
    from the first arrival on; between two events, lengths and blocks are taken to grow evenly
    with each step.

    Attributes:
        running: requests with a seat in the batch, mean.
        used: slots that hold tokens of open requests, mean. Shared ones count once.
        cached: slots that hold tokens of no open request, for later ones to hit, mean.
        internal: slots that open requests hold without a token in them (yet), mean: unfilled
            tails, prompts still to be computed, output still to come.
        uncomputed: those of them that prefill fills next, mean.
        internal_peak: the most of these at any event.
        external: share of the time in which the next request waited for memory although
            enough was free in sum, in holes too short for it. In a paged pool there is no
            such time.
        external_free: what was free at those times, mean; None without any.
    """

    running: float
    used: float
    cached: float
    internal: float
    uncomputed: float
    internal_peak: float
    external: float
    external_free: float | None

    @property
    def filled(self) -> float | None:
        """Share of the slots held by open requests that hold tokens: the effective use."""
        held = self.used + self.internal
        return self.used / held if held else None


class Occupancy:
    """Adds up what slots are used for, from event to event. O(1) a step."""

    def __init__(self, growth: Growth) -> None:
        """Take who knows what jobs hold."""
        self._growth = growth
        # What holds since the last event.
        self._running = self._held = self._cached = self._idle = self._uncomputed = 0
        self._blocked = False
        # What has happened since: picoseconds, steps, tokens that came into slots.
        self._took = self._steps = self._filled = 0
        self._last = 0, 0, 0
        # Sums over time; of what changes between events, twice the sums.
        self._time = self._ran = self._ahead = self._waited = 0
        self._holds = self._caches = self._idles = self._frees = 0
        self._peak = 0

    def event(self, running: int, refused: Job | None) -> None:
        """Take in that something has happened, and what holds until something else does.

        Args:
            running: jobs with a seat.
            refused: the job that waits for memory, if one does.
        """
        if self._took:
            self._add_up()
        growth = self._growth
        self._running = running
        self._held, self._cached = growth.held()
        self._idle, self._uncomputed = growth.idle, growth.uncomputed
        self._blocked = refused is not None and growth.splintered(refused.request)
        self._took = self._steps = self._filled = 0

    def passed(self, took: int, prefill: int = 0, decode: int = 0, steps: int = 1) -> None:
        """Take in what `steps` steps did, in `took` picoseconds; all is allocated for them.

        Args:
            took: the time they took; without steps, time that nothing was done in.
            prefill: tokens of prompts that came into their slots.
            decode: generated ones, as many with each step.
            steps: how many steps.
        """
        growth = self._growth
        # The idle slots are those that there were had nothing been filled since the event.
        self._last = *growth.held(), growth.idle + self._filled
        self._took += took
        self._steps += steps
        self._filled += prefill + decode
        growth.idle -= prefill + decode
        growth.uncomputed -= prefill

    def summary(self) -> Fragmentation:
        """Return the shares."""
        self.event(0, None)
        time, slots = max(self._time, 1), self._growth.slots
        whole = time * slots
        waited = self._waited
        return Fragmentation(
            running=self._ran / time,
            used=(self._holds - self._idles) / (2 * whole),
            cached=self._caches / (2 * whole),
            internal=self._idles / (2 * whole),
            uncomputed=self._ahead / whole,
            internal_peak=self._peak / slots,
            external=waited / time,
            external_free=self._frees / (2 * waited * slots) if waited else None,
        )

    def _add_up(self) -> None:
        """Add the time since the last event. What grew or was filled did so evenly."""
        took, (held, cached, idle) = self._took, self._last
        # A step's tokens are there after it: those of the last one do not count yet.
        idle -= self._filled - self._filled // max(self._steps, 1)
        held += self._held
        self._time += took
        self._ran += took * self._running
        self._ahead += took * self._uncomputed
        self._holds += took * held
        self._caches += took * (self._cached + cached)
        self._idles += took * (self._idle + idle)
        self._peak = max(self._peak, self._idle, idle)
        if self._blocked:
            self._waited += took
            self._frees += took * (2 * self._growth.slots - held)
