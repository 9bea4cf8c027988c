"""The state of a traced cache of groups at any moment, rebuilt from its events.

Each block of a sequence is in one of three states:

    private  --COMMIT-->  named, held  --its last holder goes-->  evictable
       ^                      ^                                      |    |
     ALLOC                    +---------------- HIT -----------------+  EVICT
       |                                                                  |
     free   <----------------------- FREE (private ones) ---- or ---------+

With tiers, LOAD_START gives the sequence what the pool has of a longer prefix, ALLOC private
blocks for the rest, and COMMIT, after LOAD, the names of these.

The events are trusted, as those of `kvcore_replay.state.cache` are. `check.groups` checks them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from math import gcd, lcm
from typing import Any, ClassVar, Final

import attrs
from msgspec.structs import replace

from kvcore.cache.layout import GENERATED
from kvcore.cache.pool import Ids
from kvcore.trace import events
from kvcore.trace.events import methods_by_event, violated
from kvcore.untrusted import MOST_BLOCKS, WORK, WORK_OF_LINE
from kvcore_replay.state.cache import CacheState, TracedState, take_by
from kvcore_replay.state.group_tiers import Place, TracedGroupTiers
from kvcore_replay.state.layout import TracedPrompt, TraceLayout
from kvcore_replay.state.pools import PoolState

MOST_GROUPS = 64
"""Largest number of cache groups of a trace."""

_STEPS = 1 << 12
"""Positions of a lookup that are counted as work at once."""

_STEPS_OF_KEY = 4
"""Steps for each key of a request: it is looked up, checked and hit, in some groups."""

TIERED = ("OFFLOAD", "LOAD_START", "LOAD", "DROP")
"""Events about the tiers below a cache of groups."""

APPLIED = ("REQUEST", "HIT", "MISS", "ALLOC", "COMMIT", "EVICT", "FREE")
"""Events that change a cache of groups; each is applied by the method of its name."""


@attrs.frozen(eq=False)
class TracedGroup:
    """A cache group of a trace.

    Attributes:
        index: its number in lines.
        kind: `full`, `window`, `chunk` or `state`.
        size: tokens of a block.
        window: tokens of the window or the chunk; None: it has none.
        layers: number of its layers.
        layout: the layout of prompts in its blocks.
    """

    index: int
    kind: str
    size: int
    window: int | None
    layers: int
    layout: TraceLayout

    def __str__(self) -> str:
        """Return the group in words."""
        return f"{self.index} ({self.kind}{f' of {self.window}' if self.window else ''})"

    @property
    def kept(self) -> int:
        """Number of last tokens of a sequence whose blocks the next token needs."""
        if self.window is None:
            return 1
        return self.window - 1 if self.kind == "window" else 0

    def passed(self, tokens: int) -> int:
        """Return the number of first blocks that no token after `tokens` tokens needs."""
        if self.kind == "full":
            return 0
        if self.kind == "chunk" and self.window is not None:
            tokens -= tokens % self.window
        return max(0, tokens - self.kept) // self.size

    def most_blocks(self, tokens: int, in_flight: int) -> int:
        """Return the most blocks that a sequence holds until it has `tokens` tokens."""
        blocks = -(-tokens // self.size)
        if self.kind == "state":
            return min(blocks, 2)
        if self.window is None:
            return blocks
        # A window begins anywhere in its first block, a chunk where a multiple of it can be.
        step = gcd(self.window, self.size) if self.kind == "chunk" else 1
        return min(blocks, -(-(self.window + in_flight - step) // self.size) + 1)


@attrs.define(eq=False)
class TracedBlock:
    """A block in use: held by sequences, or cached by its name.

    Attributes:
        id: its id in the pool.
        group: index of its group.
        user: the request for which it was allocated, or which hit it last.
        name: its name in the group; None while it is private.
        computed_at: time (ns) at which it got its name, since it is computed; -1: it was
            loaded.
        last_access: time (ns) at which it was named, hit or given back last.
        holders: number of sequences that hold it.
        hits: number of hits by other requests.
    """

    id: int
    group: int
    user: int | str
    name: Any = None
    computed_at: int = 0
    last_access: int = 0
    holders: int = 1
    hits: int = 0


@attrs.define(eq=False)
class GroupTable:
    """The blocks of a sequence in one group.

    Attributes:
        first: position before which nothing is kept.
        end: the position after the last block.
        stored: number of first positions whose blocks have a name, if they are to have one.
        blocks: the blocks by position, in order; between states there are none.
    """

    first: int = 0
    end: int = 0
    stored: int = 0
    blocks: dict[int, TracedBlock] = attrs.field(factory=dict)

    def before(self, position: int) -> list[tuple[int, TracedBlock]]:
        """Return the positions before `position` and their blocks, in order."""
        entries = []
        for entry in self.blocks.items():
            if entry[0] >= position:
                break
            entries.append(entry)
        return entries


@attrs.define(eq=False)
class GroupedSequence:
    """An open sequence: its tables of blocks, by group.

    Attributes:
        prompt: its prompt in blocks of HEADER.
        hit: number of these blocks that hit.
        resumed: whether a preempted request was admitted again.
        junction: the longest prefix, in tokens, that the first kind of group has, if that is
            longer than the hit; else 0.
        tables: the tables.
        loading: by group, the positions of the blocks that it loads and that have no name yet.
        has_forgotten: whether it has dropped blocks that it could share; no window is one.
    """

    has_forgotten: ClassVar[bool] = False

    id: int
    prompt: TracedPrompt
    hit: int
    resumed: bool
    junction: int
    tables: list[GroupTable]
    loading: list[list[int]] = attrs.field(factory=list)


class GroupState(TracedState[GroupedSequence]):
    """Pool, block tables and names of a traced cache of groups.

    A position of a lookup takes some 1 µs, so that fewer of them are allowed than of the
    steps of a `CacheState`: so many a line, and some for each key that the file has.

    Attributes:
        groups: the cache groups.
        interval: the retention interval.
        blocks: the blocks in use, by id.
        names: for each group the blocks of each name, the oldest first.
        evictable: the named blocks without a holder, the least recently freed one first.
    """

    spans: Final[dict[int, Any]] = {}

    def __init__(self, header: events.Header) -> None:
        """Start with an empty pool of the size and the groups that HEADER gives.

        Raises:
            ValueError: the sizes do not fit one another.
        """
        record = header.cache_groups
        assert record
        super().__init__(header)
        self.interval = record.prefix_cache_retention_interval
        if len(record.groups) > MOST_GROUPS:
            violated(f"{len(record.groups)} cache groups; the most is {MOST_GROUPS}")
        sizes = [group.block_size for group in record.groups]
        if lcm(*sizes) != header.block_size or (self.interval or 0) % header.block_size:
            violated(
                f"blocks of groups have {sizes} tokens, their retention interval is "
                f"{self.interval}, and HEADER has blocks of {header.block_size}"
            )
        self.groups = [self._group(*pair) for pair in enumerate(record.groups)]
        first = min(self.groups, key=lambda group: group.kind != "full")
        # Groups that are alike with this one: what they alone could serve makes a junction.
        self._first_kind = [
            group
            for group in self.groups
            if (group.kind, group.size, group.window) == (first.kind, first.size, first.window)
        ]
        self.blocks: dict[int, TracedBlock] = {}
        self.names: list[dict[Any, list[TracedBlock]]] = [{} for _ in self.groups]
        self.evictable: OrderedDict[int, TracedBlock] = OrderedDict()
        self.cached_by_group = [0] * len(self.groups)
        self.private_by_group = [0] * len(self.groups)
        self._prompts: dict[int | str, list[TracedPrompt]] = {}
        self._keys = 0
        # By request and group, the tokens of a prefix without a gap, until names change.
        self._prefixes: dict[tuple[int | str, int], int] = {}
        self.tiers = TracedGroupTiers(header) if header.tiers else None
        self._apply = methods_by_event(self, *APPLIED, *TIERED)

    def _group(self, index: int, record: events.GroupRecord) -> TracedGroup:
        if (record.kind in ("window", "chunk")) is (record.window is None):
            problem = "a window or a chunk, and no other kind, has a window"
            violated(f"cache group {index}: {problem}")
        layout = TraceLayout.from_header(replace(self.header, block_size=record.block_size))
        return TracedGroup(
            index, record.kind, record.block_size, record.window, record.layers, layout
        )

    @property
    def held(self) -> int:
        """Number of named blocks that sequences hold."""
        return self.cached - len(self.evictable)

    @property
    def cached(self) -> int:
        """Number of blocks with a name."""
        return sum(self.cached_by_group)

    @property
    def used_by_group(self) -> list[int]:
        """Number of blocks in use, by group."""
        pairs = zip(self.cached_by_group, self.private_by_group, strict=True)
        return [cached + private for cached, private in pairs]

    @property
    def private(self) -> int:
        """Number of blocks of sequences without a name."""
        return sum(self.private_by_group)

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return self.header.blocks - len(self.blocks)

    def apply(self, event: Any) -> None:
        """Apply the next event after HEADER. O(blocks that it names).

        Raises:
            ViolationError: it names a block, sequence or request that there is not, or the
                trace is beyond a limit.
        """
        self._most_work = (WORK >> 4) + WORK_OF_LINE * event.n + _STEPS_OF_KEY * self._keys
        take_by(self._apply, event)

    def prompt_in(self, group: TracedGroup, request: int | str) -> TracedPrompt:
        """Return the prompt of a request in blocks of `group`."""
        self.prompt(request)
        return self._prompts[request][group.index]

    def group(self, index: int) -> TracedGroup:
        """Return the group of that index.

        Raises:
            ViolationError: HEADER has no such group.
        """
        if index >= len(self.groups):
            violated(f"HEADER has {len(self.groups)} cache groups, and no group {index}")
        return self.groups[index]

    def count_work(self, steps: int) -> None:
        """Add to the steps of the trace.

        Raises:
            ViolationError: there are too many.
        """
        self._work += steps
        if self._work > self._most_work:
            violated(f"the lines so far name {self._work:,} blocks: too many")

    # Lookups.

    def limit(self, request: int | str) -> int:
        """Return the most tokens of a prompt that can hit: those of whole named blocks."""
        prompt, size = self.prompt(request), self.header.block_size
        named = [
            self._prompts[request][group.index].cacheable * group.size for group in self.groups
        ]
        return min(max(prompt.tokens - 1, 0), *named) // size * size

    def copies(
        self, request: int | str, group: TracedGroup, position: int
    ) -> list[TracedBlock]:
        """Return the blocks that a request can hit in `group` at a position, oldest first."""
        name = name_of(self._prompts[request][group.index], group, position)
        return self.names[group.index].get(name, [])

    def places(
        self, event: events.Offload | events.LoadStart | events.Load | events.Discard
    ) -> list[Place]:
        """Return the blocks that a line about a tier names, the last one of the text first.

        Raises:
            ViolationError: it names a request or group that there is not, or too many blocks.
        """
        if not isinstance(event.group, int):
            violated(f"{event.event} has no field 'group', and HEADER has cache groups")
        prompt, group = self.prompt_in(self.group(event.group), event.request), event.group
        self.count_work(event.blocks)
        positions = range(event.first + event.blocks - 1, event.first - 1, -1)
        named = self.groups[group]
        return [(group, name_of(prompt, named, position)) for position in positions]

    @property
    def loads(self) -> dict[int, Any]:
        """The sequences that wait for loads."""
        return {} if self.tiers is None else self.tiers.loads

    def needed(self, request: int | str, tokens: int) -> Iterator[tuple[int, Place]]:
        """Yield position and place of each block that the token after so many needs."""
        for group in self.groups:
            prompt = self.prompt_in(group, request)
            positions = range(group.passed(tokens), tokens // group.size)
            self.count_work(len(positions))
            for position in positions:
                yield position, (group.index, name_of(prompt, group, position))

    def reach(
        self, request: int | str, limit: int, named: Sequence[Container[Any]] | None = None
    ) -> int:
        """Return the longest prefix, at most `limit`, that groups with the names `named` have.

        None stands for what pool and tiers have together.
        """
        size = self.header.block_size
        limited: list[tuple[TracedGroup, Container[Any]]] = []
        for group in self.groups:
            names = _Anywhere(self, group.index) if named is None else named[group.index]
            if group.kind == "full":
                limit = min(limit, self._without_gap(request, group, names))
            else:
                limited.append((group, names))
        for length in range(limit // size * size, 0, -size):
            if all(self._can_resume(request, length, *each) for each in limited):
                return length
        return 0

    def serves(self, request: int | str, tokens: int, group: TracedGroup) -> bool:
        """Return True if `group` has the blocks that the tokens after a prefix need."""
        if group.kind == "full":
            return self._prefix(request, tokens, [group]) >= tokens
        return self._can_resume(request, tokens, group, self.names[group.index])

    def _can_resume(
        self, request: int | str, tokens: int, group: TracedGroup, names: Container[Any]
    ) -> bool:
        prompt = self._prompts[request][group.index]
        first, last = group.passed(tokens), tokens // group.size
        # From the last one back, which is most often the one that is not there.
        for steps, position in enumerate(range(last - 1, first - 1, -1), 1):
            if name_of(prompt, group, position) not in names:
                self.count_work(steps)
                return False
        self.count_work(last - first)
        return True

    def _prefix(self, request: int | str, tokens: int, groups: list[TracedGroup]) -> int:
        """Return how many first tokens, at most `tokens`, full groups have without a gap."""
        for group in groups:
            key = request, group.index
            if key not in self._prefixes:
                names = self.names[group.index]
                self._prefixes[key] = self._without_gap(request, group, names)
            tokens = min(tokens, self._prefixes[key])
        return tokens

    def _without_gap(
        self, request: int | str, group: TracedGroup, names: Container[Any]
    ) -> int:
        """Return how many first tokens of a request have `names`, without a gap."""
        prompt, position = self._prompts[request][group.index], 0
        while name_of(prompt, group, position) in names:
            position += 1
        self.count_work(position)
        return position * group.size

    def longest(
        self, request: int | str, tokens: int, groups: list[TracedGroup] | None = None
    ) -> int:
        """Return the longest prefix, of at most `tokens` tokens, that groups can serve.

        None stands for all groups.
        """
        size, groups = self.header.block_size, groups or self.groups
        full = [group for group in groups if group.kind == "full"]
        # A chunk may need no block, where it begins; it is looked up after the others.
        limited = [group for group in groups if group.kind != "full"]
        limited.sort(key=lambda group: group.kind == "chunk")
        tokens = self._prefix(request, tokens, full) // size * size
        if not limited:
            return tokens
        # Most often the last block is not there: so it is looked up first, without a call.
        group, steps = limited[0], 0
        names, prompt = self.names[group.index], self._prompts[request][group.index]
        for length in range(tokens, 0, -size):
            steps += 1
            if steps == _STEPS:
                self.count_work(steps)
                steps = 0
            last = length // group.size - 1
            is_there = group.kind == "chunk" or name_of(prompt, group, last) in names
            if is_there and all(
                self._can_resume(request, length, other, self.names[other.index])
                for other in limited
            ):
                return length
        return 0

    def cached_tokens(self, request: events.Request) -> int:
        """Return the number of tokens of a prompt that would hit now."""
        if request.id in self.requests:
            return self.longest(request.id, self.limit(request.id))
        self._request(request)
        tokens = self.longest(request.id, self.limit(request.id))
        self.forget(request.id)
        return tokens

    def forget(self, request: int | str) -> None:
        """Remove a request that has no sequence."""
        super().forget(request)
        del self._prompts[request]
        self._prefixes.clear()

    # Events.

    def _request(self, event: events.Request) -> None:
        self.requests[event.id] = self.layout.prompt(event)
        self._keys += len(event.keys)
        by_size = {group.size: group.layout.prompt(event) for group in self.groups}
        self._prompts[event.id] = [by_size[group.size] for group in self.groups]

    def _hit(self, event: events.GroupHit) -> None:
        seq = self._admit(event, event.blocks)
        tokens = event.blocks * self.header.block_size
        for group, table in zip(self.groups, seq.tables, strict=True):
            prompt, names = self._prompts[event.request][group.index], self.names[group.index]
            table.first, table.end = group.passed(tokens), tokens // group.size
            table.stored = table.end
            for position in range(table.first, table.end):
                block = table.blocks[position] = names[name_of(prompt, group, position)][0]
                self._hold(block, seq, event.t)

    def _miss(self, event: events.Miss) -> None:
        # After a HIT of the same admission the sequence is open already.
        if event.seq not in self.sequences:
            self._admit(event, 0)

    def _admit(self, event: events.GroupHit | events.Miss, hit: int) -> GroupedSequence:
        prompt, resumed = self.prompt(event.request), bool(event.again)
        self.count_hit(prompt, hit, resumed=resumed)
        # Before any of the blocks is used: it is what the admission has looked up.
        limit = max(prompt.tokens - 1, 0)
        junction = self.longest(event.request, limit, self._first_kind)
        if junction <= hit * self.header.block_size:
            junction = 0
        tables = [GroupTable() for _ in self.groups]
        seq = GroupedSequence(event.seq, prompt, hit, resumed, junction, tables)
        self.sequences[seq.id] = seq
        return seq

    def _alloc(self, event: events.GroupAlloc) -> None:
        seq, ids = self.sequence(event.seq), self.ids(event.runs)
        table = seq.tables[event.group]
        for position, block in enumerate(ids, event.first):
            taken = TracedBlock(block, event.group, seq.prompt.id)
            self.blocks[block] = table.blocks[position] = taken
        if event.first < table.end:
            # Between those that the pool had.
            table.blocks = dict(sorted(table.blocks.items()))
        table.end = max(table.end, event.first + len(ids))
        self.private_by_group[event.group] += len(ids)
        if len(self.blocks) > MOST_BLOCKS:
            violated(f"more than {MOST_BLOCKS:,} blocks are in use, which is the most")

    def _commit(self, event: events.GroupCommit) -> None:
        self._prefixes.clear()
        seq, group = self.sequence(event.seq), self.group(event.group)
        table, names = seq.tables[group.index], self.names[group.index]
        prompt, end = self._prompts[seq.prompt.id][group.index], event.first + event.blocks
        own = seq.loading[group.index] if seq.loading else []
        for position in range(event.first, end):
            block = table.blocks[position]
            block.name = name_of(prompt, group, position)
            block.computed_at = -1 if position in own else event.t
            block.last_access = event.t
            names.setdefault(block.name, []).append(block)
        table.stored = max(table.stored, end)
        if own:
            seq.loading[group.index] = [p for p in own if not event.first <= p < end]
        self.private_by_group[group.index] -= event.blocks
        self.cached_by_group[group.index] += event.blocks

    # Tiers, whose lines a trace without them does not have.

    def _offload(self, event: events.Offload) -> None:
        self._below().store_places(event, self.places(event))

    def _drop(self, event: events.Discard) -> None:
        self._below().drop_places(event, self.places(event))

    def _load_start(self, event: events.LoadStart) -> None:
        seq, tiers = self.sequence(event.seq), self._below()
        if event.seq not in tiers.loads:
            self._begin_load(seq, event)
        tiers.load_start(event)
        tiers.held[event.tier].update(self.places(event))

    def _begin_load(self, seq: GroupedSequence, event: events.LoadStart) -> None:
        """Assign to a sequence what the pool has of the prefix that it has after its load."""
        if not isinstance(event.hit, int):
            violated("LOAD_START has no field 'hit', and HEADER has cache groups")
        tokens = event.hit * self.header.block_size
        seq.loading = [[] for _ in self.groups]
        for position, (index, name) in self.needed(seq.prompt.id, tokens):
            table = seq.tables[index]
            if position in table.blocks:
                continue
            copies = self.names[index].get(name)
            if copies is None:
                seq.loading[index].append(position)
                continue
            self._hold(copies[0], seq, event.t)
            table.blocks[position] = copies[0]
        for group, table in zip(self.groups, seq.tables, strict=True):
            table.end = table.stored = tokens // group.size

    def _load(self, event: events.Load) -> None:
        tiers = self._below()
        tiers.load(event)
        tiers.held[event.tier].subtract(self.places(event))

    def _below(self) -> TracedGroupTiers:
        return self.tiers or violated("HEADER has no tiers")

    def _hold(self, block: TracedBlock, seq: GroupedSequence, now: int) -> None:
        """Add `seq` to the holders of a block that it hits."""
        self.evictable.pop(block.id, None)
        block.holders += 1
        block.last_access = now
        block.hits += not seq.resumed
        block.user = seq.prompt.id

    def _evict(self, event: events.GroupEvict) -> None:
        self._prefixes.clear()
        names = self.names[event.group]
        for victim in self.ids(event.runs):
            block = self.blocks.pop(victim)
            del self.evictable[victim]
            copies = names[block.name]
            copies.remove(block)
            if not copies:
                del names[block.name]
            self.cached_by_group[event.group] -= 1

    def _free(self, event: events.GroupFree) -> None:
        seq = self.sequence(event.seq)
        if event.reason == "close":
            for index, table in enumerate(seq.tables):
                self._give_back(index, list(table.blocks.values()), event.t)
            del self.sequences[seq.id]
            return
        group, first = event.group, event.first
        if not (isinstance(group, int) and isinstance(first, int)):
            violated("what has passed is of no group, or has no first block after it")
        table = seq.tables[group]
        passed = table.before(first)
        for position, _ in passed:
            del table.blocks[position]
        table.first = first
        self._give_back(group, [block for _, block in passed], event.t)

    def _give_back(self, group: int, blocks: list[TracedBlock], now: int) -> None:
        """Remove a holder of each of `blocks`, last first; private ones are free."""
        self.count_work(len(blocks))
        for block in reversed(blocks):
            if block.name is None:
                del self.blocks[block.id]
                self.private_by_group[group] -= 1
                continue
            block.holders -= 1
            block.last_access = now
            if not block.holders:
                self.evictable[block.id] = block


class _Anywhere:
    """The names of the blocks of a group that the pool has, or a tier that loads them."""

    def __init__(self, state: GroupState, group: int) -> None:
        self._state, self._group = state, group

    def __contains__(self, name: object) -> bool:
        tiers = self._state.tiers
        in_tier = tiers is not None and tiers.has((self._group, name)) is not None
        return in_tier or name in self._state.names[self._group]


def state_of(header: events.Header) -> CacheState | GroupState:
    """Return the empty cache that HEADER gives, of one group or pool, or of several.

    Raises:
        ValueError: the sizes do not fit one another.
    """
    if header.cache_groups:
        return GroupState(header)
    return PoolState(header) if header.layer_pools else CacheState(header)


def name_of(prompt: TracedPrompt, group: TracedGroup, position: int) -> Any:
    """Return the name of a block in its group: its key, or that of a generated block."""
    if position >= prompt.cacheable:
        return GENERATED, prompt.id, position
    ratio = group.layout.ratio
    key = prompt.keys[position // ratio]
    return key if ratio == 1 else (key, position)


def key_of(name: Any) -> Any:
    """Return the key in the name of a block; None for a generated one."""
    if type(name) is not tuple:
        return name
    return None if name[0] == GENERATED else name[0]


def private_ids(blocks: list[TracedBlock]) -> Ids:
    """Return the ids of the private blocks among `blocks`, last first."""
    return array("i", [block.id for block in reversed(blocks) if block.name is None])
