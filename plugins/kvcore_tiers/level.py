"""One tier in a run: its slots and their content, its link, and its transfers.

A `Level` is a `TierLevel`, slots behind a link, and an `Upper`: it hands what leaves it to the
level below, as the pool does. A `Part` is what a load takes from it; a `Mover` moves the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, Protocol, cast

import attrs

from kvcore.cache.hints import PriorityStep
from kvcore.cache.integrity import check_blocks, check_tree
from kvcore.cache.kvcache import KVCache
from kvcore.cache.pool import BlockPool, CountingPool, Ids
from kvcore.cache.sequence import Sequence as Holder
from kvcore.cache.span import Span
from kvcore.cache.tiers import Tier
from kvcore.cache.tree import SpanTree
from kvcore.plugins import policy_error, resolve
from kvcore.plugins.base import FAILURES
from kvcore.request import DEFAULT_PRIORITY, Key, Request
from kvcore.units import NS_PER_S
from kvcore_tiers.link import Link


@attrs.define
class TierStats:
    """Traffic of a tier, in blocks unless stated otherwise.

    Attributes:
        stored: blocks written into it.
        parked: those of `stored` that belonged to preempted sequences.
        loads: number of loads.
        loaded: blocks of all loads.
        returned: those of `loaded` for resumed requests, which are no reuse.
        prefetched: those of `loaded` that were loaded ahead of a request.
        prefetch_hits: those of `prefetched` that the request found in the pool, or waited for.
        hits: those of `loaded` that first admissions waited for, and that were intact.
        ratio_sum: sum over these requests of hits / blocks looked up.
        found: blocks found at first admissions that no nearer level had.
        recomputed: those of `found` that were computed again, since that was faster.
        skipped: blocks that were not written, since the link was busy for too long, or the
            store paused after a failure.
        refused: blocks that were not written, since pinned blocks left no room.
        wait_ns: time that loads waited for the link.
        load_ns: time that loads took, the wait included.
        dropped: blocks that left, by reason: `capacity`, `expired`, `moved`, `corrupt`,
            `gone`, `parked`, `failed`.
        recovered: blocks of an earlier run on tensors that were found here.
        errors: calls of the store that failed, or took too long.
    """

    stored: int = 0
    parked: int = 0
    loads: int = 0
    loaded: int = 0
    returned: int = 0
    prefetched: int = 0
    prefetch_hits: int = 0
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
    """Moves the bytes in a run on tensors. A simulation has no mover."""

    def is_ready(self, level: Level) -> bool:
        """Return False while the store of `level` pauses after a failure."""

    def store(self, level: Level, source: Level | None, ids: Ids, holder: Holder) -> None:
        """Called when the blocks `ids` of `source` (None: of the pool) are written to `level`.

        They are written into the slots `holder.private`, the last ones of the path of
        `holder.keys`, which ends at position `holder.blocks`.
        """

    def park(self, level: Level, ids: Ids, holder: Holder) -> None:
        """Called when private blocks of a preempted sequence are written to a tier."""

    def load(self, part: Part) -> None:
        """Called when a load has begun."""

    def finish(self, part: Part, ids: Ids) -> int:
        """Copy loaded blocks into the blocks `ids` of the pool; return how many are intact.

        If some are not, it sets `part.reason`.
        """

    def dropped(self, level: Level, slots: Ids) -> None:
        """Called when `slots` of `level` are freed."""

    def present(self, level: Level, slots: Ids) -> int:
        """Return the number of `slots`, from the first on, that still have their blocks."""

    def lost(self) -> Iterable[tuple[Level, Holder, int]]:
        """Yield, once each, blocks that could not be written: level, path, first position."""


@attrs.define
class Part:
    """The part of a load from one level: the blocks `[first, end)` of a prompt.

    Attributes:
        level: the level.
        holder: the sequence that pins the blocks there.
        parked: whether they were private blocks of a preempted sequence.
        reason: the reason of dropping blocks that are not intact.
        data: data of the mover.
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
        """The slots of the blocks, in the order of the prompt; None if slots have no ids."""
        span, private = self.holder.span, self.holder.private
        shared = path_ids(span, self.first, self.end)
        if not private:
            return shared
        own = private[max(self.first - span.end, 0) :]
        return own if shared is None else shared + own


class _Requester(NamedTuple):
    """All that a tree reads of a request: to make a whole one would double the cost."""

    id: int | str
    tenant: str | None


