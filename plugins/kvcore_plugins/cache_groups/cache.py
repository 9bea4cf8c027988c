"""Cache groups: what layers of several kinds keep, in one pool of blocks.

Layers with full attention keep K/V of all tokens, layers with a window that of the last ones,
or of those in the current chunk, and recurrent layers a state. A *group* is a set of layers
that keep the same; a sequence has a table of blocks for each. All blocks take the same bytes,
so any free one can go to any group:

    position      0     1     2     3     4     5
    full        [ A ] [ B ] [ C ] [ D ] [ E ] [   ]     all tokens
    window        -     -     -   [ D'] [ E'] [   ]     the window has passed the first three
    state         -     -     -     -   [ s ] [   ]     the state after position 4; the newest

A block that is filled gets a *name*, its group and its key, by which later requests hit it.
Full attention names all blocks, the others those at which a request is likely to resume
(`GroupedCache._kept`). Several blocks may have one name; the oldest of these copies is hit.

A block that no sequence holds any more is free. Blocks without a name are taken first; then
those with a name, the least recently freed one first, and these are evicted.

Source: the hybrid KV cache manager of vLLM 0.33, whose hits, refusals, free blocks and
evictions these rules have.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from math import inf, lcm
from operator import ne
from typing import Any, Final, NoReturn

from kvcore.cache.checkpoint import CheckpointPolicy
from kvcore.cache.eviction import EvictionPolicy
from kvcore.cache.layout import BlockLayout
from kvcore.cache.pool import BlockPool, Ids
from kvcore.cache.recorder import Recorder, check_admission
from kvcore.cache.residency import CacheStats
from kvcore.cache.tree import root_span
from kvcore.errors import InputError, OutOfBlocks, PolicyError
from kvcore.plugins import (
    FAILURES,
    Plugin,
    describe,
    find_override,
    policy_error,
    resolve,
    wrong_answer,
)
from kvcore.request import Key, Request
from kvcore.serving.decode_batch import DecodeBatch
from kvcore.serving.scheduler import Batching
from kvcore_plugins.cache_groups.allocator import GroupAllocator
from kvcore_plugins.cache_groups.groups import (
    BlockNames,
    GroupMatch,
    GroupsBelow,
    GroupSequence,
    LayerGroup,
    Table,
    name_generated,
)
from kvcore_plugins.cache_groups.named_blocks import NO_BLOCK, Name, named_blocks


class GroupedCache:
    """Allocates, shares, reuses and evicts blocks of cache groups, in a pool of all of them.

    It has the calls of `KVCache` that serving makes (`ServedCache`), in `tokens` accounting:
    blocks are allocated chunk by chunk, hits are multiples of `geometry.block_size`. The rest
    is not known to groups: retention of tokens, forks, and drafts.

    Args:
        groups: the groups.
        blocks: blocks in the pool.
        checkpoint: where windows and states get names: a policy, its name or its class; None:
            `default`, the end of a prompt and a junction.
        key_tokens: tokens that a block key of a request stands for; None: the first request
            decides.
        eviction: `lru`, for which None stands; a `HostedGroups` takes any policy.
        recompute: seconds to compute n tokens after a context of c; None: Llama-3-8B, H100.
        trace: the recorder of every decision; None records nothing.

    Attributes:
        groups, checkpoint, trace: the arguments.
        now: the time (ns) of the call under way, or of the last one.
        tiers: the tiers below the pool, set by `GroupTiers(cache, ...)`; None without tiers.
        has_states: whether a group keeps states.
        pool: the blocks; its free ones have no name.
        geometry: the layout of prompts in blocks of which each is whole in every group.
        sequences: the open sequences by id.
        stats: counts of lookups and hits so far.
        evicted_blocks: number of blocks evicted so far.
        failure: the first error of the checkpoint policy, which later calls raise; else None.
        in_flight_tokens: tokens that may be computed before what the window has passed is
            freed, for the admission of prompts.
        names_generated: whether generated blocks without keys get names.

    Raises:
        InputError: no groups, or numbers that do not fit them or one another.
    """

    retention: Final = None
    prefix: Final = None
    pins: Final = None
    counts_only: Final = True
    grouped: Final = True

    def __init__(
        self,
        groups: Iterable[LayerGroup],
        blocks: int,
        *,
        checkpoint: CheckpointPolicy | type[CheckpointPolicy] | str | None = None,
        key_tokens: int | None = None,
        eviction: EvictionPolicy | type[EvictionPolicy] | str | None = None,
        recompute: Callable[[int, int], float] | None = None,
        trace: Recorder | None = None,
    ) -> None:
        self.groups = tuple(groups)
        if not self.groups:
            msg = "a cache without groups: give one or more, such as LayerGroup('full', 16)"
            raise InputError(msg)
        self.has_states = any(group.kind == "state" for group in self.groups)
        sizes = {group.block_size for group in self.groups}
        self._size = size = lcm(*sizes)
        checkpoint = checkpoint or CheckpointPolicy
        self.checkpoint: CheckpointPolicy = resolve("checkpoint", checkpoint)
        self.checkpoint.check_unused()
        self.checkpoint.unit = size
        self._interval = interval = self.checkpoint.interval
        if interval is not None and not (
            type(interval) is int and interval >= 0 and interval % size == 0
        ):
            msg = (
                f"checkpoint {self.checkpoint.name!r} keeps windows and states at multiples of "
                f"{interval!r} tokens: give 0 or a multiple of {size:,}, which blocks of all "
                "groups divide"
            )
            raise InputError(msg)
        self.eviction: EvictionPolicy = resolve("eviction", eviction, "lru")
        if problem := self._problem():
            raise InputError(problem)
        self._chooser: Plugin = self.eviction  # of what leaves, for traces
        self.geometry = BlockLayout("tokens", size, key_tokens, recompute)
        self._layouts = {size: BlockLayout("tokens", size, key_tokens) for size in sizes}
        self.pool = BlockPool(blocks)
        self.checkpoint.bind()  # nothing is refused from here on
        self._on_admitted = find_override(self.checkpoint, "on_admitted")
        self.trace = trace
        self.now = 0
        self.tiers: GroupsBelow | None = None
        self.sequences: dict[int, GroupSequence] = {}
        self.stats = CacheStats()
        self.evicted_blocks = 0
        self.failure: PolicyError | None = None
        self.in_flight_tokens = 0
        self.names_generated = False
        self._root = root_span(self.geometry)
        self._last_id = 0
        self._admitted: set[int | str] = set()  # of a traced cache
        self._blocks = named_blocks(len(self.groups))
        self._cached = self._blocks.cached
        self._fresh: set[tuple[int, Name]] = set()
        self.hears_names = trace is not None
        # Groups of one kind are looked up together, those with full attention first.
        alike: dict[tuple[Any, ...], list[int]] = {}
        for index, group in enumerate(self.groups):
            alike.setdefault((group.kind, group.block_size, group.window), []).append(index)
        self._alike = sorted(
            ((self.groups[members[0]], members) for members in alike.values()),
            key=lambda kind: kind[0].kind != "full",
        )
        # By group, the place of its kind in `_alike`. The tables of a sequence begin and end at
        # the same positions in groups of one kind.
        kind_of = {
            index: index_of_kind
            for index_of_kind, (_, members) in enumerate(self._alike)
            for index in members
        }
        self._kinds = [kind_of[index] for index in range(len(self.groups))]
        if trace is not None:
            self._begin_trace(trace)

    def _problem(self) -> str:
        """Return why these groups cannot have these policies, or "" if they can."""
        if self.eviction.name == "lru":
            return ""
        return (
            f"eviction {self.eviction.name!r}: a GroupedCache is evicted by lru; give "
            "that, or make a kvcore.HostedGroups, which takes any policy"
        )

    def allocator(self, batch: DecodeBatch, batching: Batching) -> GroupAllocator:
        """Return the allocator of its blocks in a run, whose rules it has from now on.

        Raises:
            InputError: rules or limits that cache groups cannot have.
        """
        return GroupAllocator(self, batch, batching)

    # Reading.

    @property
    def forgets(self) -> bool:
        """Whether a running sequence may hold fewer tokens than it has: no group keeps all."""
        return all(group.kind != "full" for group in self.groups)

    @property
    def unpinned_blocks(self) -> int:
        """Number of blocks that can be evicted."""
        return self._blocks.idle

    @property
    def available_blocks(self) -> int:
        """Number of blocks that are free or can be evicted."""
        return self.pool.free_blocks + self._blocks.idle

    def probe(self, request: Request, now: int | None = None, target: int | None = None) -> int:
        """Return the number of blocks of `geometry` of `request` that would hit."""
        return self.match(request, now, target).tokens // self._size

    def match(
        self, request: Request, now: int | None = None, target: int | None = None
    ) -> GroupMatch:
        """Return the cached prefix of `request`, which would hit. Changes no block.

        `target` is that of `open`.
        """
        self._check_policies()
        return self._look_up(request, self._names(request), target or request.prompt_tokens)

    def need(self, match: GroupMatch, tokens: int, *, whole: bool = False) -> int:
        """Return how many blocks must be free or evictable to open a request.

        Args:
            match: its cached prefix.
            tokens: tokens for which it gets blocks, the hit included.
            whole: whether these are its whole prompt, computed in chunks: then a window holds
                no more than it has with the tokens in flight.
        """
        total = 0
        for group, hit in zip(self.groups, match.blocks, strict=True):
            # As one chunk it holds all that it gets.
            flight = self.in_flight_tokens if whole else tokens
            blocks = group.most_blocks(tokens, flight) - match.tokens // group.block_size
            blocks = max(blocks, 0)
            total += min(blocks, 1) if group.kind == "state" else blocks
            total += self._blocks.count_idle(hit)
        return total

    def is_computed(self, match: GroupMatch) -> bool:
        """Return True if no state of `match` is one that the planned step computes."""
        return self._are_computed(chain(*match.blocks))

    def _are_computed(self, blocks: Iterable[int]) -> bool:
        """Return True if none of `blocks` is a state that the planned step computes."""
        return not self._fresh or self._fresh.isdisjoint(map(self._blocks.place, blocks))

    def most_blocks(self, tokens: int) -> int:
        """Return the most blocks of all groups for a sequence until it has `tokens` tokens."""
        total = 0
        for group in self.groups:
            blocks = group.most_blocks(tokens, self.in_flight_tokens)
            # Of states, the newest, and the one that it was computed from.
            total += min(blocks, 2) if group.kind == "state" else blocks
        return total

    def chunk_tokens(
        self,
        start: int,
        tokens: int,
        prompt: int,
        target: int,
        boundaries: Iterable[int],
        largest: int,
    ) -> int:
        """Return how many of `tokens` tokens from `start` on the next chunk of a prompt has.

        A state can be cached only where a chunk ends. So a chunk ends at a multiple of the
        block, unless it is the last one of its prompt; and at the last such multiple before
        the prompt's last token, and at each boundary. 0: there are too few tokens for that.

        Args:
            start: tokens that are computed.
            tokens: tokens that may be.
            prompt: tokens of the prompt.
            target: tokens to compute before the next one is generated.
            boundaries: those of its `GroupMatch`.
            largest: the most tokens of a step. A block with more is computed over several.
        """
        # After a preemption the last token is a generated one, computed as in a decode step.
        prompt_end, size = max(prompt, target - 1), self._size
        if not self.has_states or start >= prompt_end:
            return tokens
        end = start + tokens
        if end < prompt_end:
            last = end // size * size
            if last > start or size <= largest:
                end = last
        stops = [(target - 1) // size * size]
        if start % size:
            stops.append((start // size + 1) * size)
        # After a preemption the end of the prompt is no stop: the text goes on behind it. A
        # junction there, which comes with it, is one.
        others = [*boundaries]
        if prompt - 1 in others:
            others.remove(prompt - 1)
        stops += [b // size * size for b in others if start < b < end]
        return max(min((stop for stop in stops if start < stop < end), default=end) - start, 0)

    def residency_by_tier(self) -> None:
        """Return None: how long blocks of groups stay is not recorded."""

    def record_residency(self) -> None:
        """Do nothing: how long blocks of groups stay is not recorded."""

    # From open to close.

    def announce(self, request: Request, now: int) -> None:
        """Write REQUEST to the trace: `request` has arrived."""
        if self.trace is not None:
            self.trace.describe_keys(request, self.geometry)
            self.trace.request(request, now)

    def disown(self, request: Request) -> None:
        """Drop the record of `request`, which has ended: another may have its id."""
        self._admitted.discard(request.id)

    def open(
        self,
        request: Request,
        first_tokens: int | None = None,
        now: int | None = None,
        *,
        resumed: bool = False,
        target: int | None = None,
        reserve: int = 0,
        match: GroupMatch | None = None,
    ) -> GroupSequence:
        """Admit `request`: take the blocks it hits, and allocate those it computes first.

        Args:
            request: the request.
            first_tokens: tokens to allocate after the hit; None: the rest of `target`.
            now: the time in ns.
            resumed: whether a preempted request returns: then its hit is no reuse.
            target: tokens to compute before the next one is generated; None: the prompt.
            reserve: number of blocks that must stay free or evictable.
            match: its cached prefix if that has been looked up; None: it is.

        Raises:
            InputError: the request has hints that groups do not know, or `first_tokens` is
                below 0.
            OutOfBlocks: too few blocks are free or evictable, or the step that is planned
                computes a state that it would hit; no block has changed.
            PolicyError: a policy failed.
        """
        self._check_policies()
        if first_tokens is not None and first_tokens < 0:
            msg = f"open with the first {first_tokens} tokens after the hit: give 0 or more"
            raise InputError(msg)
        self.now = self.now if now is None else now
        self._check_hints(request)
        if self.trace is not None:
            check_admission(request, self._admitted, resumed=resumed)
            self.announce(request, self.now)
        names, length = self._names(request), target or request.prompt_tokens
        if match is None:
            match = self._look_up(request, names, length)
        hit = match.tokens
        tokens = length if first_tokens is None else hit + first_tokens
        need = self.need(match, tokens)
        if need + reserve > self.available_blocks or not self.is_computed(match):
            raise OutOfBlocks(self._no_room(request, need))
        self._last_id += 1
        keys, prompt, _, cacheable, lookup, _ = self.geometry.lay_out(request)
        size = self._size
        seq = GroupSequence(
            self._last_id, self._last_id, request, keys, cacheable, lookup,
            hit // size, hit, hit, hit // size, length, self._root,
        )  # fmt: skip
        seq.names, seq.boundaries, seq.fresh = names, match.boundaries, []
        seq.settled, seq.committed_at, seq.planned, seq.tables = hit, None, 0, []
        seq.room, seq.fills_at = hit, hit + size
        for group, blocks in zip(self.groups, match.blocks, strict=True):
            self._hold(blocks)
            stored = hit // group.block_size
            seq.tables.append(Table(group.passed(hit), blocks[:], stored))
        seq.passes_at = self._next_passed(seq)
        if self.trace is not None:
            self._trace_admission(seq, self.trace, resumed=resumed)
        self._allocate(seq, tokens)
        self.sequences[seq.id] = seq
        self.stats.admitted(lookup, hit // size, prompt, hit, resumed)
        if self.tiers is not None:
            self.tiers.hit(match.blocks, self.now)
        if self._on_admitted is not None and not resumed:
            self._ask("on_admitted", self._on_admitted, request, hit, match.junction)
        return seq

    def grow(self, seq: GroupSequence, tokens: int) -> bool:
        """Allocate for the first `tokens` tokens of `seq`; return False if there is no room."""
        if tokens > seq.room:
            self._check_policies()
            growth = self._growth(seq, tokens)
            blocks = self._blocks_of(growth)
            if blocks > self.available_blocks:
                return False
            self._fill_tables(seq, growth, self._take(blocks, seq))
        seq.settled, seq.tokens = seq.tokens, tokens
        seq.blocks = -(-tokens // self._size)
        return True

    def free_passed(self, seq: GroupSequence, tokens: int) -> bool:
        """Free the blocks that no token after the first `tokens` of `seq` needs, last first.

        So a window ages from the time at which it has passed, not from the end of its request.
        Returns True if more blocks are available then.
        """
        if tokens < seq.passes_at:
            return False
        before, trace, all_passed = self.available_blocks, self.trace, list[int]()
        passed_by_kind = [group.passed(tokens) for group, _ in self._alike]
        for index, (kind, table) in enumerate(zip(self._kinds, seq.tables, strict=True)):
            count = min(passed_by_kind[kind] - table.first, len(table.blocks))
            if count <= 0:
                continue
            passed = table.blocks[:count]
            del table.blocks[:count]
            table.first += count
            passed.reverse()
            if trace is None:
                all_passed += passed
                continue
            freed = self._free(passed)
            trace.group_free(
                self.now, seq=seq.id, runs=freed, reason="passed", group=index,
                first=table.first,
            )  # fmt: skip
        self._free(all_passed)
        seq.passes_at = self._next_passed(seq)
        return self.available_blocks > before

    def _next_passed(self, seq: GroupSequence) -> float:
        """Return after how many tokens of `seq` the next block of a group is passed."""
        tables = seq.tables
        return min(group.passes_at(tables[members[0]].first) for group, members in self._alike)

    def has_room(self, seq: GroupSequence, tokens: int) -> bool:
        """Return True if there are blocks for the first `tokens` tokens of `seq`."""
        return self._missing(seq, tokens) <= self.available_blocks

    def extend(self, seq: GroupSequence, tokens: int, now: int | None = None) -> None:
        """Allocate blocks of each group for `tokens` more tokens; evict blocks for that.

        Raises:
            InputError: `tokens` is below 0, or `seq` is not open here.
            OutOfBlocks: too few are free or evictable; none has been allocated.
        """
        self._begin(seq, now)
        if tokens < 0:
            msg = f"extend by {tokens} tokens: give 0 or more"
            raise InputError(msg)
        total = seq.tokens + tokens
        self.free_passed(seq, seq.computed)
        if not self.grow(seq, total):
            raise OutOfBlocks(self._no_room(seq.request, self._missing(seq, total)))

    def commit(self, seq: GroupSequence, tokens: int, now: int | None = None) -> None:
        """Count `tokens` more tokens as computed: full blocks get their names."""
        self._begin(seq, now)
        if tokens < 0 or seq.computed + tokens > seq.tokens:
            seq.refuse_commit(tokens)
        seq.committed_at = now
        seq.computed += tokens
        self.store(seq, seq.computed)
        if self.tiers is not None:
            self.tiers.computed(seq, self.now)
        if seq.fresh:
            self._fresh.difference_update(seq.fresh)
            seq.fresh.clear()

    def publish(self, seq: GroupSequence, tokens: int, now: int) -> None:
        """Give names to the blocks that the next `tokens` tokens of `seq` will fill.

        Nobody hits a state before it is committed: a state is read when a step begins.
        """
        self.now, seq.planned = now, seq.computed + tokens
        seq.fresh.extend(self.store(seq, seq.planned))
        self._fresh.update(seq.fresh)

    def store(self, seq: GroupSequence, tokens: int) -> list[tuple[int, Name]]:
        """Give names to the blocks that the first `tokens` tokens of `seq` fill; return states.

        With several groups these are tokens whose blocks are full in all of them.
        """
        if tokens < seq.fills_at:
            return []
        tokens = self._aligned(tokens)
        last = max(names.shared * size for size, names in seq.names.items())
        seq.fills_at = tokens + self._size if tokens < last else inf
        # Blocks at the same positions get a name in all groups of a kind.
        by_kind = [self._newly_named(seq, kind, tokens) for kind in range(len(self._alike))]
        states = []
        for index, table in enumerate(seq.tables):
            positions, names = by_kind[self._kinds[index]]
            if not names:
                continue
            blocks = [table.blocks[position - table.first] for position in positions]
            oldest = self._blocks.name(blocks, names, index)
            if self.groups[index].kind == "state":
                states += [(index, name) for name in names]
            if self.hears_names:
                copies = map(ne, oldest, blocks)
                self._stored(seq, index, dict(zip(positions, copies, strict=True)))
        return states

    def _newly_named(
        self, seq: GroupSequence, kind: int, tokens: int
    ) -> tuple[Sequence[int], list[Name]]:
        """Return positions of a kind of groups that the first `tokens` tokens fill, and names.

        They are those that are to have a name and have none.
        """
        group, members = self._alike[kind]
        table, names = seq.tables[members[0]], seq.names[group.block_size]
        start, end = table.stored, min(tokens // group.block_size, names.shared)
        if end <= start:
            return (), []
        for index in members:
            seq.tables[index].stored = end
        positions = self._kept(group, max(start, table.first), end, seq)
        if group.kind == "state":
            blocks, first = table.blocks, table.first
            positions = [p for p in positions if blocks[p - first] != NO_BLOCK]
        return positions, names.at(positions)

    def _stored(self, seq: GroupSequence, group: int, copies: dict[int, bool]) -> None:
        """Called when blocks of a group got names: by position, whether others have it."""
        if self.trace is not None:
            self._trace_names(seq, group, copies, self.trace)
        if self.tiers is not None:
            self.tiers.store(seq, group, list(copies), self.now)

    def keep_generated(self, seq: GroupSequence, tokens: int, now: int) -> None:
        """Give names to the generated blocks that the first `tokens` tokens of `seq` fill."""
        self.now = now
        name_generated(seq.names, seq.request, tokens)
        seq.fills_at = 0
        self.store(seq, tokens)

    def settle(self, seq: GroupSequence, tokens: int) -> None:
        """Set the length of the text of `seq` to `tokens`."""
        seq.tokens = tokens

    def close(
        self,
        seq: GroupSequence,
        now: int | None = None,
        length: int | None = None,
        *,
        preempted: bool = False,
    ) -> None:
        """Give back all blocks of `seq`, of each group the last one first."""
        self._begin(seq, now)
        del self.sequences[seq.id]
        seq.is_open = False
        if self.tiers is not None:
            self.tiers.computed(seq, self.now)
        self._fresh.difference_update(seq.fresh)
        freed: Ids = array("i")
        for table in seq.tables:
            freed += self._free(table.blocks[::-1])
        seq.tables.clear()
        if self.trace is not None:
            self.trace.group_free(self.now, seq=seq.id, runs=freed, reason="close")

    def block_of(self, group: int, name: Name) -> int | None:
        """Return the block of that name in the pool that hits; None: there is none."""
        return self._cached[group].get(name)

    @property
    def cached(self) -> list[dict[Name, int]]:
        """By group, the block of each name that hits."""
        return self._cached

    def can_load(self, tables: list[list[int]]) -> bool:
        """Return True if a sequence can hold what `begin_load` is given, now."""
        blocks = [block for table in tables for block in table]
        held = [block for block in blocks if block != NO_BLOCK]
        need = len(blocks) - len(held) + self._blocks.count_idle(held)
        return need <= self.available_blocks and self._are_computed(held)

    def begin_load(
        self, seq: GroupSequence, tokens: int, tables: list[list[int]], now: int
    ) -> None:
        """Assign to `seq`, just opened, what the token after its first `tokens` tokens needs.

        Args:
            seq: the sequence.
            tokens: tokens that it has computed when its load is done.
            tables: by group, the blocks; `NO_BLOCK` stands for each that is loaded.
            now: the time in ns.
        """
        self.now = now
        self.free_passed(seq, tokens)
        for group, table, blocks in zip(self.groups, seq.tables, tables, strict=True):
            own = len(table.blocks)
            self._hold_loaded(seq, [block for block in blocks[own:] if block != NO_BLOCK])
            table.first, table.blocks = group.passed(tokens), blocks
        seq.tokens = seq.settled = seq.room = tokens
        seq.passes_at = self._next_passed(seq)

    def allocate_loaded(self, seq: GroupSequence) -> list[list[tuple[int, int]]]:
        """Allocate the blocks of `seq` that are loaded; return, by group, their runs.

        A run is the position of its first block, and the number of blocks.
        """
        runs = [list(_runs_of(NO_BLOCK, table)) for table in seq.tables]
        ids = iter(self._take(sum(count for group in runs for _, count in group), seq))
        for index, table in enumerate(seq.tables):
            for first, count in runs[index]:
                own = list(islice(ids, count))
                table.blocks[first - table.first : first - table.first + count] = own
                if self.trace is not None:
                    self.trace.group_alloc(
                        self.now, seq=seq.id, group=index, first=first, runs=array("i", own)
                    )
        return runs

    def end_load(self, seq: GroupSequence, runs: list[list[tuple[int, int]]], now: int) -> None:
        """Count the tokens of `seq` as computed: the blocks of `runs` get their names."""
        self.now = now
        for index, table in enumerate(seq.tables):
            names = seq.names[self.groups[index].block_size]
            for first, count in runs[index]:
                start = first - table.first
                blocks = table.blocks[start : start + count]
                positions = range(first, first + count)
                oldest = self._blocks.name(blocks, names.at(positions), index)
                copies = map(ne, oldest, blocks)
                self._stored(seq, index, dict(zip(positions, copies, strict=True)))
            table.stored = table.end
        seq.computed = seq.tokens
        seq.fills_at = seq.tokens + self._size
        seq.blocks = -(-seq.tokens // self._size)

    def compute(self, request: Request, max_tokens: int) -> GroupMatch:
        """Compute the prompt of `request` in chunks, alone on the server; return its hit.

        For replays without a clock, in which tiers load in no time. A prompt that finds no room
        ends there; one whose first chunk finds none hits nothing.

        Args:
            request: the request.
            max_tokens: the most tokens of a chunk.
        """
        match, length = self.match(request), request.prompt_tokens
        computed, seq = match.tokens, None
        self.in_flight_tokens = max_tokens
        while computed < length:
            tokens = self.chunk_tokens(
                computed, min(max_tokens, length - computed), length, length, match.boundaries,
                max_tokens,
            )  # fmt: skip
            if seq is None:
                if self.need(match, computed + tokens) > self.available_blocks:
                    break
                seq = self.open(request, tokens if self.tiers is None else 0, match=match)
                if self.tiers is not None:
                    load = self.tiers.load(seq, self.now, _untimed)
                    computed = computed if load is None else self.tiers.finish(load, self.now)
                    continue
            else:
                self.free_passed(seq, computed)
                if not self.grow(seq, computed + tokens):
                    break
            self.commit(seq, tokens)
            computed += tokens
        if seq is not None:
            self.close(seq)
            return match
        _, _, _, _, lookup, _ = self.geometry.lay_out(request)
        self.stats.admitted(lookup, 0, length, 0, resumed=False)
        return match._replace(tokens=0)

    def append_keys(self, seq: GroupSequence, keys: Sequence[Key]) -> NoReturn:
        """Refuse keys that become known while a request runs, as in runs on tensors."""
        msg = (
            f"request {seq.request.id!r} gets {len(keys)} keys while it runs, which cache "
            "groups do not know: serve the model as one group"
        )
        raise InputError(msg)

    def make_room(self, blocks: int, now: int) -> bool:
        """Return True if `blocks` blocks are free or evictable."""
        return blocks <= self.available_blocks

    def check_integrity(self) -> None:
        """Check every invariant. O(blocks).

        Raises:
            AssertionError: an invariant does not hold; the message has the numbers.
        """
        tables = [table for seq in self.sequences.values() for table in seq.tables]
        holders = Counter(block for table in tables for block in table.blocks)
        del holders[NO_BLOCK]
        named = dict(self._blocks)
        bare = [block for block in holders if block not in named]
        shared = [block for block in bare if holders.pop(block) > 1]
        idle = 0
        for block, name in named.items():
            known, holders_in_tables = self._blocks.holders(block), holders.pop(block, 0)
            idle += not holders_in_tables
            if self._blocks.place(block) != name or known != holders_in_tables:
                msg = (
                    f"block {block}, {self._blocks.place(block)!r}, is found as {name!r}; it "
                    f"has {known} holders and is in {holders_in_tables} tables"
                )
                raise AssertionError(msg)
        total = self.pool.free_blocks + len(bare) + len(named)
        if shared or self._blocks.idle != idle or total != self.pool.blocks:
            msg = (
                f"{self.pool.free_blocks} free, {len(bare)} held without a name and "
                f"{len(named)} named blocks are not {self.pool.blocks}; {self._blocks.idle} of "
                f"{idle} idle ones can be evicted, and {len(shared)} without a name are in two "
                "tables"
            )
            raise AssertionError(msg)

    # Lookup.

    def _check_hints(self, request: Request) -> None:
        """Refuse the hints of `request` that groups do not know."""
        hints = request.hints
        if request.retention or hints.pin is not None or hints.demote:
            msg = (
                f"request {request.id!r} has hints for eviction, which cache groups do not "
                "know: serve the model as one group, or leave the hints out"
            )
            raise InputError(msg)

    def _names(self, request: Request) -> dict[int, BlockNames]:
        """Return the names of the blocks of `request`, by their size."""
        names = {size: BlockNames(layout, request) for size, layout in self._layouts.items()}
        if self.names_generated:
            name_generated(names, request, request.prompt_tokens + request.output_tokens)
        return names

    def _look_up(
        self, request: Request, names: dict[int, BlockNames], length: int
    ) -> GroupMatch:
        """Return the longest prefix below `length` that all groups have."""
        tokens, longest = self.longest(names, length, self._cached)
        blocks = [
            [cached[name] for _, name in self.needed(group, names, tokens)]
            for group, cached in zip(self.groups, self._cached, strict=True)
        ]
        junction = longest if longest > tokens else 0
        boundaries = self._ask_boundaries(request, tokens, junction)
        return GroupMatch(tokens, junction, tuple(blocks), boundaries)

    def longest(
        self, names: dict[int, BlockNames], length: int, cached: Sequence[Container[Name]]
    ) -> tuple[int, int]:
        """Return the longest prefix below `length` that all groups have, and a single one.

        Each kind of group takes the length that those before it have left, or shortens it,
        until none does.

        Args:
            names: the names of the blocks, by their size.
            length: tokens.
            cached: by group, the names whose blocks there are.
        """
        tokens, longest, before = length - 1, 0, length
        full: dict[int, int] = {}
        while tokens < before:
            before = tokens
            for group, members in self._alike:
                own, index = names[group.block_size], members[0]
                there = [cached[member] for member in members]
                if group.kind == "chunk":
                    tokens = self._prefix(group, there, own, tokens)
                elif group.kind != "full":
                    tokens = self._last_resume(group, there, own, tokens)
                else:
                    if index not in full:
                        full[index] = self._prefix(group, there, own, tokens)
                    tokens = min(tokens, full[index])
                longest = max(longest, tokens)
        return tokens, longest

    def needed(
        self, group: LayerGroup, names: dict[int, BlockNames], tokens: int
    ) -> Iterable[tuple[int, Name]]:
        """Return position and name of each block of `group` needed after so many tokens."""
        positions = range(group.passed(tokens), tokens // group.block_size)
        return zip(positions, names[group.block_size].at(positions), strict=True)

    def path(self, seq: GroupSequence, group: int, end: int) -> Sequence[Key]:
        """Return the keys of the text of `seq`: block j of `geometry` has `keys[j // ratio]`.

        They are those of the blocks before position `end` of `group` and maybe more. O(1), or
        O(keys) if some of these blocks are generated.
        """
        size = self.groups[group].block_size
        blocks = -(-end * size // self._size)
        if blocks <= seq.cacheable:
            return seq.keys
        return self.geometry.generated_keys(seq.request, seq.cacheable, blocks)

    def _ask_boundaries(self, request: Request, hit: int, junction: int) -> tuple[int, ...]:
        """Return the boundaries of the policy for a request that hits so much."""
        boundaries: tuple[int, ...] = self._ask(
            "boundaries", lambda: tuple(self.checkpoint.boundaries(request, hit, junction))
        )
        if any(type(length) is not int for length in boundaries):
            self._refuse("boundaries()", f"{boundaries}: give whole tokens")
        return boundaries

    # Policies that fail.

    def _ask(self, method: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the checkpoint policy; an error of it ends the use of the cache."""
        self._check_policies()
        try:
            return call(*arguments)
        except FAILURES as error:
            if isinstance(error, PolicyError):
                raise
            self.failure = policy_error(self.checkpoint, method, error)
            raise self.failure from error

    def _refuse(self, question: str, why: str) -> NoReturn:
        """Raise the error of a wrong answer, which ends the use of the cache."""
        self.failure = wrong_answer(self.checkpoint, question, why)
        raise self.failure

    def _check_policies(self) -> None:
        """Raise the first error of a policy again, after which no call works."""
        if self.failure is not None:
            raise PolicyError(str(self.failure)) from self.failure

    def _begin(self, seq: GroupSequence, now: int | None) -> None:
        """Note the time of a call for `seq`, which has to be open in this cache."""
        self._check_policies()
        if self.sequences.get(seq.id) is not seq:
            why = "not of this cache" if seq.is_open else "closed"
            msg = f"sequence {seq.id} (request {seq.request.id}) is {why}"
            raise InputError(msg)
        self.now = self.now if now is None else now

    def _prefix(
        self, group: LayerGroup, cached: list[Any], names: BlockNames, tokens: int
    ) -> int:
        """Return how many first tokens, at most `tokens`, these groups have without a gap.

        Of a chunk those before the one that `tokens` end in are not needed.
        """
        end = min(tokens // group.block_size, names.end)
        end = max(end, start := group.passed(tokens))
        for position, name in names.walk(start, end):
            if not _in_all(cached, name):
                end = position
                break
        return self._aligned(end * group.block_size)

    def _last_resume(
        self, group: LayerGroup, cached: list[Any], names: BlockNames, tokens: int
    ) -> int:
        """Return the last length, at most `tokens`, at which windows or states can resume.

        There the blocks of the window are cached in all of these groups, or all from the first
        one on if these are fewer.
        """
        size, need, aligned = group.block_size, group.needed, self._size
        run = top = 0
        for position, name in names.walk(0, min(tokens // size, names.end), -1):
            if not run and (position + 1) * size % aligned:
                continue
            if not _in_all(cached, name):
                run = 0
                continue
            if not run:
                top = position + 1
            run += 1
            if run >= need:
                return top * size
        return self._aligned(run * size) if group.kind == "window" else 0

    def _aligned(self, tokens: int) -> int:
        """Return `tokens` without those behind the last block that is whole in all groups."""
        return tokens // self._size * self._size

    def _kept(
        self, group: LayerGroup, start: int, end: int, seq: GroupSequence
    ) -> Sequence[int]:
        """Return the positions in `[start, end)` whose blocks get a name.

        Full attention and chunks keep all. Of windows and states those are kept that a request
        needs which resumes at a boundary, at the end of an interval, or, if the policy keeps
        the output, anywhere in it.
        """
        interval, need = self._interval, group.needed
        if group.kind in ("full", "chunk"):
            return range(start, end)
        kept: set[int] = set()
        if interval != 0:
            per = (interval or self._size) // group.block_size
            if need >= per or (group.kind == "state" and interval is None):
                return range(start, end)
            kept.update(i for i in range(start, end) if i % per >= per - need)
        if interval is not None:
            for boundary in seq.boundaries:
                last = self._aligned(boundary) // group.block_size
                kept.update(range(max(start, last - need), min(end, last)))
            if self.checkpoint.output:
                output = self._aligned(seq.request.prompt_tokens) // group.block_size
                kept.update(range(max(start, output - need + 1), end))
        return sorted(kept)

    # Blocks.

    def _growth(self, seq: GroupSequence, tokens: int) -> list[int]:
        """Return by how many positions tables of each kind grow for the first `tokens`."""
        tables = seq.tables
        return [
            max(-(-tokens // group.block_size) - tables[members[0]].end, 0)
            for group, members in self._alike
        ]

    def _blocks_of(self, growth: list[int]) -> int:
        """Return how many blocks tables need that grow so; of states, the last position one."""
        return sum(
            len(members) * (min(positions, 1) if group.kind == "state" else positions)
            for (group, members), positions in zip(self._alike, growth, strict=True)
        )

    def _missing(self, seq: GroupSequence, tokens: int) -> int:
        """Return how many blocks the first `tokens` tokens of `seq` need beside its own."""
        return self._blocks_of(self._growth(seq, tokens))

    def _allocate(self, seq: GroupSequence, tokens: int) -> None:
        """Allocate for the first `tokens` tokens of `seq`, which is admitted: there is room."""
        if not self.grow(seq, tokens):
            raise OutOfBlocks(self._no_room(seq.request, self._missing(seq, tokens)))

    def _fill_tables(self, seq: GroupSequence, growth: list[int], ids: list[int]) -> None:
        """Put blocks into the tables of `seq`, in each kind of group at so many positions."""
        start = 0
        for index, table in enumerate(seq.tables):
            positions, first = growth[self._kinds[index]], table.end
            if not positions:
                continue
            if self.groups[index].kind == "state":
                # Only the state after the last token is computed into a block.
                first += positions - 1
                table.blocks += [NO_BLOCK] * (positions - 1)
                positions = 1
            own = ids[start : start + positions]
            table.blocks += own
            start += positions
            if self.trace is not None:
                self.trace.group_alloc(
                    self.now, seq=seq.id, group=index, first=first, runs=array("i", own)
                )
        seq.room = min(
            group.block_size * seq.tables[members[0]].end for group, members in self._alike
        )

    def _take(self, count: int, seq: GroupSequence) -> list[int]:
        """Return `count` blocks for `seq`: free ones, then those that lose their names."""
        missing = count - self.pool.free_blocks
        victims = self._choose(missing, seq) if missing > 0 else []
        if self.tiers is not None:
            self.tiers.leave(victims, self.now)
        if self.trace is not None and victims:
            self._trace_evictions(seq, victims, self.trace)
        self._evict(victims)
        ids = self.pool.allocate(count - len(victims)).tolist()
        self._blocks.grow(self.pool.high_water)
        return ids + victims

    def _hold(self, blocks: list[int]) -> None:
        """Add a holder to each of `blocks`."""
        self._blocks.hold(blocks)

    def _hold_loaded(self, seq: GroupSequence, blocks: list[int]) -> None:
        """Add a holder to blocks of the pool that `seq` hits with those that are loaded."""
        self._hold(blocks)

    def _choose(self, count: int, seq: GroupSequence) -> list[int]:
        """Return `count` blocks to evict for `seq`, which no sequence holds, in order."""
        return self._blocks.pop(count)

    def _evict(self, blocks: list[int]) -> None:
        """Remove the names of `blocks`, which no sequence holds."""
        self.evicted_blocks += len(blocks)
        self._blocks.forget(blocks)

    def _free(self, blocks: list[int]) -> Ids:
        """Remove a holder of each of `blocks`, in order: those without another one are free.

        Returns the blocks without a name, which can be allocated at once.
        """
        ids = array("i", self._blocks.release(blocks))
        self.pool.free(ids, len(ids))
        return ids

    def _no_room(self, request: Request, need: int) -> str:
        return (
            f"request {request.id} needs {need} more blocks; {self.pool.free_blocks} of "
            f"{self.pool.blocks} are free and {self._blocks.idle} can be evicted"
        )

    # The trace.

    def _begin_trace(self, trace: Recorder) -> None:
        """Write the settings of the cache into the header of `trace`."""
        trace.begin(
            count=self.geometry.accounting,
            block_size=self._size,
            key_tokens=self.geometry.key_tokens,
            blocks=self.pool.blocks,
            plugins={
                policy.kind: describe(policy)
                for policy in (self.eviction, self.checkpoint)
                if policy is self.eviction or not self.checkpoint.is_interval
            },
        )
        groups = [group.as_dict() for group in self.groups]
        interval = self.checkpoint.interval
        trace.describe(
            cache_groups={"prefix_cache_retention_interval": interval, "groups": groups}
        )

    def _trace_admission(self, seq: GroupSequence, trace: Recorder, *, resumed: bool) -> None:
        """Write HIT and MISS of `seq`, as far as each applies."""
        request, hit, size = seq.request, seq.hit_blocks, self._size
        self._admitted.add(request.id)
        if hit:
            trace.group_hit(self.now, request=request.id, seq=seq.id, blocks=hit, again=resumed)
        named = min(names.end * ratio for ratio, names in seq.names.items())
        limit = min(seq.target - 1, named) // size
        blocks = -(-request.prompt_tokens // size)
        trace.missed(self.now, seq, blocks, limit, expired=False, again=resumed)

    def _trace_evictions(self, seq: GroupSequence, victims: list[int], trace: Recorder) -> None:
        """Write EVICT of the blocks that lose their names for `seq`, group by group."""
        for index, run in groupby(victims, key=lambda block: self._blocks.place(block)[0]):
            trace.group_evict(
                self.now, group=index, runs=array("i", run), by=self._chooser.name,
                requester=seq.request.id,
            )  # fmt: skip

    def _trace_names(
        self, seq: GroupSequence, group: int, copies: dict[int, bool], trace: Recorder
    ) -> None:
        """Write COMMIT for each run of positions that got names, most of them one."""
        keyed, size = seq.names[self.groups[group].block_size].keyed, 0

        def run_of(position: int) -> tuple[int, bool, bool]:
            nonlocal size
            size += 1
            return position - size, copies[position], position >= keyed

        for (_, is_copy, generated), run in groupby(copies, key=run_of):
            positions = list(run)
            trace.group_commit(
                self.now, seq=seq.id, group=group, first=positions[0], blocks=len(positions),
                how="copy" if is_copy else "new", generated=generated,
            )  # fmt: skip


def _untimed(tokens: int, _context: int) -> int:
    """Return the time to prefill `tokens` tokens, in no unit: fewer tokens take less time."""
    return tokens


def _in_all(cached: list[Any], name: Name) -> bool:
    """Return True if `name` is in each of `cached`."""
    return name in cached[0] and all(name in group for group in cached)


def _runs_of(block: int, table: Table) -> Iterator[tuple[int, int]]:
    """Yield the first position and the length of each run of `block` in a table."""
    position = table.first
    for own, run in groupby(table.blocks):
        count = len(list(run))
        if own == block:
            yield position, count
        position += count
