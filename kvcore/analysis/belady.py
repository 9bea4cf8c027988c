"""What the optimum would have hit at each admission of a trace."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate, groupby
from typing import Any, ClassVar, Self

import attrs

from kvcore.cache.layout import BlockLayout
from kvcore.cache.residency import CacheStats
from kvcore.errors import InputError
from kvcore.plugins.options import nearest
from kvcore.request import Key, Request
from kvcore.trace.layout import Prompt


@attrs.frozen(eq=False)
class Turn:
    """A first admission, and which later ones want its blocks next.

    Attributes:
        prompt: what it admits.
        runs: (admission, first block, end) of those that are wanted again, by the number of
            the admission that is the next to have them, in rising order.
    """

    prompt: Prompt
    runs: list[tuple[int, int, int]] = attrs.field(factory=list)


def optimum_hits(turns: Sequence[Turn], pool: int) -> Iterator[int]:
    """Yield for each of `turns` how many blocks, from its first on, the optimum would hit.

    The optimum serves one after another, in a pool of so many blocks: what a turn hits is
    cached of it; its prompt must fit, its shareable blocks stay; of all others those leave
    that are wanted furthest away, deepest first among equals. In `keys` counting that is
    exactly `kvcore.analysis.Optimum`. In `tokens` counting it is the same rule, for blocks that
    are full; the partial one makes room and is gone. Costs O(runs · log turns).

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
    Systems Journal 1966, for the blocks of a prefix tree.
    """
    never = len(turns)
    wanted = [0] * (never + 1)
    # Negated, so that the furthest comes first; those of the past have no blocks, come last.
    furthest: list[int] = []
    held = 0
    for now, turn in enumerate(turns):
        prompt, extent = turn.prompt, wanted[now]
        yield min(extent, prompt.limit)
        held -= extent
        kept = min(prompt.cacheable, pool)
        excess = held + max(min(prompt.blocks, pool), kept) - pool
        while excess > 0:
            last = -furthest[0]
            count = min(wanted[last], excess)
            wanted[last] -= count
            held -= count
            excess -= count
            if not wanted[last]:
                heappop(furthest)
        rest = kept
        for after, first, end in (*turn.runs, (never, 0, kept)):
            count = min(min(end, kept) - min(first, kept), rest)
            if count:
                if not wanted[after]:
                    heappush(furthest, -after)
                wanted[after] += count
                rest -= count
        held += kept


_BYPASS = {"true": True, "false": False}


@attrs.frozen
class Future:
    """When the blocks of each request are wanted next, known once all requests are read.

    Blocks of one request that are wanted next by one and the same request form a run, and
    the runs of a request are in the order of those requests. Memory: 8 bytes a run, of
    which a request has a few however many blocks it has, and 8 a request.

    Attributes:
        lengths: blocks of each request.
        starts: the runs of request q are those from `starts[q]` to `starts[q + 1]`.
        next_requests: the serial of the request that wants a run's blocks next.
        ends: the position in blocks at which a run ends; it starts where the one before
            it ends. The blocks after a request's last run are never wanted again.
    """

    lengths: array[int]
    starts: array[int]
    next_requests: array[int]
    ends: array[int]

    @classmethod
    def read(cls, requests: Iterable[Request], geometry: BlockLayout) -> Self:
        """Read all of `requests`. O(keys) time; O(distinct keys) memory while it reads.

        Raises:
            InputError: a request that cannot be read, whose keys `geometry` is not for, or
                with a key that followed another key before.
        """
        latest: dict[Key, int] = {}
        lengths, reached = array("i"), array("i")
        owners, next_requests, ends = array("i"), array("i"), array("i")
        for serial, request in enumerate(requests):
            keys, _, blocks, *_ = geometry.prompt(request)
            end = 0
            for owner, run in groupby(map(latest.get, keys)):
                if owner is None:
                    break
                if reached[owner] != end:
                    raise _contradiction(request, keys[end // geometry.ratio])
                end += sum(1 for _ in run) * geometry.ratio
                reached[owner] = end
                owners.append(owner)
                next_requests.append(serial)
                ends.append(end)
            latest.update(dict.fromkeys(keys, serial))
            lengths.append(blocks)
            reached.append(0)
        # Runs were met in the order of the requests that want them; a stable sort puts
        # those of one owner side by side and keeps that order.
        order = sorted(range(len(owners)), key=owners.__getitem__)
        counts = array("i", bytes(len(lengths) * lengths.itemsize))
        for owner in owners:
            counts[owner] += 1
        return cls(
            lengths,
            array("i", accumulate(counts, initial=0)),
            array("i", map(next_requests.__getitem__, order)),
            array("i", map(ends.__getitem__, order)),
        )

    def runs(self, serial: int) -> Iterator[tuple[int, int]]:
        """Yield (next request, end) of each run of a request, and of what is never wanted.

        For the latter, the next request is the one after the last of the workload.
        """
        first, last = self.starts[serial : serial + 2]
        yield from zip(self.next_requests[first:last], self.ends[first:last], strict=True)
        yield len(self.lengths), self.lengths[serial]


@attrs.frozen
class Optimum:
    """The most blocks that any eviction could hit: a bound, not a policy.

    Serial, untimed, `keys` counting. A request hits what is cached of it. Then its first
    `pool` blocks are cached, and of the others those leave that are wanted last, deepest
    first among equals.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
    Systems Journal 1966, for the blocks of a prefix tree.

    Attributes:
        bypass: whether a request's own blocks need not stay either. They must where a cache
            allocates what it computes, as `KVCache` does.
    """

    name: ClassVar[str] = "optimum"

    bypass: bool = False

    @classmethod
    def from_text(cls, options: Mapping[str, str]) -> Self:
        """Build it from options as text, such as {"bypass": "true"}.

        Raises:
            InputError: an option that is not `bypass`, or a value not true or false.
        """
        for option, value in options.items():
            if option != "bypass":
                msg = (
                    f"the optimum has no option {option!r}{nearest(option, ['bypass'])}. "
                    "Its options: bypass=false."
                )
                raise InputError(msg)
            if value not in _BYPASS:
                msg = f"option 'bypass' of the optimum takes true or false, not {value!r}"
                raise InputError(msg)
        return cls(**{option: _BYPASS[value] for option, value in options.items()})

    def options(self) -> dict[str, Any]:
        """Return the options by name."""
        return {"bypass": self.bypass}

    def replay(self, future: Future, blocks: int, block_size: int) -> tuple[CacheStats, int]:
        """Play the optimum in a pool of `blocks` blocks of `block_size` tokens.

        O(runs · log requests), whatever the block size. Returns the statistics, and how many
        blocks were evicted or, with `bypass`, not kept.
        """
        cached = _Cached(blocks, len(future.lengths))
        stats = CacheStats()
        evicted = 0
        for serial, length in enumerate(future.lengths):
            hit = cached.take(serial)
            stats.admitted(length, hit, length * block_size, hit * block_size, resumed=False)
            kept = min(length, blocks)
            if not self.bypass:
                evicted += cached.evict(kept)
            start = 0
            for next_request, end in future.runs(serial):
                cached.put(next_request, min(end, kept) - start)
                start = min(end, kept)
            if self.bypass:
                evicted += cached.evict(0)
        return stats, evicted


class _Cached:
    """The cached blocks, counted by the request that wants them next."""

    __slots__ = ("_blocks", "_counts", "_furthest", "_room")

    def __init__(self, room: int, requests: int) -> None:
        self._room = room
        self._blocks = 0
        self._counts = array("q", bytes(8 * (requests + 1)))
        # Negated serials, so that the furthest comes first. Those of the past stay in it:
        # they would come last, when there is nothing left to evict.
        self._furthest: list[int] = []

    def take(self, request: int) -> int:
        """Take out what `request` wants; return how many blocks these are."""
        count = self._counts[request]
        self._blocks -= count
        return count

    def put(self, next_request: int, count: int) -> None:
        """Put in `count` blocks that `next_request` wants."""
        if not count:
            return
        if not self._counts[next_request]:
            heappush(self._furthest, -next_request)
        self._counts[next_request] += count
        self._blocks += count

    def evict(self, incoming: int) -> int:
        """Evict what does not fit beside `incoming` more blocks; return how many."""
        excess = missing = max(0, self._blocks + incoming - self._room)
        while missing:
            furthest = -self._furthest[0]
            count = min(self._counts[furthest], missing)
            self._counts[furthest] -= count
            missing -= count
            if not self._counts[furthest]:
                heappop(self._furthest)
        self._blocks -= excess
        return excess


def _contradiction(request: Request, key: Key) -> InputError:
    return InputError(
        f"request {request.id!r}: key {key!r} does not follow the keys it followed in an "
        "earlier request, so there is no optimum: equal keys must mean equal prefixes"
    )