class TierLevel:
    """A tier in one run: its slots and its link.

    Attributes:
        name: name in traces and reports, unique among the levels of a cache.
        tier: its options.
        link: its link.
        pool: its slots.
        eviction: its eviction policy.
        stats: its traffic.
        slot_bytes: bytes of a slot.
        mover: moves the bytes in a run on tensors; None in a simulation.
        below: the next farther level, or None.
    """

    below: Any = None

    def __init__(
        self, tier: Tier, name: str, slot_bytes: int, devices: int, *, ids: bool
    ) -> None:
        self.name = name
        self.mover: Mover | None = None
        self.pool: CountingPool = (BlockPool if ids else CountingPool)(tier.slots(slot_bytes))
        links = devices if tier.per_device else 1
        self.tier = tier
        self.link = Link(
            int(tier.read_bandwidth) * links, int(tier.write_bandwidth) * links, tier.latency
        )
        self.stats = TierStats()
        self.slot_bytes = slot_bytes
        self._max_wait = round(tier.max_wait * NS_PER_S)
        self.eviction = resolve("eviction", tier.eviction)
        self.eviction.one_path = False

    def is_busy(self, now: int) -> bool:
        """Return True if a write would wait for the link longer than `max_wait`."""
        return self.link.wait(now) > self._max_wait


class Upper:
    """The pool, or a level: watches its tree of spans, and hands blocks to the level below.

    Attributes:
        below: the next farther level, or None.
        source: the level itself; None: it is the pool.
    """

    below: Level | None
    source: Level | None = None

    def stored(self, span: Span, blocks: int, now: int) -> None:
        """Called when blocks of `span` were stored here; the level below may write through."""
        if self.below is not None and self.below.tier.write == "through":
            self.below.store(span, span.end, now, self.source)

    def hit(self, span: Span, now: int) -> None:
        """Called when a request hits `span`; the level below may store it after this use."""
        if self.below is not None:
            self.below.store_used(span, span.end, now, self.source)

    def leaving(self, span: Span, blocks: int, now: int, reason: str) -> None:
        """Called when blocks are about to leave; the level below may store victims."""
        if self.below is not None and reason == "capacity" and self.below.tier.write == "evict":
            self.below.store(span, span.end, now, self.source)


