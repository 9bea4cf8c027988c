"""The tiers below a cache of groups: each holds blocks of all groups, by their names.

A block that leaves the pool keeps its name, its group and its key, in a tier. A prefix is hit
if the pool and the tiers together have what all groups need at its end: the blocks of full
attention, those of the window, and the state::

    full       [ A ] [ B ] [ C ] [ D ]      in the pool
    window       -     -   [ C'] [ D']      in a tier: they left the pool first
    state        -     -     -   [ s ]      in the pool

What the pool lacks is loaded, all of it or nothing. A slot of a tier is as large as a block of
the pool; of a block the layers of its group alone are moved.

Source: HiCache of SGLang 0.5.23, where a window or a state counts wherever it is, on the device
or in host memory (`unified_cache/components`). The offloading connector of vLLM 0.33 has the
same names in one pool of equal chunks of its CPU tier, moves the bytes of a group's layers, and
loads all that hits; it finds what lies behind the pool's hit in the tier alone, which has all
that the pool has, since it is written through.
"""

from __future__ import annotations

from array import array
from collections import ChainMap, Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import groupby, repeat
from typing import Any, NamedTuple, TypeAlias, cast

import attrs

from kvcore.cache.residency import Residency
from kvcore.cache.sequence import Sequence as Holder
from kvcore.cache.tiers import PrefillTime, Tier
from kvcore.errors import InputError
from kvcore.request import Request
from kvcore_hosting.host import PolicyHost
from kvcore_plugins.cache_groups.cache import GroupedCache
from kvcore_plugins.cache_groups.groups import GroupSequence
from kvcore_plugins.cache_groups.named_blocks import NO_BLOCK, Name, named_blocks
from kvcore_tiers.hierarchy import TierStack, used_tiers
from kvcore_tiers.level import TierLevel

Place: TypeAlias = tuple[int, Name]
"""The group and the name of a block."""


class Block(NamedTuple):
    """A block with a name, and where it is in the text of a request.

    Attributes:
        group, name: its group, and its name there.
        seq: a sequence that has computed it, or is to do so in the step that is planned.
        position: its position in the text of this sequence.
    """

    group: int
    name: Name
    seq: GroupSequence
    position: int

    @property
    def place(self) -> Place:
        """Its group and name."""
        return self.group, self.name

    def is_computed(self, size: int) -> bool:
        """Return True if its `size` tokens are computed: not if a plan has named it alone."""
        seq, end = self.seq, (self.position + 1) * size
        return not (seq.is_open and seq.computed < end <= seq.planned)


@attrs.define
class Part:
    """The blocks that a load takes from one level.

    Attributes:
        level: the level.
        blocks: the blocks, in the text of the sequence, by their slots there.
        runs: the runs of these blocks, each a transfer.
    """

    level: GroupLevel
    blocks: dict[int, Block] = attrs.field(factory=dict)
    runs: list[Run] = attrs.field(factory=list)


@attrs.define(eq=False)
class GroupLoad:
    """A load of blocks of several groups: a `TierLoad`.

    Attributes:
        seq: the sequence.
        tokens: tokens that `seq` has computed after the load.
        parts: the blocks by level, nearest first.
        ready: the time (ns) at which all of them can be used.
        resumed: whether it is for a preempted request that returns.
        positions: by group, first position and number of blocks of each run of loaded ones.
    """

    seq: Holder
    tokens: int
    parts: list[Part]
    ready: int
    resumed: bool
    positions: list[list[tuple[int, int]]] = attrs.field(factory=list)


