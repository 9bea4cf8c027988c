"""Statistics of a cache: hits, ages of blocks at hits and evictions, blocks stored again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, sub
from typing import Any, TypeAlias

import attrs

from kvcore.cache.layout import common_prefix
from kvcore.cache.span import Span
from kvcore.histogram import Histogram
from kvcore.record import Record
from kvcore.request import Key
from kvcore.units import NS_PER_S

EvictedRun: TypeAlias = tuple[int, int, Sequence[Key], int]
"""(start, end, keys, evicted): the blocks `[start, end)` of the path with these keys, and the
number of blocks evicted up to the first of them, which left last."""

Entry: TypeAlias = tuple[int, Sequence[Key], int, int, int]
"""(evictions, keys, first, end, ratio): the blocks `[first, end)` of the path with these keys
were stored, after this number of evictions. Each key stands for `ratio` blocks."""

Exit: TypeAlias = tuple[Sequence[Key], int, int, int, int, int, int]
"""(keys, first, end, ratio, idle, lifetime, hits): the blocks `[first, end)` of that path left.
`idle` and `lifetime` are the ns since their last access and since they were stored (-1 where
blocks left one by one), and `hits` the number of their hits."""


class Refaults:
    """Counts blocks that are stored again after at most `window` others were evicted.

    A run of evicted blocks left from its tail on, all at once or one by one. Runs are indexed
    by their first block, and refer to their keys. Evicting costs O(1), storing O(runs stored
    again), or O(blocks) once some have expired. Memory: of the runs evicted in two windows.

    Attributes:
        blocks: number of blocks stored again.

    Source: the refault distance of Linux (mm/workingset.c, Weiner, 2014), the number of pages
    evicted between the eviction of a page and its return: a cache larger by that many pages
    would have kept it.
    """

    __slots__ = ("_clock", "_old", "_turn", "_window", "_young", "blocks")

    def __init__(self, window: int) -> None:
        """Start without evicted runs."""
        self.blocks = self._clock = 0
        self._window = window
        # Runs evicted in this window of evictions, and in the previous one; older ones are not
        # needed.
        self._young: dict[tuple[Key, int], EvictedRun] = {}
        self._old: dict[tuple[Key, int], EvictedRun] = {}
        self._turn = window

    def record(self, stored: Iterable[Entry], gone: Sequence[Exit], expired: int = 0) -> None:
        """Record stored and evicted blocks, each in order; `expired` others left before."""
        done = 0
        for evictions, keys, first, end, ratio in stored:
            if done < evictions:
                self._evicted(gone[done:evictions])
                done = evictions
            self._stored(keys, first, end, ratio, expired)
        self._evicted(gone[done:])

    def _evicted(self, gone: Iterable[Exit]) -> None:
        """Record evictions between which nothing was stored."""
        path: Sequence[Key] | None = None
        start = upto = of = 0
        for keys, first, end, ratio, _, _, _ in gone:
            # The end of a path often leaves block by block.
            if end == start and keys is path:
                start = first
                continue
            if path is not None:
                self._left(path, start, upto, of)
            path, start, upto, of = keys, first, end, ratio
        if path is not None:
            self._left(path, start, upto, of)

    def _left(self, keys: Sequence[Key], start: int, end: int, ratio: int) -> None:
        """Record that the blocks `[start, end)` of the path with `keys` are evicted."""
        self._clock = clock = self._clock + end - start
        if clock > self._turn:
            self._old, self._young = self._young, {}
            self._turn = clock + self._window
        self._remember((start, end, keys, clock), ratio)

    def _stored(self, keys: Sequence[Key], start: int, end: int, ratio: int, gaps: int) -> None:
        """Record that the blocks `[start, end)` of the path with `keys` are stored."""
        # The evicted runs of a path begin where its cached part ends, without `gaps` of others.
        oldest = self._clock - self._window
        while start < end:
            run = self._taken(keys[start // ratio], start % ratio)
            if run is None:
                start = start + 1 if gaps else end
                continue
            _, last, path, clock = run
            stop = common_prefix(path, keys, start, min(last, end), ratio)
            if clock >= oldest:
                self.blocks += min(stop - start, clock - oldest + 1)
            if stop < last:
                self._remember((stop, last, path, clock - (stop - start)), ratio)
            start = stop

    def _remember(self, run: EvictedRun, ratio: int) -> None:
        """Store an evicted run, in place of an earlier one that began in the same block."""
        key, offset = run[2][run[0] // ratio], run[0] % ratio
        self._taken(key, offset)
        self._young[key, offset] = run

    def _taken(self, key: Key, offset: int) -> EvictedRun | None:
        """Remove and return the run that begins in the block of `key` at `offset`."""
        return self._young.pop((key, offset), None) or self._old.pop((key, offset), None)


BlockStats: TypeAlias = tuple[int, int, int]
"""(idle, lifetime, hits) of blocks that leave, as in `Exit`."""

TIER = "gpu"
"""The name of the pool as a tier, in JSON and metrics."""

SERIES = (1, 2, 5)

AGES = [digit * 10**zeros for zeros in range(6, 14) for digit in SERIES]
"""Bounds of the buckets of times in JSON and metrics: 1 ms to 50,000 s, in nanoseconds."""

COUNTS = [0, *(digit * 10**zeros for zeros in range(3) for digit in SERIES), 1000]
"""Bounds of the buckets of numbers of hits in JSON and metrics."""

BATCH = 4096
"""Events that are stored before they are counted together."""


class Residency:
    """Statistics of one tier: how long blocks stay until they are hit or evicted.

    `KVCache.record_residency` makes one and records in it from then on; a cache without one
    pays nothing. Times are nanoseconds, and the age of a block is that of its span: the time
    since the span was stored (its first blocks, if it grew) or last hit by another request.

    An event is stored, at O(spans that it concerns), and counted with some thousand others;
    `settle` counts the stored events. Memory is bounded: the histograms, and references to the
    keys of as many evicted blocks as the pool has.

    Args:
        blocks: blocks of the pool, and the number of evicted blocks that are kept.
        tier: name of the tier.

    Attributes:
        age_at_hit: time since the last access before a hit by another request.
        age_at_eviction: time since the last access of a block when it was evicted.
        lifetime: time since a block was stored when it was evicted.
        hits_at_eviction: number of requests that had hit a block when it was evicted.
        stored_blocks: blocks that entered the tier.
        refaults: counts those of them that had been evicted by reason `capacity`, at most as
            many evictions earlier as the pool has blocks.
        evicted_blocks: blocks that left, by reason: `capacity` or `expired`.
    """

    def __init__(self, blocks: int, tier: str = TIER) -> None:
        """Create empty statistics."""
        self.blocks, self.tier = blocks, tier
        self.age_at_hit, self.age_at_eviction = Histogram(), Histogram()
        self.lifetime, self.hits_at_eviction = Histogram(), Histogram()
        self.stored_blocks = 0
        self.evicted_blocks = {"capacity": 0, "expired": 0}
        self.refaults = Refaults(blocks)
        # Events that are not counted yet: (age, blocks) of hits, stored blocks, victims, and
        # expired blocks.
        self._ages: list[tuple[int, int]] = []
        self._stored: list[Entry] = []
        self._gone: list[Exit] = []
        self._expired: list[Exit] = []

    def on_hit(self, span: Span, now: int) -> None:
        """Called when `span` and its ancestors are hit, before their statistics change."""
        ages = self._ages
        while span.parent is not None:
            ages.append((now - span.last_access, span.end - span.start))
            span = span.parent
        if len(ages) > BATCH:
            self.settle()

    def on_store(self, span: Span, blocks: int) -> None:
        """Called when the last `blocks` blocks of `span` have been stored."""
        self.record_store(span.path_keys, span.end - blocks, span.end, span.geometry.ratio)

    def on_evict(self, span: Span, blocks: int, now: int, reason: str) -> None:
        """Called when the last `blocks` blocks of `span` are about to be evicted."""
        # `record_evict`, inlined.
        notes = self._gone if reason == "capacity" else self._expired
        end = span.end
        notes.append(
            (
                span.path_keys, end - blocks, end, span.geometry.ratio,
                now - span.last_access, now - span.created, span.hit_count,
            )
        )  # fmt: skip
        if len(notes) > BATCH:
            self.settle()

    def on_evict_by_block(self, span: Span, times: Sequence[int]) -> None:
        """Called when the last blocks of `span` are evicted, one at each of `times` (ns)."""
        end, ratio, stats = span.end, span.geometry.ratio, (-1, -1, span.hit_count)
        self.age_at_eviction.add_ascending(times, span.last_access)
        self.lifetime.add_ascending(times, span.created)
        self.record_evict(span.path_keys, end - len(times), end, ratio, stats, "capacity")

    def record_hit(self, age: int, blocks: int) -> None:
        """Record a hit of `blocks` blocks, `age` ns after their last access."""
        self._ages.append((age, blocks))
        if len(self._ages) > BATCH:
            self.settle()

    def record_store(self, keys: Sequence[Key], first: int, end: int, ratio: int) -> None:
        """Record that the blocks `[first, end)` of a path were stored, `ratio` a key."""
        self._stored.append((len(self._gone), keys, first, end, ratio))
        if len(self._stored) > BATCH:
            self.settle()

    def record_evict(
        self,
        keys: Sequence[Key],
        first: int,
        end: int,
        ratio: int,
        stats: BlockStats,
        reason: str,
    ) -> None:
        """Record that the blocks `[first, end)` of a path are evicted, with their `stats`."""
        notes = self._gone if reason == "capacity" else self._expired
        notes.append((keys, first, end, ratio, *stats))
        if len(notes) > BATCH:
            self.settle()

    def settle(self) -> None:
        """Count the stored events. Methods that return numbers call it first."""
        ages, expired = self._ages, self._expired
        stored, gone = self._stored, self._gone
        self._ages, self._expired, self._stored, self._gone = [], [], [], []
        if ages:
            self.age_at_hit.extend(*zip(*ages, strict=True))
        self._count("expired", expired)
        self._count("capacity", gone)
        self.stored_blocks += sum([end - first for _, _, first, end, _ in stored])
        self.refaults.record(stored, gone, self.evicted_blocks["expired"])

    def _count(self, reason: str, gone: list[Exit]) -> None:
        """Count blocks that left, with their ages and hits."""
        if not gone:
            return
        _, first, end, _, idle, lifetime, hits = zip(*gone, strict=True)
        blocks = tuple(map(sub, end, first))
        self.evicted_blocks[reason] += sum(blocks)
        self.hits_at_eviction.extend(hits, blocks)
        if -1 in idle:  # `on_evict_by_block` has counted the times of these
            rest = [row for row in zip(idle, lifetime, blocks, strict=True) if row[0] >= 0]
            if not rest:
                return
            idle, lifetime, blocks = zip(*rest, strict=True)
        self.age_at_eviction.extend(idle, blocks)
        self.lifetime.extend(lifetime, blocks)

    @property
    def restored_blocks(self) -> int:
        """Blocks stored again after at most as many evictions as the pool has blocks."""
        self.settle()
        return self.refaults.blocks

    @property
    def never_hit_blocks(self) -> int:
        """Blocks that no other request had hit before they left."""
        self.settle()
        return self.hits_at_eviction.at_most([0])[0]

    @property
    def thrashing(self) -> bool:
        """Whether the cache thrashes: it stores blocks again that it has just evicted.

        It does if all of these hold, in blocks:

        * at least a whole pool has been evicted as victims;
        * more than half of the evicted blocks had never been hit;
        * some blocks were stored again within a pool of evictions (`restored_blocks`), and no
          fewer than were hit.

        By the last condition at least half of the blocks that were needed again, at a distance
        that a pool of twice the size holds, had been evicted: such a pool would hit about twice
        as much. Blocks that are read only once are evicted and never stored again, so they are
        no thrashing.

        Source: Denning, "Thrashing: its causes and prevention", 1968. The distance is the
        refault distance of Linux (mm/workingset.c, Weiner, 2014): the pages evicted between
        the eviction of a page and its return, compared with the size of memory. As in the
        ghost lists of ARC (Megiddo and Modha, 2003), as many evicted blocks are kept as the
        pool has. The thresholds are those of kvcore.
        """
        self.settle()
        gone = sum(self.evicted_blocks.values())
        return (
            self.evicted_blocks["capacity"] >= self.blocks
            and 2 * self.never_hit_blocks > gone
            and self.restored_blocks >= max(self.age_at_hit.weight, 1)
        )

    def as_dict(self) -> dict[str, Any] | None:
        """Return the JSON object of the statistics; None without hits and evictions."""
        self.settle()
        if not (self.age_at_hit.weight or self.lifetime.weight):
            return None
        return {
            "age_at_hit_s": self.age_at_hit.as_dict(NS_PER_S, AGES, "blocks"),
            "age_at_eviction_s": self.age_at_eviction.as_dict(NS_PER_S, AGES, "blocks"),
            "lifetime_s": self.lifetime.as_dict(NS_PER_S, AGES, "blocks"),
            "hits_at_eviction": self.hits_at_eviction.as_dict(1, COUNTS, "blocks"),
            "stored_blocks": self.stored_blocks,
            "restored_blocks": self.restored_blocks,
            "evicted_blocks": dict(self.evicted_blocks),
            "never_hit_blocks": self.never_hit_blocks,
            "thrashing": self.thrashing,
        }

    def by_tier(self) -> dict[str, Any] | None:
        """Return `as_dict()` under the name of the tier, or None."""
        rested = self.as_dict()
        return None if rested is None else {self.tier: rested}


@attrs.define(repr=False)
class CacheStats(Record):
    """Counts of first admissions; hits of resumed requests are counted separately.

    Attributes:
        requests: first admissions.
        lookup_blocks, hit_blocks: blocks looked up, and those that hit.
        lookup_tokens, hit_tokens: prompt tokens, and those in blocks that hit.
        self_hit_blocks: blocks that resumed requests hit, most of them their own.
        dropped_blocks: blocks that open sequences have dropped.
        compactions: number of compactions of sequences.
        compacted_tokens, compacted_blocks: tokens and blocks that they removed from tables.
        deferred_compactions: compactions that were put off, since blocks were missing.
        lost_tokens: upper bound of the tokens that could not hit because blocks hit as a
            whole: what the last block of a prompt holds without the last token, for prompts
            of which all blocks before it have hit.
        looked_up: requests with at least one lookup block.
        ratio_sum: the sum of their hit ratios.
    """

    requests: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    self_hit_blocks: int = 0
    dropped_blocks: int = 0
    compactions: int = 0
    compacted_tokens: int = 0
    compacted_blocks: int = 0
    deferred_compactions: int = 0
    lost_tokens: int = 0
    looked_up: int = 0
    ratio_sum: float = 0.0

    @classmethod
    def sum(cls, stats: Iterable[CacheStats]) -> CacheStats:
        """Return the sums of the counts of several caches."""
        caches = list(stats)
        names = attrs.fields_dict(cls)
        return cls(**{name: sum(map(attrgetter(name), caches)) for name in names})

    def admitted(
        self,
        lookup: int,
        hit: int,
        tokens: int,
        hit_tokens: int,
        resumed: bool,  # noqa: FBT001 - a keyword costs more than half of the rest
    ) -> None:
        """Count an admission that hit `hit` of `lookup` blocks of `tokens` tokens."""
        if resumed:
            self.self_hit_blocks += hit
            return
        self.requests += 1
        self.lookup_tokens += tokens
        if lookup:
            self.looked_up += 1
            self.lookup_blocks += lookup
            if hit:
                self.hit_blocks += hit
                self.hit_tokens += hit_tokens
                self.ratio_sum += hit / lookup
                rest = tokens - 1 - hit_tokens
                if 0 < rest * hit < hit_tokens:
                    self.lost_tokens += rest

    def ratios(self) -> dict[str, float | None]:
        """Return the hit ratio weighted by block, by token and by request.

        All three are None without a lookup block.
        """
        if not self.looked_up:
            return dict.fromkeys(("block", "token", "request"))
        return {
            "block": self.hit_blocks / self.lookup_blocks,
            "token": self.hit_tokens / self.lookup_tokens,
            "request": self.ratio_sum / self.looked_up,
        }