class Level(Upper, TierLevel):
    """A tier below the pool of a `KVCache`.

    Attributes:
        tree: the directory of the blocks in its slots.
        parked: the sequences that hold parked blocks here, by the id of the request.
    """

    below: Level | None

    def __init__(
        self, cache: KVCache, tier: Tier, name: str, slot_bytes: int, devices: int, *, ids: bool
    ) -> None:
        super().__init__(tier, name, slot_bytes, devices, ids=ids)
        self.eviction.bind()
        self.source = self
        self.parked: dict[int | str, Holder] = {}
        self._cache = cache
        self._serial = 0
        # The last path that was stored, and its end; None after any block has left.
        self._held: tuple[Span, int] | None = None
        index = resolve("prefix", None, "radix")
        try:
            self.eviction.attach(self.pool.blocks, cache.geometry.block_size)
        except FAILURES as error:
            raise policy_error(self.eviction, "attach", error) from error
        self.tree = SpanTree(self.pool, index, self.eviction, cache.geometry, None)
        self.tree.watcher = self
        self.tree.upper = cache.tree

    @property
    def is_ready(self) -> bool:
        """Whether the store of this level can be used: False in a pause after a failure."""
        mover = self.mover
        return mover is None or mover.is_ready(self)

    def leaving(self, span: Span, blocks: int, now: int, reason: str) -> None:
        """Called when blocks are about to leave: the level below stores victims first."""
        self._held = None
        super().leaving(span, blocks, now, reason)
        first = span.end - blocks
        self._drop(span.last_request, first, blocks, now, reason)
        if self.mover is not None and span.ids is not None:
            self.mover.dropped(self, span.ids[len(span.ids) - blocks :])

    # Down.

    def store_used(self, span: Span, end: int, now: int, source: Level | None) -> None:
        """Store the part of the path to `span` with `write` hits, if that is a number.

        No block from position `end` on is stored.
        """
        uses = self.tier.write
        if type(uses) is int:
            while span.parent is not None and (span.hit_count < uses or span.start >= end):
                span = span.parent
            if span.parent is not None:
                self.store(span, min(end, span.end), now, source)

    def store(self, span: Span, end: int, now: int, source: Level | None) -> None:
        """Write the blocks of the path down to `span`, up to position `end`, that are missing.

        O(spans on the path + victims); O(1) if the same path is stored again, as when the
        blocks of a span leave one by one.
        """
        tree = self.tree
        if self._held is not None and self._held[0] is span and end <= self._held[1]:
            return
        match = tree.match(span.path_keys, end, now)
        need = end - match.blocks
        if not need:
            self._remember(span, end)
            return
        if self.is_busy(now) or not self.is_ready:
            self.stats.skipped += need
            return
        room = self.pool.free_blocks + tree.unpinned_blocks - match.unpinned_blocks
        if need > room:
            self.stats.refused += need - room
            end -= need - room
            if end <= match.blocks:
                return
        holder = self._holder(span.last_request, span.tenant, span.path_keys, end)
        holder.hit_blocks = match.blocks
        holder.priorities = _priorities(span, match.blocks, now)
        tree.open(holder, match, end - match.blocks, now, missed=False, resumed=True)
        if self.mover is not None:
            ids = path_ids(span, match.blocks, end)
            if ids is not None:
                self.mover.store(self, source, ids, holder)
        self._wrote(holder.request.id, match.blocks, end - match.blocks, now, source)
        tree.commit(holder, end, now)
        tree.close(holder.span, now)
        self._remember(span, end)

    def _remember(self, span: Span, end: int) -> None:
        """Record that the path down to `span`, up to `end`, is here until any block leaves."""
        if not self.tree.eviction.expires_spans:
            self._held = span, end

    def to_park(self, seq: Holder, tokens: int, now: int) -> int | None:
        """Return the number of blocks to write in order to park `seq`. Changes nothing.

        Returns None if there is no room for them, or the link is too busy.
        """
        shared = keyed(seq.span)
        blocks = -(-tokens // shared.geometry.block_size)
        match = self.tree.match(shared.path_keys, shared.end, now)
        room = self.pool.free_blocks + self.tree.unpinned_blocks - match.unpinned_blocks
        need = blocks - match.blocks
        fits = need <= room and not self.is_busy(now) and self.is_ready
        return need if fits else None

    def park(self, seq: Holder, tokens: int, now: int) -> None:
        """Write the first `tokens` tokens of `seq`, and pin them until `unpark`."""
        shared, tree = keyed(seq.span), self.tree
        blocks = -(-tokens // shared.geometry.block_size)
        if shared.parent is not None:
            self.store(shared, shared.end, now, None)
        match = tree.match(shared.path_keys, shared.end, now)
        holder = self._holder(seq.request.id, seq.request.tenant, seq.keys, blocks)
        holder.hit_blocks, holder.tokens = match.blocks, tokens
        own = blocks - match.blocks
        tree.open(holder, match, own, now, missed=False, resumed=True)
        self.parked[seq.request.id] = holder
        if self.mover is not None and seq.private is not None:
            self.mover.park(self, seq.table()[match.blocks : blocks], holder)
        self.stats.parked += own
        self._wrote(seq.request.id, match.blocks, own, now, None, parked=True)

    def unpark(self, request: int | str, now: int) -> None:
        """Drop the parked blocks of a preempted sequence."""
        holder = self.parked.pop(request)
        first, count = holder.span.end, holder.blocks - holder.span.end
        if self.mover is not None and holder.private is not None:
            self.mover.dropped(self, holder.private)
        self.pool.free(None if holder.private is None else holder.private[::-1], count)
        self.tree.close(holder.span, now)
        self._drop(request, first, count, now, "parked")

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
        """Count blocks as written, with the time of the link, and write OFFLOAD."""
        self.stats.stored += blocks
        done = self.link.store(blocks * self.slot_bytes, now)
        trace = self._cache.trace
        if trace is not None:
            trace.offload(
                now, tier=self.name, request=request, first=first, blocks=blocks, done=done,
                source=None if source is None else source.name, parked=parked,
            )  # fmt: skip

    def _drop(self, request: int | str, first: int, blocks: int, now: int, reason: str) -> None:
        """Count blocks as dropped, and write DROP."""
        dropped = self.stats.dropped
        dropped[reason] = dropped.get(reason, 0) + blocks
        trace = self._cache.trace
        if trace is not None:
            trace.drop_from_tier(
                now, tier=self.name, request=request, first=first, blocks=blocks, reason=reason
            )

    # Up.

    def find(self, keys: Sequence[Key], limit: int, now: int) -> int:
        """Return the length of the prefix of `keys` that is here, at most `limit` blocks."""
        return self.tree.match(keys, limit, now).blocks if self.is_ready else 0

    def confirm(self, seq: Holder, first: int, end: int, now: int) -> int:
        """Return the end of the blocks of `seq`, from `first` on, that are in the store.

        The directory has them up to `end`; blocks that the store has lost are dropped from it.
        """
        if self.mover is None:
            return end
        slots = path_ids(self.tree.match(seq.keys, end, now).span, first, end)
        if slots is None:
            return end
        present = first + self.mover.present(self, slots)
        if present < end and self.is_ready:
            self.discard(seq, present, now, "gone")
        return present

    def take(
        self, request: Request, keys: Sequence[Key], first: int, end: int, now: int,
        *, resumed: bool = False,
    ) -> Part:  # fmt: skip
        """Pin the blocks of a prompt up to `end`; return the part with those from `first` on.

        For a `resumed` request this counts as no hit.
        """
        tree = self.tree
        holder = self._holder(request.id, request.tenant, keys, end)
        holder.hit_blocks = end
        match = tree.match(keys, end, now)
        tree.open(holder, match, 0, now, missed=False, resumed=resumed)
        return Part(self, holder, first, end)

    def give_back(self, part: Part, intact: int | None, now: int) -> None:
        """Unpin loaded blocks, of which the first `intact` ones were intact.

        None: they were not checked, since blocks before them were not intact.
        """
        holder, tree = part.holder, self.tree
        if part.parked:
            self.unpark(holder.request.id, now)
            return
        span = holder.span
        tree.close(span, now)
        if intact is None:
            return
        if intact < part.end - part.first:
            self.discard(holder, part.first + intact, now, part.reason)
        elif self.tier.keep == "exclusive":
            tree.vacate(span, now)

    def discard(self, seq: Holder, first: int, now: int, reason: str) -> None:
        """Drop the path of `seq` from position `first` on, and all spans below it."""
        tree = self.tree
        # Opened up to there, so that a span which goes on is split.
        holder = self._holder(seq.request.id, seq.request.tenant, seq.keys, first)
        match = tree.match(seq.keys, first, now)
        tree.open(holder, match, 0, now, missed=False, resumed=True)
        key = seq.keys[holder.span.end // tree.geometry.ratio]
        top = (holder.span.children or {}).get(key)
        if top is not None:
            tree.discard(top, now, reason)
        tree.close(holder.span, now)

    def restore(self, keys: Sequence[Key], slots: Ids) -> None:
        """Insert a path of an earlier run, whose blocks are in `slots`.

        The slots must be allocated. The path becomes the most recently used one.
        """
        tree, end, trace = self.tree, len(slots), self._cache.trace
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
        """Return a sequence to pin a path up to position `blocks` while it is moved."""
        self._serial += 1
        root = self.tree.root
        requester = cast("Request", _Requester(request, tenant))
        return Holder(
            self._serial, self._serial, requester, keys, blocks, 0, 0, 0, 0, blocks, 0, root
        )

    def check_integrity(self, moving: Iterable[Holder] = ()) -> None:
        """Check the invariants of the directory. Raises AssertionError."""
        check_tree(self.tree)
        check_blocks(self.pool, self.tree, [*self.parked.values(), *moving])


def _priorities(span: Span, first: int, now: int) -> list[PriorityStep] | None:
    """Return the retention priorities from position `first` of the path down to `span` on."""
    steps: list[PriorityStep] = []
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


def keyed(span: Span) -> Span:
    """Return the deepest span of the path down to `span` that is not generated.

    A tier shares no generated blocks: only one request can hit them.
    """
    while span.parent is not None and span.is_generated:
        span = span.parent
    return span


def span_with(span: Span, position: int) -> Span:
    """Return the span with the block at `position` of the path down to `span`."""
    while span.parent is not None and span.start > position:
        span = span.parent
    return span


def path_ids(span: Span, first: int, end: int) -> Ids | None:
    """Return the ids of the blocks `[first, end)` of the path down to `span`; None: no ids."""
    parts: list[Ids] = []
    while span.parent is not None and span.end > first:
        if span.ids is None:
            return None
        low = max(first - span.start, 0)
        parts.append(span.ids[low : max(end - span.start, 0)])
        span = span.parent
    return reduce(add, reversed(parts)) if parts else None