class GroupLevel(TierLevel):
    """A tier below a pool of groups.

    Its eviction policy sees each block as a span by itself, at its position, as it sees windows
    and states in the pool (`HostedGroups`): the blocks before it may be in the pool alone. To
    write it again is a use; to load it is a hit, unless a request was preempted.

    Attributes:
        host: the host of the policy, in which a block has its slot as name; None: by `lru`.
        slots: the names of the blocks in its slots; those that a load reads are held.
        content: the block in each slot in use.
        uses: the hits of each block above since it came there, if `write` counts them.
    """

    below: GroupLevel | None

    def __init__(
        self, tiers: GroupTiers, tier: Tier, name: str, slot_bytes: int, devices: int
    ) -> None:
        super().__init__(tier, name, slot_bytes, devices, ids=True)
        if self.eviction.expires_spans:
            msg = (
                f"tier {name!r} has eviction {self.eviction.name!r}, which lets blocks expire, "
                "and a block of a group hits as long as it is cached: give lru"
            )
            raise InputError(msg)
        self.host: PolicyHost | None = None
        if self.eviction.name == "lru":
            self.eviction.bind()
        else:
            layout = tiers.cache.geometry
            self.host = PolicyHost(
                self.eviction, self.pool.blocks, layout.block_size, layout=layout
            )
        self._tiers = tiers
        self.slots = named_blocks(len(tiers.cache.groups))
        self.content: dict[int, Block] = {}
        self.uses: Counter[Place] = Counter()

    def find(self, group: int, name: Name) -> int | None:
        """Return the slot of a block; None: it is not here."""
        slot: int | None = self.slots.cached[group].get(name)
        return slot

    def use(self, blocks: list[Block], now: int, source: GroupLevel | None) -> None:
        """Count a hit of `blocks` above; store those with `write` hits, if it is a number."""
        uses = self.tier.write
        if type(uses) is int:
            self.uses.update(block.place for block in blocks)
            often = [block for block in blocks if self.uses[block.place] >= uses]
            self.store(filter(self._tiers.is_computed, often), now, source)

    def left(self, blocks: list[Block], now: int, source: GroupLevel | None) -> None:
        """Called when blocks leave the level above to make room there, in this order."""
        if self.tier.write == "evict":
            self.store(blocks, now, source)
        for block in blocks:
            self.uses.pop(block.place, None)

    def store(self, blocks: Iterable[Block], now: int, source: GroupLevel | None) -> None:
        """Write the blocks that are missing, in order; those that are here are used again."""
        missing: dict[Place, Block] = {}
        for block in blocks:
            slot = self.find(block.group, block.name)
            if slot is None:
                missing.setdefault(block.place, block)
            else:
                self.hold([slot])
                self.release([slot], now)
        if not missing:
            return
        if self.is_busy(now):
            self.stats.skipped += len(missing)
            return
        room = self.pool.free_blocks + self.slots.idle
        self.stats.refused += max(len(missing) - room, 0)
        stored = [*missing.values()][:room]
        self.drop(self._choose(len(stored) - self.pool.free_blocks, now), now, "capacity")
        own = self.pool.allocate(len(stored)).tolist()  # type: ignore[union-attr]  # it has ids
        self.slots.grow(max(own, default=-1) + 1)
        for block, slot in zip(stored, own, strict=True):
            self.slots.name([slot], [block.name], block.group)
            self.content[slot] = block
            if self.host is not None:
                self._tell_stored(block, slot, now, self.host)
        self.release(own, now)
        self._write(stored, now, source)
        if self.below is not None and self.below.tier.write == "through":
            self.below.store(stored, now, self)

    def hold(self, slots: list[int]) -> None:
        """Keep the blocks in `slots` until they are released."""
        self.slots.hold(slots)
        if self.host is not None:
            for slot in slots:
                self.host.pin(slot)

    def release(self, slots: list[int], now: int) -> None:
        """Release the blocks in `slots`, in order."""
        self.slots.release(slots)
        if self.host is not None:
            self.host.unpin_run(slots, now)

    def _tell_stored(self, block: Block, slot: int, now: int, host: PolicyHost) -> None:
        """Report `block` to the policy as stored in `slot`, which is held."""
        group, _, seq, position = block
        cache, request = self._tiers.cache, seq.request
        start = position * cache.groups[group].block_size // cache.geometry.block_size
        host.stored_run(
            (slot,), None, now, path=cache.path(seq, group, position + 1), start=start,
            request=request.id, tenant=request.tenant,
        )  # fmt: skip

    def _choose(self, count: int, now: int) -> list[int]:
        """Return `count` slots whose blocks shall leave, in order; none if it is below 1."""
        if count < 1:
            return []
        if self.host is None:
            return self.slots.pop(count)
        victims: list[Any] = self.host.victims(count, now=now) or []
        for slot in victims:
            self.slots.remove(slot)
        return victims

    def _write(self, blocks: list[Block], now: int, source: GroupLevel | None) -> None:
        """Queue the writes of `blocks` on the link, a run at a time."""
        self.stats.stored += len(blocks)
        trace, above = self._tiers.cache.trace, None if source is None else source.name
        for run in runs_of(blocks):
            done = self.link.store(self._tiers.bytes_of(run), now)
            if trace is not None:
                trace.offload(now, tier=self.name, **run._asdict(), done=done, source=above)

    def drop(self, slots: list[int], now: int, reason: str) -> None:
        """Drop the blocks in `slots`, which have no holder and are not idle any more."""
        blocks, below = [self.content.pop(slot) for slot in slots], self.below
        if below is not None and reason == "capacity":
            below.left(blocks, now, self)
        if slots:
            dropped = self.stats.dropped
            dropped[reason] = dropped.get(reason, 0) + len(slots)
        trace = self._tiers.cache.trace
        for run in runs_of(blocks):
            if trace is not None:
                trace.drop_from_tier(now, tier=self.name, **run._asdict(), reason=reason)
        self.slots.forget(slots)
        self.pool.free(array("i", slots), len(slots))
        if self.host is not None and reason == "moved":
            for slot in slots:
                self.host.dropped(slot, now, reason)

    def check_integrity(self, loading: set[int]) -> None:
        """Check the invariants; `loading` are the slots that loads read."""
        named = dict(self.slots)
        held = {slot for slot in named if self.slots.holders(slot)}
        used = self.pool.blocks - self.pool.free_blocks
        known = {slot: block.place for slot, block in self.content.items()}
        if held != loading or known != named or self.slots.idle != used - len(held):
            msg = (
                f"tier {self.name}: {len(named)} named slots of {used} in use; {len(held)} are "
                f"held, loads read {len(loading)}, and {self.slots.idle} can be evicted"
            )
            raise AssertionError(msg)


