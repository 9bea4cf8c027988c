"""The tiers below a cache: which blocks are written to them and loaded from them, and when.

         pool      <- the levels, nearest first: each has slots, a directory of spans like
      ----|----       that of the pool, an eviction policy, and a link
      down | up
       level 0     down: blocks that the level above evicts, stores, or hits often enough
      ----|----    up: blocks that an admission finds here and not in a nearer level, if
       level 1         loading them is faster than computing them again

A level holds every path from its first block on: a block is stored together with the blocks
before it that are missing, which the level above has. So levels are looked up as the pool is,
and use the same eviction policies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Generic, TypeVar, cast

import attrs

from kvcore.cache.kvcache import KVCache
from kvcore.cache.residency import CacheStats, Residency
from kvcore.cache.sequence import Sequence as Holder
from kvcore.cache.span import Span
from kvcore.cache.tiers import PrefillTime, Tier
from kvcore.plugins import describe, resolve
from kvcore.request import Request
from kvcore.units import NS_PER_S
from kvcore_tiers.level import Level, Mover, Part, TierLevel, Upper, keyed, span_with

LevelT = TypeVar("LevelT", bound=TierLevel)


@attrs.define(eq=False)
class Load:
    """A load of blocks into the private blocks of a sequence.

    Attributes:
        seq: the sequence; the blocks are loaded into its private blocks from `seq.span.end` on.
        parts: the blocks by level, in the order of the prompt.
        ready: the time (ns) at which all of them can be used.
        tokens: tokens that `seq` has computed after the load.
        resumed: whether it is for a preempted request that returns.
        ahead: whether it is a prefetch, for a request that has not arrived.
        awaited: the prefetch that `seq` waits for, in a load without parts; else None.
    """

    seq: Holder
    parts: list[Part]
    ready: int
    tokens: int
    resumed: bool
    ahead: bool = False
    awaited: Load | None = None


class TierStack(Generic[LevelT]):
    """The tiers below a cache, nearest first: their names and statistics.

    Attributes:
        cache: the cache.
        levels: the tiers in use, nearest first.
    """

    cache: Any
    levels: list[LevelT]
    _devices: int

    def describe(self) -> None:
        """Write the tiers into the header of the trace, with their recovered blocks."""
        if self.cache.trace is not None:
            self.cache.trace.describe(
                tiers=[
                    {
                        "tier": level.name,
                        **describe(level.tier),
                        "slots": level.pool.blocks,
                        "slot_bytes": level.slot_bytes,
                        "devices": self._devices if level.tier.per_device else 1,
                    }
                    | ({"recovered": level.stats.recovered} if level.stats.recovered else {})
                    for level in self.levels
                ]
            )

    def _begin_use(self, slot_bytes: int) -> None:
        """Bind and link the tiers; tell policies how long one takes to give a block back."""
        for level in self.levels:
            level.tier.bind()
        for level, below in pairwise(self.levels):
            level.below = below
        if self.levels and self.levels[0].tier.load != "never":
            # Of many, which share the latency of one transfer, and its rounding to whole ns.
            many = self.levels[0].link.load_ns(1000 * slot_bytes, 0)
            self.cache.geometry.reload_seconds = many / (1000 * NS_PER_S)

    def hit_stats(self, level: LevelT | None = None) -> CacheStats:
        """Return the statistics of first admissions with the hits of `level` alone.

        None: the hits of the pool and of all levels.
        """
        stats: CacheStats = self.cache.stats
        size = self.cache.geometry.block_size
        of = self.levels if level is None else [level]
        hits = sum(each.stats.hits for each in of)
        ratios = sum(each.stats.ratio_sum for each in of)
        pool = stats if level is None else CacheStats()
        return attrs.evolve(
            stats,
            hit_blocks=pool.hit_blocks + hits,
            hit_tokens=pool.hit_tokens + hits * size,
            ratio_sum=pool.ratio_sum + ratios,
        )

    def as_dict(self) -> list[dict[str, Any]]:
        """Return the JSON object of each level: its size, hits and traffic."""
        return [
            {
                "tier": level.name,
                "hit_blocks": level.stats.hits,
                "ratio": self.hit_stats(level).ratios(),
                "slots": level.pool.blocks,
                "memory_bytes": level.pool.blocks * level.slot_bytes,
                "used_blocks": level.pool.blocks - level.pool.free_blocks,
                **{
                    f"{name}_blocks": getattr(level.stats, name)
                    for name in (
                        "stored", "parked", "found", "loaded", "returned", "prefetched",
                        "recomputed", "skipped", "refused",
                    )
                },
                "prefetch_hit_blocks": level.stats.prefetch_hits,
                "recovered_blocks": level.stats.recovered,
                "errors": level.stats.errors,
                "loads": level.stats.loads,
                "dropped_blocks": dict(level.stats.dropped),
                "read_bytes": level.link.read_bytes,
                "written_bytes": level.link.written_bytes,
                "link_busy_s": level.link.busy_ns / NS_PER_S,
                "load_s": level.stats.load_ns / NS_PER_S,
                "load_wait_s": level.stats.wait_ns / NS_PER_S,
            }
            for level in self.levels
        ]  # fmt: skip


class Tiers(Upper, TierStack[Level]):
    """The tiers below a cache, and the transfers between them and the pool.

    Args:
        cache: the cache, which has served no request yet.
        tiers: tiers, nearest first: instances, or texts such as `host:memory=64GiB`.
        slot_bytes: bytes of a block in all layers.
        devices: number of GPUs that share the model; bandwidths of tiers that have a link for
            each GPU are multiplied by it.
        ids: whether slots have ids, which only a mover reads.

    Attributes:
        mover: moves the bytes in a run on tensors, set by `move_with`; None in a simulation.
        keeps_ids: whether slots have ids.

    Raises:
        InputError: a tier smaller than a block, or in use already.
    """

    def __init__(
        self,
        cache: KVCache,
        tiers: Iterable[Tier | str],
        slot_bytes: int,
        *,
        devices: int = 1,
        ids: bool = False,
    ) -> None:
        self.cache: KVCache = cache
        self.mover: Mover | None = None
        self.keeps_ids = ids
        self.levels = [
            Level(cache, tier, name, slot_bytes, devices, ids=ids)
            for name, tier in used_tiers(tiers, slot_bytes)
        ]
        self.below = self.levels[0] if self.levels else None
        self._loading: list[Load] = []
        # By id: sequences with shared blocks that a step is still to compute.
        self._planned: dict[int, Holder] = {}
        # By request: its prefetch under way, and the ranges of blocks that one has loaded.
        self._ahead: dict[int | str, Load] = {}
        self._brought: dict[int | str, list[tuple[Level, int, int]]] = {}
        self._begin_use(slot_bytes)
        if self.levels:
            cache.tree.watcher = self
        cache.tiers = self
        self._devices = devices
        self.describe()

    def move_with(self, mover: Mover) -> None:
        """Set the `mover` that moves the bytes of all levels."""
        self.mover = mover
        for level in self.levels:
            level.mover = mover

    # Down: no block before a step has computed it, though others may hit it since the plan.

    def stored(self, span: Span, blocks: int, now: int) -> None:
        """Called when blocks of `span` were stored in the pool; planned ones have to wait."""
        seq = cast("Holder", span.creator)
        if seq.computed < span.end * self.cache.geometry.block_size:
            self._planned[seq.id] = seq
        else:
            super().stored(span, blocks, now)

    def computed(self, seq: Holder, now: int) -> None:
        """Write through the blocks of `seq` that were planned, and are computed now.

        When it closes, all are: what is planned for a sequence is computed, or closes it.
        """
        if seq.id not in self._planned:
            return
        span = keyed(seq.span)
        end = min(self._end_of(seq), span.end) if seq.is_open else span.end
        if end == span.end:
            del self._planned[seq.id]
        span = span_with(span, end - 1)
        below = self.below
        if below is not None and below.tier.write == "through" and span.parent is not None:
            below.store(span, end, now, None)

    def hit(self, span: Span, now: int) -> None:
        """Called when a request hits `span`; what is not computed on its path stays here."""
        firsts: dict[Span, int] = {}  # by span: its first block that is not computed
        for seq in self._planned.values():
            first = self._end_of(seq)
            of = span_with(seq.span, first)
            firsts[of] = min(first, firsts.get(of, first))
        end, node = span.end, span
        while firsts and node.parent is not None:
            end, node = min(end, firsts.get(node, end)), node.parent
        if self.below is not None:
            self.below.store_used(span, end, now, None)

    def _end_of(self, seq: Holder) -> int:
        """Return the end of the blocks of `seq` whose tokens are computed."""
        return seq.computed // self.cache.geometry.block_size

    def drop_lost(self, now: int) -> None:
        """Drop blocks from the directories whose bytes could not be written."""
        if self.mover is not None:
            for level, holder, first in self.mover.lost():
                level.discard(holder, first, now, "failed")

    # Up.

    def load(
        self, seq: Holder, now: int, prefill_ns: PrefillTime, *, resumed: bool = False
    ) -> Load | None:
        """Start to load blocks that `seq`, just opened, did not hit, if that saves time.

        All levels are looked up, the nearest first; each extends the prefix that the nearer
        ones hold. The blocks found are loaded up to the position for which loading, and
        computing the rest, takes the least time. Returns None if none are loaded. `resumed` is
        that of `KVCache.open`.
        """
        self.drop_lost(now)
        if seq.request.hints.prefetch is not None:
            load = self._await(seq, now, prefill_ns, resumed=resumed)
            if load is not None:
                return load
        parked = self._parked(seq)
        if parked is not None:
            load = self._load_parked(seq, *parked, now, prefill_ns)
            if load is not None:
                return load
        runs = self._find(seq, now, counts=not resumed)
        if not runs:
            return None
        end = self._cheapest(seq, runs, now, prefill_ns)
        parts = []
        for level, first, upto in runs:
            last = min(upto, max(first, end))
            if not resumed:
                level.stats.recomputed += upto - last
            if first < last:
                part = level.take(seq.request, seq.keys, first, last, now, resumed=resumed)
                parts.append(part)
        if not parts:
            return None
        tokens = end * self.cache.geometry.block_size
        return self._begin(seq, parts, tokens, now, resumed=resumed)

    def _find(self, seq: Holder, now: int, *, counts: bool) -> list[tuple[Level, int, int]]:
        """Return the ranges `[first, end)` of blocks that may be loaded, with their levels.

        `counts`: it is the first look-up of a request, of which statistics and policies know.
        """
        geometry = self.cache.geometry
        limit, end = min(seq.cacheable, seq.blocks), seq.hit_blocks
        if geometry.accounting == "tokens":
            limit = min(limit, (seq.target - 1) // geometry.block_size)
        runs: list[tuple[Level, int, int]] = []
        for level in self.levels:
            if end >= limit:
                break
            upto = level.find(seq.keys, limit, now)
            if upto > end and level.tier.load != "never":
                upto = level.confirm(seq, end, upto, now)
            if upto < limit and counts:
                level.tree.missed(seq.request, upto, now)
            if upto > end:
                if counts:
                    level.stats.found += upto - end
                if level.tier.load != "never":
                    runs.append((level, end, upto))
                    end = upto
        return runs

    def _cheapest(
        self,
        seq: Holder,
        runs: list[tuple[Level, int, int]],
        now: int,
        prefill_ns: PrefillTime,
        lead: int = 0,
    ) -> int:
        """Return the end of the load for which loading and computing take the least time.

        The first `lead` ns of loading cost nothing, since the request has not arrived.

        Loading takes longer the more is loaded, and computing the rest takes less. So a prefix
        that ends between two positions takes at least the time to load up to the first of them
        and to compute from the last one on: ranges in which this bound is no improvement are
        skipped, the others halved. Exact for every latency model in which more work takes no
        less time.
        """
        size, target = self.cache.geometry.block_size, seq.target

        def rest(end: int) -> int:
            return prefill_ns(target - end * size, end * size)

        def loading(level: Level, blocks: int) -> int:
            return level.link.load_ns(blocks * level.slot_bytes, now) - lead

        best = seq.hit_blocks
        least, ready = rest(best), 0
        for level, first, upto in runs:
            nearer = ready
            ready = max(nearer, loading(level, upto - first))
            computing = rest(upto)
            if ready + computing <= least or level.tier.load == "always":
                best, least = upto, ready + computing
            if level.tier.load == "always":
                continue
            ranges = [(first, upto, computing)]
            while ranges:
                low, high, fewest = ranges.pop()
                bound = max(nearer, loading(level, low + 1 - first)) + fewest
                if bound >= least:  # so of each range of one block, whose bound is its time
                    continue
                middle = (low + high) // 2
                between = rest(middle)
                took = max(nearer, loading(level, middle - first)) + between
                if took < least:
                    best, least = middle, took
                ranges += [(low, middle, between), (middle, high, fewest)]
        return best

    def _begin(
        self,
        seq: Holder,
        parts: list[Part],
        tokens: int,
        now: int,
        *,
        resumed: bool,
        ahead: bool = False,
    ) -> Load:
        """Queue the parts of a load on their links."""
        trace, ready = self.cache.trace, now
        for part in parts:
            level, blocks = part.level, part.end - part.first
            stats = level.stats
            stats.loads += 1
            stats.loaded += blocks
            stats.returned += blocks if resumed else 0
            stats.prefetched += blocks if ahead else 0
            stats.wait_ns += level.link.wait(now)
            done = level.link.load(blocks * level.slot_bytes, now)
            stats.load_ns += done - now
            ready = max(ready, done)
            if self.mover is not None:
                self.mover.load(part)
            if trace is not None:
                trace.load_start(
                    now, tier=level.name, request=seq.request.id, seq=seq.id,
                    first=part.first, blocks=blocks, done=done,
                )  # fmt: skip
        load = Load(seq, parts, ready, tokens, resumed, ahead)
        self._loading.append(load)
        return load

    def finish(self, load: Load, now: int) -> int:
        """Commit loaded blocks; return the number of computed tokens of the sequence.

        Damaged or missing blocks, and those after them, are left to be computed.
        """
        if load.awaited is not None:
            return self._take_over(load, load.awaited, now)
        self._loading.remove(load)
        seq, trace = load.seq, self.cache.trace
        size = self.cache.geometry.block_size
        end, complete = load.parts[0].first, True
        for part in load.parts:
            blocks = part.end - part.first
            right = blocks if complete else None
            if self.mover is not None and seq.private is not None and complete:
                offset = part.first - seq.span.end
                right = self.mover.finish(part, seq.private[offset : offset + blocks])
            came = right or 0
            end += came
            complete = complete and came == blocks
            if came and not (load.resumed or load.ahead):
                part.level.stats.hits += came
                part.level.stats.ratio_sum += came / seq.lookup_blocks
            if trace is not None:
                trace.load(
                    now, tier=part.level.name, request=seq.request.id, seq=seq.id,
                    first=part.first, blocks=came,
                )  # fmt: skip
            part.level.give_back(part, right, now)
        if load.ahead:
            self._came(seq, end, now)
            del self._ahead[seq.request.id]
            self._brought[seq.request.id] = [
                (part.level, part.first, part.end) for part in load.parts
            ]
            return 0
        tokens = load.tokens if complete else end * size
        self.cache.commit(seq, tokens - seq.computed, now)
        return tokens

    # Ahead of a request.

    def prefetch(
        self, request: Request, now: int, arrival: int, prefill_ns: PrefillTime, reserve: int
    ) -> Load | None:
        """Start to load prompt blocks that the pool lacks, for a request that has not arrived.

        The end of the load is chosen as in `load`, except that the time up to `arrival` (ns)
        costs nothing. The blocks are loaded into blocks of the pool that are free or evictable,
        of which `reserve` must stay, and over links that are not too busy for a write.
        Afterwards they are cached and unpinned. Returns None if none are loaded.
        """
        cache = self.cache
        if not cache.prefix.shares:
            return None
        self.drop_lost(now)
        planned = cache.plan_ahead(request, now)
        runs = self._find(planned, now, counts=False)
        busy = (index for index, (level, *_) in enumerate(runs) if level.is_busy(now))
        runs = runs[: next(busy, None)]
        end = self._cheapest(planned, runs, now, prefill_ns, arrival - now)
        if end <= planned.hit_blocks:
            return None
        seq = cache.open_ahead(planned, end, now, reserve)
        if seq is None:
            return None
        # The evictions in the pool may have evicted blocks of the tiers too.
        parts = [
            level.take(request, seq.keys, first, min(upto, seq.blocks), now)
            for level, first, upto in self._find(seq, now, counts=False)
            if first < seq.blocks
        ]
        if not parts:
            cache.close(seq, now, preempted=True)
            return None
        load = self._begin(seq, parts, 0, now, resumed=False, ahead=True)
        self._ahead[request.id] = load
        return load

    def _came(self, seq: Holder, end: int, now: int) -> None:
        """Keep the prefetched blocks of a request, up to position `end`, in the pool."""
        # Not `KVCache.commit`: retention decides about the request after it has arrived.
        seq.computed = end * self.cache.geometry.block_size
        if end > seq.span.end:
            self.cache.tree.commit(seq, end, now)
        self.cache.close(seq, now, preempted=True)

    def _await(
        self, seq: Holder, now: int, prefill_ns: PrefillTime, *, resumed: bool
    ) -> Load | None:
        """Return a load that waits for the prefetch of `seq`, or None if computing is faster.

        Another load of the same blocks would end later, since a link serves loads in order.
        """
        hit, size = seq.hit_blocks, self.cache.geometry.block_size
        if not resumed:
            for level, first, end in self._brought.pop(seq.request.id, ()):
                level.stats.prefetch_hits += max(0, min(hit, end) - first)
        ahead = self._ahead.get(seq.request.id)
        if ahead is None or ahead.parts[-1].end <= hit:
            return None
        end = ahead.parts[-1].end
        took = ahead.ready - now + prefill_ns(seq.target - end * size, end * size)
        always = any(part.level.tier.load == "always" for part in ahead.parts)
        if took > prefill_ns(seq.target - hit * size, hit * size) and not always:
            return None
        return Load(seq, [], ahead.ready, end * size, resumed, awaited=ahead)

    def _take_over(self, load: Load, awaited: Load, now: int) -> int:
        """Commit the prefetched blocks of a sequence; return its computed tokens."""
        seq, size = load.seq, self.cache.geometry.block_size
        end = self.cache.tree.match(seq.keys, load.tokens // size, now).blocks
        for part in awaited.parts:
            right = min(end, part.end) - max(seq.hit_blocks, part.first)
            if right > 0 and not load.resumed:
                stats = part.level.stats
                stats.prefetch_hits += right
                stats.hits += right
                stats.ratio_sum += right / seq.lookup_blocks
        self._brought.pop(seq.request.id, None)
        self.cache.commit(seq, end * size - seq.computed, now)
        return end * size

    # Preemption by swap.

    def can_swap(
        self, seq: Holder, tokens: int, now: int, prefill_ns: PrefillTime
    ) -> Level | None:
        """Return the level to which `seq`, with `tokens` tokens of K/V, can be swapped.

        It is the nearest one that parks sequences, has room, and takes less time to write and
        read the private blocks of `seq` than computing them takes; None if there is none. With
        a retention policy that drops tokens there is none, since its data about a sequence
        could not be restored. Changes nothing.
        """
        if self.cache.forgets or seq.compacted or seq.family:
            return None
        size = self.cache.geometry.block_size
        shared = seq.span.end
        blocks = -(-tokens // size) - shared
        if blocks < 1:
            return None
        again = prefill_ns(tokens - shared * size, shared * size)
        for level in self.levels:
            if not level.tier.parks or level.tier.load == "never":
                continue
            written = level.to_park(seq, tokens, now)
            if written is None:
                continue
            link = level.link
            took = link.store_ns(written * level.slot_bytes, now)
            took += link.load_ns(blocks * level.slot_bytes, now) - link.wait(now)
            if took <= again or level.tier.load == "always":
                return level
        return None

    def _parked(self, seq: Holder) -> tuple[Level, Holder] | None:
        for level in self.levels:
            holder = level.parked.get(seq.request.id)
            if holder is not None:
                return level, holder
        return None

    def _load_parked(
        self, seq: Holder, level: Level, holder: Holder, now: int, prefill_ns: PrefillTime
    ) -> Load | None:
        """Start to load the parked blocks of `seq`, unless computing them is faster."""
        size, hit = self.cache.geometry.block_size, seq.hit_blocks
        moved = (holder.blocks - hit) * level.slot_bytes
        took = level.link.load_ns(moved, now) + prefill_ns(
            seq.target - holder.tokens, holder.tokens
        )
        again = prefill_ns(seq.target - hit * size, hit * size)
        if holder.blocks <= hit or (took > again and level.tier.load != "always"):
            level.unpark(seq.request.id, now)
            return None
        part = Part(level, holder, hit, holder.blocks, parked=True)
        return self._begin(seq, [part], holder.tokens, now, resumed=True)

    def check_integrity(self) -> None:
        """Check the invariants of every level. Raises AssertionError."""
        for level in self.levels:
            moving = [
                part.holder
                for load in self._loading
                for part in load.parts
                if part.level is level and not part.parked
            ]
            level.check_integrity(moving)

    def record_residency(self) -> None:
        """Start to measure how long blocks stay in each level."""
        for level in self.levels:
            level.tree.residency = Residency(level.pool.blocks, level.name)

    def residencies(self) -> list[Residency | None]:
        """Return what is measured of each level; None: nothing is."""
        return [level.tree.residency for level in self.levels]


def used_tiers(tiers: Iterable[Tier | str], slot_bytes: int) -> list[tuple[str, Tier]]:
    """Check that tiers have room and are unused; return them with their names in reports."""
    built: list[Tier] = [resolve("tier", tier) for tier in tiers]
    for tier in built:
        tier.slots(slot_bytes)
        tier.check_unused()
    times = Counter(tier.name for tier in built)
    serials: Counter[str] = Counter()
    named = []
    for tier in built:
        name = tier.name
        serials[name] += 1
        named.append((name if times[name] == 1 else f"{name}-{serials[name]}", tier))
    return named
