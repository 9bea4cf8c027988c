"""Belady's rule for the blocks of a prefix tree: the most that any eviction could hit.

Blocks are of equal size, requests come one after another, and the whole future is known. The
rule evicts the block whose next request is furthest, the deepest first among equals. Two facts
make it cheap. Blocks of one request whose next request is the same one are evicted from their
end: they are counted, not listed. And the cached blocks of a request are a prefix of it, since
of two blocks on one path the deeper is never requested sooner: so a hit is a count as well.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 1966, for the blocks of a prefix tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from itertools import accumulate, groupby
from math import inf
from typing import Any, ClassVar, Self

import attrs

from kvcore.cache import ScoreEviction, Span
from kvcore.cache.layout import BlockLayout
from kvcore.cache.residency import CacheStats
from kvcore.errors import InputError
from kvcore.plugins import Plugin
from kvcore.plugins.options import instantiate
from kvcore.request import Key, Request

__all__ = ["Belady", "Future"]


def belady(
    lengths: Any,
    needs: Any,
    starts: Any,
    wanted: Any,
    ends: Any,
    pool: int,
    bypass: bool,  # noqa: FBT001 - numba knows no keyword arguments
    hits: Any,
) -> int:
    """Serve all requests by Belady's rule in a pool of `pool` blocks; return the evictions.

    The arguments are arrays of integers, so that numba can compile this same function (see
    `kvcore_lab.curves._mrc_kernels`). O(runs · log requests).

    Args:
        lengths: blocks of each request that other requests may share.
        needs: all blocks of each request, at least `lengths`; those that are not shared take
            room while the request is served, and are free after it.
        starts: the runs of request q are those from `starts[q]` to `starts[q + 1]`.
        wanted: the request that wants the blocks of a run next, rising within a request.
        ends: the position in blocks at which a run ends; it starts where the one before it
            ends. The blocks after a request's last run are never wanted again.
        pool: blocks of the pool. A longer request keeps its leading blocks.
        bypass: whether the blocks of a request may be evicted with it; otherwise they stay, as
            in a cache that allocates the blocks that it computes.
        hits: receives, for each request, the number of its first blocks that are cached.

    Returns:
        The number of blocks that were evicted; with `bypass`, those of a request that are
        evicted with it among them. Blocks beyond the length of the pool never come in.
    """
    never = len(lengths)
    # Cached blocks by the request that wants them next.
    counts = [0] * (never + 1)
    # Negated, so that the furthest comes first. Requests of the past stay in the heap: they
    # would come last, when nothing is left to evict. The 0 gives numba the type of the items.
    furthest = [0]
    cached = evicted = 0
    for serial in range(never):
        hits[serial] = counts[serial]
        cached -= counts[serial]
        kept = min(lengths[serial], pool)
        incoming = 0 if bypass else min(needs[serial], pool)
        # With `bypass` the request's blocks compete with the others: they come in first.
        for placing in (bypass, not bypass):
            if placing:
                start = 0
                first, last = starts[serial], starts[serial + 1]
                for run in range(first, last + 1):
                    after = wanted[run] if run < last else never
                    end = min(ends[run], kept) if run < last else kept
                    if end > start:
                        if not counts[after]:
                            heappush(furthest, -after)
                        counts[after] += end - start
                        cached += end - start
                        start = end
            else:
                excess = cached + incoming - pool
                while excess > 0:
                    latest = -furthest[0]
                    leaving = min(counts[latest], excess)
                    counts[latest] -= leaving
                    cached -= leaving
                    excess -= leaving
                    evicted += leaving
                    if not counts[latest]:
                        heappop(furthest)
    return evicted


@attrs.frozen
class Future:
    """The next uses of the blocks of each request, known once all requests are read.

    Blocks of one request whose next request is the same one form a run, and the runs of a
    request are in the order of these next requests. Memory: 8 bytes per run, and 12 per
    request. A request has few runs, however many blocks it has.

    Attributes:
        lengths: blocks of each request.
        reused: the number of its first blocks that an earlier request contained.
        starts, wanted, ends: the runs, in the form of the arguments of `belady`.
    """

    lengths: array[int]
    reused: array[int]
    starts: array[int]
    wanted: array[int]
    ends: array[int]

    @classmethod
    def read(cls, requests: Iterable[Request], geometry: BlockLayout) -> Self:
        """Read all of `requests`. O(keys) time; O(distinct keys) memory while it reads.

        Raises:
            InputError: a request cannot be read, has keys that do not fit `geometry`, or has a
                key that followed another key in an earlier request.
        """
        latest: dict[Key, int] = {}
        parents: dict[Key, Key | None] = {}
        lengths, reused = array("i"), array("i")
        owners, wanted, ends = array("i"), array("i"), array("i")
        for serial, request in enumerate(requests):
            keys, _, blocks, *_ = geometry.prompt(request)
            before = (None, *keys)[: len(keys)]
            known = tuple(map(parents.setdefault, keys, before))
            if known != before:
                pairs = zip(keys, known, before, strict=True)
                key = next(key for key, a, b in pairs if a != b)
                msg = (
                    f"request {request.id!r}: key {key!r} does not follow the keys it followed "
                    "in an earlier request, so there is no optimum: equal keys must mean equal "
                    "prefixes"
                )
                raise InputError(msg)
            end = 0
            for owner, run in groupby(map(latest.get, keys)):
                if owner is None:
                    break
                end += sum(1 for _ in run) * geometry.ratio
                owners.append(owner)
                wanted.append(serial)
                ends.append(end)
            latest.update(dict.fromkeys(keys, serial))
            lengths.append(blocks)
            reused.append(min(end, blocks))  # the last key may be of more tokens than there are
        # Runs were met in the order of the requests that want them; a stable sort puts
        # those of one owner side by side and keeps that order.
        order = sorted(range(len(owners)), key=owners.__getitem__)
        counts = array("i", bytes(len(lengths) * lengths.itemsize))
        for owner in owners:
            counts[owner] += 1
        return cls(
            lengths,
            reused,
            array("i", accumulate(counts, initial=0)),
            array("i", map(wanted.__getitem__, order)),
            array("i", map(ends.__getitem__, order)),
        )

    def stats(self, hits: Iterable[int], block_size: int) -> CacheStats:
        """Return the statistics of a run in which request i hits `hits[i]` blocks."""
        stats = CacheStats()
        for length, hit in zip(self.lengths, hits, strict=True):
            stats.admitted(length, hit, length * block_size, hit * block_size, resumed=False)
        return stats


@attrs.frozen
class Belady(Plugin):
    """The most blocks that any eviction could hit: a bound, not a policy.

    Serial, untimed, in `keys` accounting.

    Attributes:
        bypass: whether the blocks of a request may be evicted with it. In a cache that
            allocates the blocks that it computes, as `KVCache` does, they stay.
    """

    kind: ClassVar[str] = "bound"
    name: ClassVar[str] = "optimum"
    names: ClassVar[tuple[str, ...]] = ("belady", "optimum")

    bypass: bool = False

    @classmethod
    def from_text(cls, options: Mapping[str, str]) -> Self:
        """Build the bound from options as text, such as {"bypass": "true"}.

        Raises:
            InputError: another option than `bypass`, or another value than true and false.
        """
        return instantiate(cls, options)

    def hits(self, future: Future, blocks: int) -> tuple[array[int], int]:
        """Serve `future` in a pool of `blocks` blocks.

        Costs O(runs · log requests), whatever the block size.

        Returns:
            The blocks that each request hits, and the number that `belady` returns.
        """
        hits = array("i", bytes(4 * len(future.lengths)))
        runs = future.starts, future.wanted, future.ends
        evicted = belady(future.lengths, future.lengths, *runs, blocks, self.bypass, hits)
        return hits, evicted

    def replay(self, future: Future, blocks: int, block_size: int) -> tuple[CacheStats, int]:
        """Return the statistics of `hits` with blocks of `block_size` tokens, and evictions."""
        hits, evicted = self.hits(future, blocks)
        return future.stats(hits, block_size), evicted


class Foresight(ScoreEviction):
    """Belady's rule as an eviction policy: evict the block whose next use is furthest away.

    A leaf loses blocks from its end as long as their next request is equally far away. Under a
    clock, where requests overlap and running ones take room, the rule is no proven bound.
    Memory: 8 bytes per key of the workload, and a list per distinct key.

    Args:
        requests: all requests that will be served, in the order of the workload.
        layout: the layout of their keys in blocks.
    """

    name = "foresight"

    def __init__(self, requests: Iterable[Request], layout: BlockLayout) -> None:
        self._serials: dict[int | str, int] = {}
        self._coming: dict[Key, list[int]] = {}
        for serial, request in enumerate(requests):
            self._serials[request.id] = serial
            for key in layout.prompt(request)[0]:
                self._coming.setdefault(key, []).append(serial)
        for serials in self._coming.values():
            serials.reverse()
        self._passed = bytearray(len(self._serials))
        self._awaiting: dict[int, list[Span]] = {}

    def on_insert(self, span: Span, now: int) -> None:
        """Record that the request that stores the span runs."""
        self._pass(span)

    def on_access(self, span: Span, now: int) -> None:
        """Record that the request that hit the span runs."""
        self._pass(span)

    def score(self, span: Span, now: int) -> float:
        """Return the negative serial of the next request for the last block of the span."""
        nearest = self._next(span.keys()[-1])
        if nearest != inf:
            self._awaiting.setdefault(int(nearest), []).append(span)
        return -nearest

    def evictable_blocks(self, span: Span) -> int:
        """Return the number of blocks at the end whose next request is the same one."""
        keys, ratio = span.keys(), span.geometry.ratio
        latest = self._next(keys[-1])
        begin = len(keys) - 1
        while begin and self._next(keys[begin - 1]) == latest:
            begin -= 1
        return span.end - max(span.start, (span.start // ratio + begin) * ratio)

    def _next(self, key: Key) -> float:
        """Return the serial of the next request that has `key`; infinite without one."""
        coming = self._coming.get(key, [])
        while coming and self._passed[coming[-1]]:
            coming.pop()
        return coming[-1] if coming else inf

    def _pass(self, span: Span) -> None:
        """Mark the last request that used `span` as past; rescore the spans waiting for it."""
        serial = self._serials[span.last_request]
        if not self._passed[serial]:
            self._passed[serial] = True
            for waiting in self._awaiting.pop(serial, ()):
                self.rescore(waiting)
