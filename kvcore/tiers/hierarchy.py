"""The tiers below a cache: what moves down, what comes up, and which way is the faster.

         pool      <- the levels, nearest first: each has slots, a directory of spans like
      ----|----       that of the pool, an eviction policy, and a link
      down | up
       level 0     down: what the level above evicts, or stores, or what is used there
      ----|----    up: what an admission finds here beyond what the nearer levels hold,
       level 1         if that is faster than to compute it again

A path that a level holds begins with its first block: what is stored takes along the blocks
before it that are missing here, which the level above has. So lookups are those of the pool,
and any eviction policy serves as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import attrs

from kvcore.cache.hints import PriorityStep
from kvcore.cache.integrity import check_blocks, check_tree
from kvcore.cache.kvcache import KVCache
from kvcore.cache.pool import BlockPool, CountingPool, Ids
from kvcore.cache.residency import CacheStats, Residency
from kvcore.cache.sequence import Sequence as Holder
from kvcore.cache.span import Span
from kvcore.cache.tree import SpanTree
from kvcore.plugins import describe, policy_error, resolve
from kvcore.plugins.base import FAILURES
from kvcore.request import DEFAULT_PRIORITY, Key, Request
from kvcore.tiers.tier import Link, Tier
from kvcore.units import NS_PER_S

PrefillTime = Callable[[int, int], int]
"""Returns the ns to prefill n tokens after a context of c tokens."""


@attrs.define
class TierStats:
    """What moved in and out of a tier, in blocks unless it says otherwise.

    Attributes:
        stored: written into it; `parked`, those of preempted sequences among them.
        loads, loaded: loads, and their blocks; `returned`, those for requests that came back
            from a preemption, which is no reuse, among them.
        hits: of these blocks, those that were right, at first admissions; `ratio_sum`: their
            shares in what these requests looked up, summed.
        found: found at first admissions, beyond what nearer levels held; `recomputed`: of
            these found, those that were computed again, since that was faster.
        skipped: not written, since the link was busy for too long, or the store left alone
            after a failure; `refused`: since what is in use left no room.
        wait_ns, load_ns: time that loads waited for the link, and took in all.
        dropped: blocks that left, by reason: `capacity`, `expired`, `moved`, `corrupt`,
            `gone`, `parked`, `failed`.
        recovered: blocks that an earlier run on tensors had left here.
        errors: calls of the store that failed, or took too long.
    """

    stored: int = 0
    parked: int = 0
    loads: int = 0
    loaded: int = 0
    returned: int = 0
    hits: int = 0
    ratio_sum: float = 0.0
    found: int = 0
    recomputed: int = 0
    skipped: int = 0
    refused: int = 0
    wait_ns: int = 0
    load_ns: int = 0
    recovered: int = 0
    errors: int = 0
    dropped: dict[str, int] = attrs.field(factory=dict)


class Mover(Protocol):
    """Moves the bytes: in a run on tensors. A simulation has none."""

    def is_ready(self, level: Level) -> bool:
        """Return False while the store of `level` is left alone, since it has failed."""

    def store(self, level: Level, source: Level | None, ids: Ids, holder: Holder) -> None:
        """Called when blocks are written: of `source` (None: of the pool) with these `ids`.

        They go into the slots `holder.private`, which end the path of `holder.keys` at
        `holder.blocks`.
        """

    def park(self, level: Level, ids: Ids, holder: Holder) -> None:
        """Called when private blocks of a preempted sequence are written, likewise."""

    def load(self, part: Part) -> None:
        """Called when a load has begun."""

    def finish(self, part: Part, ids: Ids) -> int:
        """Put what was loaded into the blocks `ids` of the pool; return how many are right.

        If not all are, `part.reason` says why.
        """

    def dropped(self, level: Level, slots: Ids) -> None:
        """Called when slots are free again."""

    def present(self, level: Level, slots: Ids) -> int:
        """Return how many of the first `slots` still have their blocks."""

    def lost(self) -> Iterable[tuple[Level, Holder, int]]:
        """Yield once what could not be written: blocks of a path, from a position on."""


@attrs.define(eq=False)
class Part:
    """The blocks `[first, end)` of a prompt, which one level holds, on their way up.

    Attributes:
        level: where they come from.
        holder: what pins them there.
        parked: whether they were a preempted sequence's own.
        reason: why they are dropped if they are not as they should be.
        data: the mover's own.
    """

    level: Level
    holder: Holder
    first: int
    end: int
    parked: bool = False
    reason: str = "corrupt"
    data: Any = None

    @property
    def slots(self) -> Ids | None:
        """The slots of the blocks, in the order of the prompt; None: they have no ids."""
        span, private = self.holder.span, self.holder.private
        shared = path_ids(span, self.first, self.end) if self.first < span.end else None
        if private is None or self.end <= span.end:
            return shared
        own = private[max(self.first - span.end, 0) : self.end - span.end]
        return own if shared is None else shared + own


@attrs.define(eq=False)
class Load:
    """Blocks on their way to the sequence that waits for them.

    Attributes:
        seq: the sequence; its private blocks from `seq.span.end` on are theirs.
        parts: where they come from, in the order of the prompt.
        ready: when (ns) all of them can be used.
        tokens: tokens that `seq` has computed then.
        resumed: whether it is of a preempted request that returns.
    """

    seq: Holder
    parts: list[Part]
    ready: int
    tokens: int
    resumed: bool


class _Requester(NamedTuple):
    id: int | str
    tenant: str | None


class Level:
    """A tier in one run: its slots, what is in them, and its link.

    Attributes:
        tier, link, pool, tree, stats: as their types say.
        below: the next farther level, or None.
        parked: what preempted sequences have left here, by request.
    """

    def __init__(self, tiers: Tiers, tier: Tier, slot_bytes: int, devices: int) -> None:
        cache = tiers.cache
        slots = tier.slots(slot_bytes)
        links = devices if tier.per_device else 1
        self.tier = tier
        self.link = Link(
            int(tier.read_bandwidth) * links, int(tier.write_bandwidth) * links, tier.latency
        )
        self.below: Level | None = None
        self.parked: dict[int | str, Holder] = {}
        self.stats = TierStats()
        self.slot_bytes = slot_bytes
        self._tiers = tiers
        self._max_wait = round(tier.max_wait * 10**9)
        self._serial = 0
        # What the last store was asked for; None when anything has left since.
        self._held: tuple[Span, int] | None = None
        self.pool: CountingPool = (BlockPool if tiers.keeps_ids else CountingPool)(slots)
        eviction = resolve("eviction", tier.eviction)
        index = resolve("prefix", None, "radix")
        tier.bind()
        eviction.bind()
        try:
            eviction.attach(slots, cache.geometry.block_size)
        except FAILURES as error:
            raise policy_error(eviction, "attach", error) from error
        self.tree = SpanTree(self.pool, index, eviction, cache.geometry, None)
        self.tree.watcher = self
        self.tree.upper = cache.tree

    @property
    def name(self) -> str:
        """The name of the tier, which traces and reports use; unique among the levels."""
        return self._tiers.names[self]

    @property
    def is_ready(self) -> bool:
        """Whether its store can be asked: False for a while after it has failed."""
        mover = self._tiers.mover
        return mover is None or mover.is_ready(self)

    # What it hears of its own directory, as the watcher of its tree.

    def stored(self, span: Span, now: int) -> None:
        """Called when blocks were stored here: the level below may want them too."""
        if self.below is not None and self.below.tier.write == "through":
            self.below.store(span, span.end, now, self)

    def hit(self, span: Span, now: int) -> None:
        """Called when a load uses `span`: the level below may want it now."""
        if self.below is not None:
            self.below.store_used(span, now, self)

    def leaving(self, span: Span, blocks: int, now: int, reason: str) -> None:
        """Called when blocks leave: they go to the level below, or are gone."""
        self._held = None
        if self.below is not None and reason == "capacity" and self.below.tier.write == "evict":
            self.below.store(span, span.end, now, self)
        first = span.end - blocks
        self._drop(span.last_request, first, blocks, now, reason)
        if self._tiers.mover is not None and span.ids is not None:
            self._tiers.mover.dropped(self, span.ids[len(span.ids) - blocks :])

    # Down.

    def store_used(self, span: Span, now: int, source: Level | None) -> None:
        """Store the path to `span` as far as it has been used as often as asked for."""
        uses = self.tier.write
        if type(uses) is int:
            while span.parent is not None and span.hit_count < uses:
                span = span.parent
            if span.parent is not None:
                self.store(span, span.end, now, source)

    def store(self, span: Span, end: int, now: int, source: Level | None) -> bool:
        """Write the path down to `span`, up to position `end`, as far as it is missing here.

        Returns whether all of it is here then. O(spans on the path + victims); O(1) where the
        blocks of one span leave one by one.
        """
        tree = self.tree
        if self._held is not None and self._held[0] is span and end <= self._held[1]:
            return True
        match = tree.match(span.path_keys, end, now)
        need = end - match.blocks
        if not need:
            self._remember(span, end)
            return True
        if self.link.wait(now) > self._max_wait or not self.is_ready:
            self.stats.skipped += need
            return False
        room = self.pool.free_blocks + tree.unpinned_blocks - match.unpinned_blocks
        if need > room:
            self.stats.refused += need - room
            end -= need - room
            if end <= match.blocks:
                return False
        holder = self._holder(span.last_request, span.tenant, span.path_keys, end)
        holder.hit_blocks = match.blocks
        holder.priorities = _priorities(span, match.blocks, now)
        tree.open(holder, match, end - match.blocks, now, missed=False, resumed=True)
        if self._tiers.mover is not None:
            ids = path_ids(span, match.blocks, end)
            if ids is not None:
                self._tiers.mover.store(self, source, ids, holder)
        self._wrote(holder.request.id, match.blocks, end - match.blocks, now, source)
        tree.commit(holder, end, now)
        tree.close(holder.span, now)
        if need > room:
            return False
        self._remember(span, end)
        return True

    def _remember(self, span: Span, end: int) -> None:
        """Store that the path down to `span`, up to `end`, is here until anything leaves."""
        if not self.tree.eviction.expires_spans:
            self._held = span, end

    def to_park(self, seq: Holder, tokens: int, now: int) -> int | None:
        """Return how many blocks of `seq` must be written to park it here. Changes nothing.

        None: there is no room for them, or the link is too busy.
        """
        blocks = -(-tokens // seq.span.geometry.block_size)
        match = self.tree.match(seq.keys, seq.span.end, now)
        room = self.pool.free_blocks + self.tree.unpinned_blocks - match.unpinned_blocks
        need = blocks - match.blocks
        fits = need <= room and self.link.wait(now) <= self._max_wait and self.is_ready
        return need if fits else None

    def park(self, seq: Holder, tokens: int, now: int) -> None:
        """Keep the first `tokens` tokens of `seq`: pin what it shares, park its own blocks."""
        shared, tree = seq.span, self.tree
        blocks = -(-tokens // shared.geometry.block_size)
        if shared.parent is not None:
            self.store(shared, shared.end, now, None)
        match = tree.match(seq.keys, shared.end, now)
        holder = self._holder(seq.request.id, seq.request.tenant, seq.keys, blocks)
        holder.hit_blocks, holder.tokens = match.blocks, tokens
        own = blocks - match.blocks
        tree.open(holder, match, own, now, missed=False, resumed=True)
        self.parked[seq.request.id] = holder
        if self._tiers.mover is not None and seq.private is not None:
            self._tiers.mover.park(self, seq.table()[match.blocks : blocks], holder)
        self.stats.parked += own
        self._wrote(seq.request.id, match.blocks, own, now, None, parked=True)

    def unpark(self, request: int | str, now: int) -> None:
        """Give up what a preempted sequence has left here."""
        holder = self.parked.pop(request)
        shared, count = holder.span.end, holder.blocks - holder.span.end
        if self._tiers.mover is not None and holder.private is not None:
            self._tiers.mover.dropped(self, holder.private)
        self.pool.free(None if holder.private is None else holder.private[::-1], count)
        self.tree.close(holder.span, now)
        self._drop(request, shared, count, now, "parked")

    def _wrote(
        self,
        request: int | str,
        first: int,
        blocks: int,
        now: int,
        source: Level | None,
        *,
        parked: bool = False,
    ) -> None:
        self.stats.stored += blocks
        done = self.link.store(blocks * self.slot_bytes, now)
        trace = self._tiers.cache.trace
        if trace is not None:
            trace.offload(
                now, tier=self.name, request=request, first=first, blocks=blocks, done=done,
                source=None if source is None else source.name, parked=parked,
            )  # fmt: skip

    def _drop(self, request: int | str, first: int, blocks: int, now: int, reason: str) -> None:
        dropped = self.stats.dropped
        dropped[reason] = dropped.get(reason, 0) + blocks
        trace = self._tiers.cache.trace
        if trace is not None:
            trace.drop_from_tier(
                now, tier=self.name, request=request, first=first, blocks=blocks, reason=reason
            )

    # Up.

    def find(self, keys: Sequence[Key], limit: int, now: int) -> int:
        """Return up to which position, at most `limit`, a prompt is here. Changes nothing."""
        return self.tree.match(keys, limit, now).blocks if self.is_ready else 0

    def confirm(self, seq: Holder, first: int, end: int, now: int) -> int:
        """Return up to which position the blocks `[first, end)` of `seq` are in the store.

        The directory has them; what has gone from the store by itself is dropped from it.
        """
        mover, span = self._tiers.mover, self.tree.match(seq.keys, end, now).span
        slots = None if mover is None else path_ids(span, first, end)
        if mover is None or slots is None:
            return end
        there = first + mover.present(self, slots)
        if there < end and self.is_ready:
            self.discard(seq, there, now, "gone")
        return there

    def take(
        self, request: Request, keys: Sequence[Key], first: int, end: int, now: int,
        *, resumed: bool = False,
    ) -> Part:  # fmt: skip
        """Pin the blocks of a prompt up to `end`, to load those from `first` on.

        For a `resumed` request that is no reuse.
        """
        tree = self.tree
        holder = self._holder(request.id, request.tenant, keys, end)
        holder.hit_blocks = end
        match = tree.match(keys, end, now)
        tree.open(holder, match, 0, now, missed=False, resumed=resumed)
        return Part(self, holder, first, end)

    def give_back(self, part: Part, right: int | None, now: int) -> None:
        """Unpin what was loaded, of which the first `right` blocks were as they should be.

        None: nobody has looked, since blocks before them were not.
        """
        holder, tree = part.holder, self.tree
        if part.parked:
            self.unpark(holder.request.id, now)
            return
        span = holder.span
        tree.close(holder.span, now)
        if right is None:
            return
        if right < part.end - part.first:
            self.discard(holder, part.first + right, now, part.reason)
        elif self.tier.keep == "exclusive":
            tree.vacate(span, now)

    def discard(self, wrong: Holder, first: int, now: int, reason: str) -> None:
        """Drop the path of `wrong` from position `first` on, and all that continues it."""
        tree = self.tree
        holder = self._holder(wrong.request.id, wrong.request.tenant, wrong.keys, first)
        match = tree.match(wrong.keys, first, now)
        tree.open(holder, match, 0, now, missed=False, resumed=True)
        key = wrong.keys[holder.span.end // tree.geometry.ratio]
        top = (holder.span.children or {}).get(key)
        if top is not None:
            tree.discard(top, now, reason)
        tree.close(holder.span, now)

    def restore(self, keys: Sequence[Key], slots: Ids) -> None:
        """Put back a path that an earlier run has left: `slots` have its blocks, all of them.

        Their slots must be allocated. The path is the latest to be used, of all put back.
        """
        tree, end, trace = self.tree, len(slots), self._tiers.cache.trace
        name = f"{self.name}:{self._serial + 1}"
        holder = self._holder(name, None, keys, end)
        match = tree.match(keys, end, 0)
        if trace is not None:
            first, blocks = match.blocks, end - match.blocks
            trace.recover(
                0, tier=self.name, request=name, keys=keys, first=first, blocks=blocks
            )
        tree.open(holder, match, 0, 0, missed=False, resumed=True)
        holder.private = slots[match.blocks :]
        tree.commit(holder, end, 0)
        tree.close(holder.span, 0)

    def _holder(
        self, request: int | str, tenant: str | None, keys: Sequence[Key], blocks: int
    ) -> Holder:
        """Return who pins a path while it is moved, up to position `blocks`."""
        self._serial += 1
        root = self.tree.root
        # What a tree reads of a request; a whole one takes as long to make as all the rest.
        who = cast("Request", _Requester(request, tenant))
        return Holder(
            self._serial, self._serial, who, keys, blocks, 0, 0, 0, 0, blocks, 0, root
        )

    def check_integrity(self, moving: Iterable[Holder] = ()) -> None:
        """Check the invariants of the directory. Raises AssertionError."""
        check_tree(self.tree)
        check_blocks(self.pool, self.tree, [*self.parked.values(), *moving])


class Tiers:
    """The tiers below a cache, and what is on its way between them and the pool.

    Args:
        cache: the cache, which has served nothing yet.
        tiers: tiers, nearest first: instances, or texts such as `host:memory=64GiB`.
        slot_bytes: bytes of a block in all layers.
        devices: GPUs that share the model: the links of tiers with one a GPU add up.
        ids: whether slots have ids, which only a mover reads.

    Attributes:
        cache: as given.
        mover: what moves bytes, set by a run on tensors; None: nothing does.
        levels: the tiers in use, nearest first.
        names: what each is called: its plugin's name, with a number if there are several.
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
        self.cache = cache
        self.mover: Mover | None = None
        self.keeps_ids = ids
        built = [resolve("tier", tier) for tier in tiers]
        self.levels = [Level(self, tier, slot_bytes, devices) for tier in built]
        called = [tier.name for tier in built]
        self.names = {
            level: name if called.count(name) == 1 else f"{name}-{called[:at].count(name) + 1}"
            for at, (level, name) in enumerate(zip(self.levels, called, strict=True))
        }
        for level, below in zip(self.levels, self.levels[1:], strict=False):
            level.below = below
        self._loading: list[Load] = []
        if self.levels and self.levels[0].tier.load != "never":
            many = self.levels[0].link.load_ns(1000 * slot_bytes, 0)
            cache.geometry.reload_seconds = many / (1000 * NS_PER_S)
        cache.tree.watcher = self
        cache.tiers = self
        self._devices = devices
        self.describe()

    def describe(self) -> None:
        """Write the tiers into the header of the trace, with what was found in them."""
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

    def drop_lost(self, now: int) -> None:
        """Drop from the directories what could not be written."""
        if self.mover is not None:
            for level, holder, first in self.mover.lost():
                level.discard(holder, first, now, "failed")

    # What it hears of the pool, as the watcher of its tree.

    def stored(self, span: Span, now: int) -> None:
        """Called when computed blocks can be shared."""
        first = self.levels[0]
        if first.tier.write == "through":
            first.store(span, span.end, now, None)

    def hit(self, span: Span, now: int) -> None:
        """Called when a request has hit `span` in the pool."""
        self.levels[0].store_used(span, now, None)

    def leaving(self, span: Span, blocks: int, now: int, reason: str) -> None:
        """Called when blocks of `span` are about to leave the pool."""
        del blocks
        first = self.levels[0]
        if reason == "capacity" and first.tier.write == "evict":
            first.store(span, span.end, now, None)

    # Up.

    def load(
        self, seq: Holder, now: int, prefill_ns: PrefillTime, *, resumed: bool = False
    ) -> Load | None:
        """Begin to load what `seq`, just opened, did not hit, as far as that is the faster way.

        Every level is asked, the nearest first; each extends what the nearer ones hold. Of all
        prefixes of what is found, the one is loaded that takes the least time to load it and
        to compute the rest. Returns None if that is none. `resumed`: as for `KVCache.open`.
        """
        self.drop_lost(now)
        parked = self._parked(seq)
        if parked is not None:
            load = self._load_parked(seq, *parked, now, prefill_ns)
            if load is not None:
                return load
        found = self._find(seq, now, resumed=resumed)
        if not found:
            return None
        end = self._cheapest(seq, found, now, prefill_ns)
        parts = []
        for level, first, upto in found:
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

    def _find(self, seq: Holder, now: int, *, resumed: bool) -> list[tuple[Level, int, int]]:
        """Ask every level; return the ranges `[first, end)` of blocks that may be loaded."""
        geometry = self.cache.geometry
        limit, end = min(seq.cacheable, seq.blocks), seq.hit_blocks
        if geometry.accounting == "tokens":
            limit = min(limit, (seq.target - 1) // geometry.block_size)
        found: list[tuple[Level, int, int]] = []
        for level in self.levels:
            if end >= limit:
                break
            upto = level.find(seq.keys, limit, now)
            if upto > end and level.tier.load != "never":
                upto = level.confirm(seq, end, upto, now)
            if upto < limit and not resumed:
                level.tree.missed(seq.request, upto, now)
            if upto > end:
                if not resumed:
                    level.stats.found += upto - end
                if level.tier.load != "never":
                    found.append((level, end, upto))
                    end = upto
        return found

    def _cheapest(
        self,
        seq: Holder,
        found: list[tuple[Level, int, int]],
        now: int,
        prefill_ns: PrefillTime,
    ) -> int:
        """Return up to which position to load: where loading and computing take least time.

        The more is loaded, the longer that takes, and the less the rest does. So no prefix
        that ends between two positions takes less than to load up to the first of them and to
        compute from the last one on: ranges for which that is too much are left out, and others
        halved. Exact for every latency model in which more work takes no less time.
        """
        size, target = self.cache.geometry.block_size, seq.target

        def rest(end: int) -> int:
            return prefill_ns(target - end * size, end * size)

        best = seq.hit_blocks
        computing = least = rest(best)
        ready = 0
        for level, first, upto in found:
            link, slot = level.link, level.slot_bytes
            loading = ready
            ready = max(loading, link.load_ns((upto - first) * slot, now))
            computing = rest(upto)
            if ready + computing <= least or level.tier.load == "always":
                best, least = upto, ready + computing
            if level.tier.load == "always":
                continue
            ranges = [(first, upto, computing)]
            while ranges:
                low, high, fewest = ranges.pop()
                bound = max(loading, link.load_ns((low + 1 - first) * slot, now)) + fewest
                if high - low < 2 or bound >= least:  # noqa: PLR2004 - nothing in between
                    continue
                middle = (low + high) // 2
                between = rest(middle)
                took = max(loading, link.load_ns((middle - first) * slot, now)) + between
                if took < least:
                    best, least = middle, took
                ranges += [(low, middle, between), (middle, high, fewest)]
        return best

    def _begin(
        self, seq: Holder, parts: list[Part], tokens: int, now: int, *, resumed: bool
    ) -> Load:
        """Queue the parts of a load on their links."""
        trace, ready = self.cache.trace, now
        for part in parts:
            level, blocks = part.level, part.end - part.first
            stats = level.stats
            stats.loads += 1
            stats.loaded += blocks
            stats.returned += blocks if resumed else 0
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
        load = Load(seq, parts, ready, tokens, resumed)
        self._loading.append(load)
        return load

    def finish(self, load: Load, now: int) -> int:
        """Commit what was loaded; return how many tokens of the sequence are computed then.

        Blocks that were not as they should be, and those after them, are left to be computed.
        """
        self._loading.remove(load)
        seq, trace = load.seq, self.cache.trace
        size = self.cache.geometry.block_size
        end, whole = load.parts[0].first, True
        for part in load.parts:
            blocks = part.end - part.first
            right = blocks if whole else None
            if self.mover is not None and seq.private is not None and whole:
                at = part.first - seq.span.end
                right = self.mover.finish(part, seq.private[at : at + blocks])
            end += right or 0
            whole = whole and right == blocks
            if right and not load.resumed:
                part.level.stats.hits += right
                part.level.stats.ratio_sum += right / seq.lookup_blocks
            if trace is not None:
                trace.load(
                    now, tier=part.level.name, request=seq.request.id, seq=seq.id,
                    first=part.first, blocks=right or 0,
                )  # fmt: skip
            part.level.give_back(part, right, now)
        tokens = load.tokens if whole else end * size
        if tokens > seq.computed:
            self.cache.commit(seq, tokens - seq.computed, now)
        return max(tokens, seq.hit_blocks * size)

    # Preemption by swap.

    def can_swap(
        self, seq: Holder, tokens: int, now: int, prefill_ns: PrefillTime
    ) -> Level | None:
        """Return the level where `seq`, with `tokens` tokens of K/V, may rest; None: nowhere.

        That is the nearest one that takes such, has room, and takes less time to write and
        to read what only `seq` has than to compute it again. What a retention policy has
        gathered about a sequence could not be restored. Changes nothing.
        """
        if self.cache.retention is not None or seq.compacted or seq.family:
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
        """Begin to load what `seq` left when it was preempted, unless computing is faster."""
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

    def hit_stats(self, level: Level | None = None) -> CacheStats:
        """Return the statistics of first admissions with the hits of one level alone.

        None: with those of the pool and all levels.
        """
        stats, size = self.cache.stats, self.cache.geometry.block_size
        of = self.levels if level is None else [level]
        hits, ratios = (
            sum(getattr(each.stats, n) for each in of) for n in ("hits", "ratio_sum")
        )
        pool = stats if level is None else CacheStats()
        return attrs.evolve(
            stats,
            hit_blocks=pool.hit_blocks + hits,
            hit_tokens=pool.hit_tokens + hits * size,
            ratio_sum=pool.ratio_sum + ratios,
        )

    def as_dict(self) -> list[dict[str, Any]]:
        """Return what moved, by tier, as JSON has it."""
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
                        "stored", "parked", "found", "loaded", "returned", "recomputed",
                        "skipped", "refused",
                    )
                },
                "recovered_blocks": level.stats.recovered,
                "errors": level.stats.errors,
                "loads": level.stats.loads,
                "dropped_blocks": dict(level.stats.dropped),
                "read_bytes": level.link.read_bytes,
                "written_bytes": level.link.written_bytes,
                "link_busy_s": level.link.busy_ns / 10**9,
                "load_s": level.stats.load_ns / 10**9,
                "load_wait_s": level.stats.wait_ns / 10**9,
            }
            for level in self.levels
        ]  # fmt: skip


def _priorities(span: Span, first: int, now: int) -> list[PriorityStep] | None:
    """Return the retention priorities from position `first` of the path down to `span` on."""
    steps: list[PriorityStep] = []
    if span.start <= first and span.priority == DEFAULT_PRIORITY:
        return None
    while span.parent is not None and span.end > first:
        until = span.priority_until
        priority = span.priority_at(now)
        if priority == DEFAULT_PRIORITY:
            until = None
        steps.append((span.end, priority, None if until is None else until - now))
        span = span.parent
    if all(priority == DEFAULT_PRIORITY for _, priority, _ in steps):
        return None
    return steps[::-1]


def path_ids(span: Span, first: int, end: int) -> Ids | None:
    """Return the ids of the blocks `[first, end)` of the path down to `span`; None: no ids."""
    parts: list[Ids] = []
    while span.parent is not None and span.end > first:
        if span.ids is None:
            return None
        low = max(first - span.start, 0)
        parts.append(span.ids[low : max(end - span.start, 0)])
        span = span.parent
    if not parts:
        return None
    ids = parts.pop()
    for part in reversed(parts):
        ids = ids + part
    return ids