class Run(NamedTuple):
    """A run of blocks of a group in the text of a request, from position `first` on."""

    group: int
    request: int | str
    first: int
    blocks: int


def runs_of(blocks: Iterable[Block]) -> Iterator[Run]:
    """Yield the runs of `blocks`, in which the last block of a text comes first."""

    def run_of(entry: tuple[int, Block]) -> tuple[int, int | str, int]:
        index, block = entry
        return block.group, block.seq.request.id, block.position + index

    for (group, request, _), run in groupby(enumerate(blocks), key=run_of):
        positions = [block.position for _, block in run]
        yield Run(group, request, positions[-1], len(positions))


class GroupTiers(TierStack[GroupLevel]):
    """The tiers below a cache of groups, and the transfers between them and the pool.

    Sequences that are preempted are not parked, and nothing is loaded ahead of a request.

    Args:
        cache: the cache, which has served no request yet.
        tiers: tiers, nearest first: instances, or texts such as `host:memory=64GiB`.
        slot_bytes: bytes of a block of the pool.
        devices: number of GPUs that share the model; bandwidths of tiers that have a link for
            each GPU are multiplied by it.
        ids: ignored: slots have ids.

    Attributes:
        anywhere: by group, the names of the blocks that are in the pool or can be loaded.

    Raises:
        InputError: a tier smaller than a block, in use already, or whose eviction policy lets
            blocks expire.
    """

    cache: GroupedCache

    def __init__(
        self,
        cache: GroupedCache,
        tiers: Iterable[Tier | str],
        slot_bytes: int,
        *,
        devices: int = 1,
        ids: bool = False,
    ) -> None:
        self.cache, self._devices = cache, devices
        most = max(group.layers for group in cache.groups)
        # Of a block, the layers of its group are moved.
        self._bytes = [
            group.block_bytes or -(-slot_bytes * group.layers // most) for group in cache.groups
        ]
        self.levels = [
            GroupLevel(self, tier, name, slot_bytes, devices)
            for name, tier in used_tiers(tiers, slot_bytes)
        ]
        self._loadable = [level for level in self.levels if level.tier.load != "never"]
        self._loading: list[GroupLoad] = []
        self._named: dict[int, Block] = {}  # the block of each id of the pool with a name
        # By the id of a sequence: what a step is still to compute of it, a list for each group.
        self._planned: dict[int, list[list[Block]]] = {}
        stores = zip(
            cache.cached, *(level.slots.cached for level in self._loadable), strict=True
        )
        self.anywhere: list[Container[Name]] = [ChainMap(*of) for of in stores]
        self._begin_use(slot_bytes)
        if self.levels:
            cache.tiers = self
            cache.hears_names = True
        self.describe()

    def bytes_of(self, run: Run) -> int:
        """Return the bytes that are moved of a run of blocks."""
        return run.blocks * self._bytes[run.group]

    # What the cache calls.

    def store(self, seq: GroupSequence, group: int, positions: list[int], now: int) -> None:
        """Called when blocks of `seq` got names in the pool."""
        table = seq.tables[group]
        names = seq.names[self.cache.groups[group].block_size].at(positions)
        blocks = [Block(group, *each) for each in zip(names, repeat(seq), positions)]
        for block in blocks:
            self._named[table.blocks[block.position - table.first]] = block
        self._write_through(seq, blocks, now)

    def computed(self, seq: Holder, now: int) -> None:
        """Write through the blocks of all groups that a step has computed of `seq`."""
        for blocks in self._planned.pop(seq.id, ()):
            self._write_through(seq, blocks, now)

    def is_computed(self, block: Block) -> bool:
        """Return True if a step has computed `block`, not only named it in its plan."""
        return block.is_computed(self.cache.groups[block.group].block_size)

    def _write_through(self, seq: Holder, blocks: list[Block], now: int) -> None:
        """Write blocks of `seq` that got names into the nearest tier; planned ones wait."""
        if self.levels[0].tier.write != "through":
            return
        if self.is_computed(blocks[-1]):
            self.levels[0].store(reversed(blocks), now, None)
        else:
            self._planned.setdefault(seq.id, []).append(blocks)

    def hit(self, blocks: Sequence[list[int]], now: int) -> None:
        """Called when an admission hits these blocks of the pool, by group."""
        for own in blocks:
            self.levels[0].use([self._named[block] for block in reversed(own)], now, None)

    def leave(self, victims: list[int], now: int) -> None:
        """Called before blocks leave the pool, in this order."""
        self.levels[0].left([self._named.pop(block) for block in victims], now, None)

    # What a server calls.

    def load(
        self, seq: Holder, now: int, prefill_ns: PrefillTime, *, resumed: bool = False
    ) -> GroupLoad | None:
        """Start to load the blocks that a sequence, just opened, lacks for the longest prefix.

        Returns None if nothing is loaded: the pool has that prefix alone, computing it takes
        less time, there is no room, or the planned step computes a part of it.
        """
        cache, own = self.cache, cast("GroupSequence", seq)
        tokens, _ = cache.longest(own.names, seq.target, self.anywhere)
        if tokens <= seq.computed:
            return None
        tables, parts = self._find(own, tokens)
        if not resumed:
            for part in parts:
                part.level.stats.found += len(part.blocks)
        saves = cache.can_load(tables) and self._saves_time(own, parts, tokens, now, prefill_ns)
        if not saves:
            if not resumed:
                for part in parts:
                    part.level.stats.recomputed += len(part.blocks)
            return None
        load = GroupLoad(own, tokens, parts, now, resumed)
        for part in parts:
            part.level.hold([*part.blocks])
            if part.level.host is not None:
                part.level.host.hit([*part.blocks], now, own.request.id, again=resumed)
        for part in parts:
            self._begin(load, part, now)
        cache.begin_load(own, tokens, tables, now)
        load.positions = cache.allocate_loaded(own)
        self._loading.append(load)
        return load

    def _find(self, seq: GroupSequence, tokens: int) -> tuple[list[list[int]], list[Part]]:
        """Return the tables of `seq` with `tokens` tokens, and what levels have of them.

        `NO_BLOCK` stands in a table for a block that the pool lacks.
        """
        cache, parts = self.cache, [Part(level) for level in self._loadable]
        tables: list[list[int]] = []
        for index, group in enumerate(cache.groups):
            table = []
            for position, name in cache.needed(group, seq.names, tokens):
                block = cache.block_of(index, name)
                table.append(NO_BLOCK if block is None else block)
                if block is not None:
                    continue
                for part in parts:
                    slot = part.level.find(index, name)
                    if slot is not None:
                        part.blocks[slot] = Block(index, name, seq, position)
                        break
            tables.append(table)
        return tables, [part for part in parts if part.blocks]

    def _saves_time(
        self, seq: GroupSequence, parts: list[Part], tokens: int, now: int,
        prefill_ns: PrefillTime,
    ) -> bool:  # fmt: skip
        """Return True if loading takes no more time than computing, or is asked for always."""
        if any(part.level.tier.load == "always" for part in parts):
            return True
        loading = max(part.level.link.load_ns(self._size(part), now) for part in parts)
        again = prefill_ns(seq.target - seq.computed, seq.computed)
        return loading + prefill_ns(seq.target - tokens, tokens) <= again

    def _size(self, part: Part) -> int:
        return sum(self._bytes[block.group] for block in part.blocks.values())

    def _begin(self, load: GroupLoad, part: Part, now: int) -> None:
        """Queue a part of a load, whose slots are held, on the link of its level."""
        level, stats, trace = part.level, part.level.stats, self.cache.trace
        blocks = len(part.blocks)
        stats.loaded += blocks
        stats.returned += blocks if load.resumed else 0
        stats.wait_ns += level.link.wait(now)
        # The runs are those of the sequence, whose blocks are in order.
        for run in runs_of(reversed(part.blocks.values())):
            done = level.link.load(self.bytes_of(run), now)
            part.runs.append(run)
            stats.loads += 1
            if trace is not None:
                told = {**run._asdict(), **self._told(load)}
                trace.load_start(now, tier=level.name, **told, done=done)
            load.ready = max(load.ready, done)
        stats.load_ns += done - now
        if level.below is not None:
            level.below.use([level.content[slot] for slot in part.blocks], now, level)

    def _told(self, load: GroupLoad) -> dict[str, int]:
        """Return the sequence of a load, and the blocks of its prompt that it has then."""
        return {"seq": load.seq.id, "hit": load.tokens // self.cache.geometry.block_size}

    def finish(self, load: GroupLoad, now: int) -> int:
        """Give the loaded blocks their names; return the computed tokens of the sequence."""
        self._loading.remove(load)
        seq, size, trace = load.seq, self.cache.geometry.block_size, self.cache.trace
        for part in load.parts:
            level, slots = part.level, [*part.blocks]
            for run in part.runs:
                if trace is not None:
                    trace.load(now, tier=level.name, **run._asdict(), **self._told(load))
            level.release(slots[::-1], now)
            if level.tier.keep == "exclusive":
                free = [slot for slot in slots[::-1] if not level.slots.holders(slot)]
                for slot in free:
                    level.slots.remove(slot)
                level.drop(free, now, "moved")
        gain = load.tokens // size - seq.hit_blocks
        if not load.resumed:
            # Of the farthest level, without which there would be no such hit.
            stats = load.parts[-1].level.stats
            stats.hits += gain
            stats.ratio_sum += gain / seq.lookup_blocks
        self.cache.end_load(cast("GroupSequence", seq), load.positions, now)
        return load.tokens

    def prefetch(
        self, request: Request, now: int, arrival: int, prefill_ns: PrefillTime, reserve: int
    ) -> None:
        """Return None: nothing is loaded ahead of a request."""

    def can_swap(self, seq: Holder, tokens: int, now: int, prefill_ns: PrefillTime) -> None:
        """Return None: no sequence is parked."""

    def record_residency(self) -> None:
        """Do nothing: how long blocks of groups stay is not recorded."""

    def residencies(self) -> list[Residency | None]:
        """Return nothing: how long blocks of groups stay is not recorded."""
        return []

    def check_integrity(self) -> None:
        """Check the invariants of every level. Raises AssertionError."""
        for level in self.levels:
            parts = [part for load in self._loading for part in load.parts]
            level.check_integrity({s for p in parts if p.level is level for s in p.blocks})
