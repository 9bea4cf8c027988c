"""The check of the trace of a cache of groups, against the state before each line.

A hit is what all groups can serve, found here by going down from the longest prefix: none of
the code of `kvcore_plugins.cache_groups` is used. Blocks have ids, so that none is allocated
twice, or freed while another sequence holds it.
"""

from __future__ import annotations

from array import array
from typing import Any

from kvcore.cache.pool import BlockPool, Ids
from kvcore.trace import events
from kvcore.trace.events import methods_by_event, violated
from kvcore.trace.fields import encode_runs
from kvcore.units import INT64_LIMIT
from kvcore_replay.check.base import CacheChecker
from kvcore_replay.check.group_tiers import GroupTierChecker
from kvcore_replay.state.groups import (
    APPLIED,
    TIERED,
    GroupedSequence,
    GroupState,
    TracedGroup,
    key_of,
    private_ids,
)

SERVED = ("FIRST_TOKEN", "PREEMPT", "RESUME", "FINISH", "REJECT")
"""Events of a server, which change no block."""


class GroupChecker(CacheChecker[GroupState]):
    """Checks each event against the state before it, then applies it.

    Attributes:
        pool: the free blocks, in the order in which they are allocated.
    """

    def __init__(self, header: events.Header) -> None:
        """Start with the empty cache that HEADER gives.

        Raises:
            ValueError: the sizes and groups do not fit one another.
        """
        if header.count != "tokens":
            violated("a cache of groups counts tokens")
        super().__init__(GroupState(header))
        self.pool = BlockPool(header.blocks)
        caps = header.batching or {}
        # It may keep what no interval does, and choose what leaves.
        policy = header.plugins.get("checkpoint")
        self._checkpoint = None if policy is None else policy.name
        self._is_planned = caps.get("commit") == "scheduled"
        # A prompt that is neither cut nor waits for a step that has room may be of any length.
        alone = caps.get("chunked") is False and caps.get("unchunked") != "wait"
        most = INT64_LIMIT if alone else caps.get("max_tokens")
        self._in_flight = most * (1 + self._lag) if isinstance(most, int) else None
        # Blocks that were evicted and that no sequence has taken yet.
        self._victims: Ids = array("i")
        # Event and sequence that the next line must have; and this one.
        self._next: tuple[str, int] | None = None
        self._due: tuple[str, int] | None = None
        self._checks = methods_by_event(self, *APPLIED, *SERVED, "END")
        tiers = self.state.tiers
        self._tiers = None if tiers is None else GroupTierChecker(self.state, tiers)

    def apply(self, event: Any) -> None:
        """Check the next event after HEADER, and apply it. O(blocks that it names).

        Raises:
            ViolationError: the event contradicts what came before.
        """
        name, state = event.event, self.state
        self._due, self._next = self._next, None
        if self._due not in (None, (name, getattr(event, "seq", None))):
            violated(f"{self._due[0]} of sequence {self._due[1]} must come before this")
        if event.t != self._now:
            if self._due is not None:
                violated(f"it is of one call with the line before, which is at {self._now} ns")
            self._now = event.t
            self._must_be_taken()
        elif name not in ("EVICT", "ALLOC"):
            self._must_be_taken()
        check = self._checks.get(name)
        if check is not None:
            check(event)
        elif self._tiers is None or name not in TIERED:
            violated("a cache of groups has no such line")
        # After the pool's check, which has bounded the blocks that a line names.
        if self._tiers is not None:
            self._tiers.check(event)
        state.apply(event)
        free, cached, private = self.pool.free_blocks, state.cached, state.private
        if free + len(self._victims) + cached + private != state.header.blocks:
            violated(
                f"{free} free, {cached} cached and {private} private blocks are not the "
                f"{state.header.blocks} of the pool"
            )

    def report(self) -> dict[str, Any]:
        """Return the state, and counts, as fields of a `Report`."""
        state = self.state
        by_group = zip(state.groups, state.cached_by_group, state.private_by_group, strict=True)
        return super().report() | {
            "groups": [
                {
                    "kind": group.kind,
                    "block_size": group.size,
                    "window": group.window,
                    "layers": group.layers,
                    "cached": cached,
                    "private": private,
                }
                for group, cached, private in by_group
            ]
        }

    def cached_tokens(self, request: events.Request) -> int:
        """Return the number of tokens of a prompt that would hit now."""
        return self.state.cached_tokens(request)

    # Admissions.

    def _request(self, event: events.Request) -> None:
        if event.id in self.state.requests:
            violated(f"request {event.id!r} has a REQUEST line already")
        self.lifecycles.arrive(event.id, self._caps.output(event))

    def _hit(self, event: events.GroupHit) -> None:
        self._admit(event, event.blocks)
        if event.blocks < self.state.prompt(event.request).blocks:
            self._next = ("MISS", event.seq)

    def _miss(self, event: events.Miss) -> None:
        state = self.state
        if self._due is None:
            self._admit(event, 0)
            hit, resumed, request = 0, bool(event.again), event.request
        else:
            seq = state.sequence(event.seq)
            hit, resumed, request = seq.hit, seq.resumed, seq.prompt.id
        if (event.request, event.block, bool(event.again)) != (request, hit, resumed):
            violated(f"sequence {event.seq} is of request {request!r} and hit {hit} blocks")
        prompt, limit = state.prompt(request), state.limit(request) // self._size
        if hit < limit:
            reasons = ["absent"]
        else:
            prefix_limit = max(prompt.tokens - 1, 0) // self._size
            reasons = ["no keys" if limit < prefix_limit or not prompt.keys else "partial"]
        if resumed:
            # It looks up what it has generated, too.
            reasons += ["absent", "partial", "no keys"]
        if event.why not in reasons:
            violated(f"block {hit} missed as {event.why!r}; it is {reasons[0]!r}")

    def _admit(self, event: events.GroupHit | events.Miss, hit: int) -> None:
        """Check the first line of an admission: it hits what all groups can serve."""
        state, resumed, tokens = self.state, bool(event.again), hit * self._size
        prompt = state.prompt(event.request)
        limit = state.limit(event.request)
        if resumed:
            # How much it has generated, no line says before it ends.
            limit = max(limit, prompt.tokens + self.lifecycles.output(prompt.id) - 1)
        if tokens > limit:
            violated(f"{hit} blocks hit; at most {limit // self._size} can")
        for group in state.groups:
            if not state.serves(event.request, tokens, group):
                violated(f"{hit} blocks hit; group {group} lacks what is needed there")
        longest = state.longest(event.request, state.limit(event.request))
        if tokens < longest or (tokens > longest and not resumed):
            violated(f"{hit} blocks hit; all groups have {longest // self._size}")
        self.lifecycles.admit(prompt.id, event.seq, resumed=resumed)
        self._must_open(event.seq)
        if hit and self._is_planned:
            self._must_be_computed(event, tokens)

    def _must_be_computed(self, event: events.GroupHit | events.Miss, tokens: int) -> None:
        """Check that no state that is hit got its name in the plan of this step."""
        state = self.state
        for group in state.groups:
            position = tokens // group.size - 1
            if group.kind == "state":
                block = state.copies(event.request, group, position)[0]
                if block.computed_at == event.t:
                    violated(f"the state in block {block.id} is computed by this step")

    # Blocks.

    def _alloc(self, event: events.GroupAlloc) -> None:
        seq, group = self._table_of(event)
        table, ids = seq.tables[group.index], self.state.ids(event.runs)
        self._must_be_next(event, seq, group, len(ids))
        if not ids or (group.kind == "state" and len(ids) > 1):
            violated(f"{len(ids)} blocks of group {group} are taken")
        count = len(table.blocks) + len(ids)
        if self._in_flight is not None:
            tokens = max(event.first + len(ids), table.end) * group.size
            # Under a lag a state is given back a step later.
            limit = group.most_blocks(tokens, self._in_flight) + self._lag
            if count > limit:
                violated(
                    f"sequence {seq.id} holds {count} blocks of group {group}; {limit} fit"
                )
        if self._evicting not in (None, seq.prompt.id):
            self._must_be_taken()
        self.lifecycles.grow(seq.prompt.id, seq.id)
        if len(ids) > self.pool.free_blocks + len(self._victims):
            violated(f"{len(ids)} blocks are taken; {self.pool.free_blocks} are free")
        order = self.pool.allocate(min(len(ids), self.pool.free_blocks))
        rest = len(ids) - len(order)
        order += self._victims[:rest]
        del self._victims[:rest]
        if ids != order:
            violated(f"the pool gives {encode_runs(order)}, not {encode_runs(ids)}")
        if not self._victims:
            self._evicting = None

    def _must_be_next(
        self, event: events.GroupAlloc, seq: GroupedSequence, group: TracedGroup, count: int
    ) -> None:
        """Check that a sequence takes blocks for its next positions, or those that it loads."""
        table, first = seq.tables[group.index], event.first
        if seq.id in self.state.loads:
            lacks = [p for p in seq.loading[group.index] if p not in table.blocks][:count]
            if lacks != [*range(first, first + count)]:
                violated(f"sequence {seq.id} does not load {count} blocks from {first} on")
        elif first != table.end and not (group.kind == "state" and first > table.end):
            violated(
                f"sequence {seq.id} has {table.end} blocks in group {group}: {first} is not "
                "next"
            )

    def _commit(self, event: events.GroupCommit) -> None:
        seq, group = self._table_of(event)
        table, end = seq.tables[group.index], event.first + event.blocks
        prompt = self.state.prompt_in(group, seq.prompt.id)
        if not self._lag:
            self.lifecycles.grow(seq.prompt.id, seq.id)
        gap = event.first > table.stored and group.kind == "full"
        is_loaded = self._loads(seq, group, event.first)
        if (event.first < table.stored or gap) and not is_loaded:
            violated(f"blocks of group {group} have names up to {table.stored}")
        if prompt.share is not None and end > prompt.share and not is_loaded:
            violated(f"request {prompt.id!r} shares {prompt.share} blocks of group {group}")
        if event.generated is True:
            self._must_be_generated(group, seq, event.first, end)
        elif end > prompt.cacheable:
            violated(f"request {prompt.id!r} has names for {prompt.cacheable} blocks")
        if event.blocks > len(table.blocks):
            violated(f"sequence {seq.id} has {len(table.blocks)} blocks in group {group}")
        for position in range(event.first, end):
            self._must_get_name(event, seq, group, position)

    def _must_get_name(
        self, event: events.GroupCommit, seq: GroupedSequence, group: TracedGroup, position: int
    ) -> None:
        """Check that the block of `seq` at a position is private, and worth a name."""
        block = seq.tables[group.index].blocks.get(position)
        if block is None or block.name is not None:
            violated(f"sequence {seq.id} has no private block {position} in group {group}")
        if not (self._loads(seq, group, position) or self._is_kept(seq, group, position)):
            violated(f"no request resumes after block {position} of group {group}: it is kept")
        is_copy = bool(self.state.copies(seq.prompt.id, group, position))
        if (event.how == "copy") is not is_copy:
            violated(f"there is {'a' if is_copy else 'no'} block of the name of {position}")

    def _loads(self, seq: GroupedSequence, group: TracedGroup, position: int) -> bool:
        """Return True if `seq` has just loaded the block at a position."""
        done = bool(seq.loading) and seq.id not in self.state.loads
        return done and position in seq.loading[group.index]

    def _is_kept(self, seq: GroupedSequence, group: TracedGroup, position: int) -> bool:
        """Return True if the block at a position is one that a later request may need.

        That is so of the blocks before the end of an interval, the last one of the prompt that
        is whole in all groups, the end of its last whole key, and the junction. A policy may
        keep any.
        """
        if self._checkpoint is not None:
            return True
        interval, need = self.state.interval, -(-group.kept // group.size)
        if group.kind in ("full", "chunk") or seq.resumed:
            return True  # the junction of a resumed one depends on what it has generated
        if interval is None and group.kind == "state":
            return True
        if interval != 0:
            blocks = (interval or self._size) // group.size
            if position % blocks >= blocks - need:
                return True
        if interval is None:
            return False
        key, last_token = self.state.layout.key_tokens, max(seq.prompt.tokens - 1, 0)
        whole_keys = min(seq.prompt.tokens // key, len(seq.prompt.keys))
        ends = (last_token, whole_keys * key, seq.junction)
        lasts = [end // self._size * self._size // group.size for end in ends]
        return any(last - need <= position < last for last in lasts)

    def _must_be_generated(
        self, group: TracedGroup, seq: GroupedSequence, first: int, end: int
    ) -> None:
        """Check that blocks of `seq` are of output without keys, which may be cached."""
        state, prompt = self.state, self.state.prompt_in(group, seq.prompt.id)
        self._must_cache_output()
        longest = state.layout.tokens_of(prompt, self.lifecycles.output(prompt.id))
        if first < prompt.cacheable or end * group.size > longest or prompt.share is not None:
            violated(f"blocks {first} to {end} of request {prompt.id!r} are not generated")
        if prompt.cacheable < prompt.tokens // group.size:
            violated(f"request {prompt.id!r} has no keys for all of its prompt")

    def _evict(self, event: events.GroupEvict) -> None:
        state, ids = self.state, self.state.ids(event.runs)
        group = state.group(event.group)
        if event.by not in (self._eviction, self._checkpoint):
            violated(f"by eviction policy {self._eviction!r}, not {event.by!r}")
        if not ids or len(set(ids)) < len(ids):
            violated("its blocks are not distinct, or there are none")
        self._evict_for(event.requester)
        order = iter(state.evictable)
        for victim in ids:
            block = state.evictable.get(victim)
            if block is None or block.group != group.index:
                violated(f"block {victim} is no block of group {group} that can be evicted")
            oldest = next(order)
            if event.by == "lru" and victim != oldest:
                violated(f"block {victim} is evicted; block {oldest} was freed before it")
            if self.digests:
                self.evictions.add(key_of(block.name))
        self._victims.extend(ids)

    def _free(self, event: events.GroupFree) -> None:
        seq = self.state.sequence(event.seq)
        if event.reason == "close":
            if self._due is None:
                self.lifecycles.close(seq.prompt.id, seq.id)
            if event.group or event.first:
                violated("a sequence closes in all groups")
            expected: Ids = array("i")
            for table in seq.tables:
                expected += private_ids(list(table.blocks.values()))
            self._free_blocks(event, expected)
            return
        if self._due is not None or not isinstance(event.group, int):
            violated(f"sequence {seq.id} has no blocks of a group to free here")
        group = self.state.group(event.group)
        table, first = seq.tables[group.index], event.first
        if not isinstance(first, int) or first <= table.first:
            violated(f"the first block of sequence {seq.id} in group {group} is {table.first}")
        if first > group.passed(self._tokens(seq)):
            violated(
                f"sequence {seq.id} has room for {self._tokens(seq)} tokens: it needs block "
                f"{first - 1} of group {group}"
            )
        self._free_blocks(event, private_ids([block for _, block in table.before(first)]))

    def _free_blocks(self, event: events.GroupFree, blocks: Ids) -> None:
        """Check that a sequence frees these blocks, and give them back to the pool."""
        self._must_free(event.seq, event.runs, blocks)
        self.pool.free(blocks, len(blocks))

    def _table_of(
        self, event: events.GroupAlloc | events.GroupCommit
    ) -> tuple[GroupedSequence, TracedGroup]:
        return self.state.sequence(event.seq), self.state.group(event.group)

    def _tokens(self, seq: GroupedSequence) -> int:
        """Return the number of tokens for which `seq` has got blocks in all groups."""
        groups = self.state.groups
        return min(
            table.end * group.size for group, table in zip(groups, seq.tables, strict=True)
        )

    def _must_be_taken(self) -> None:
        if self._victims:
            self._refuse_victims()

    # The server.

    def _first_token(self, event: events.FirstToken) -> None:
        self.lifecycles.apply(event)
        self._must_have_blocks(self.state.sequence(event.seq), 1)

    def _preempt(self, event: events.Preempt) -> None:
        if event.how == "swap":
            violated("a sequence with cache groups is parked in no tier")
        self._close_next(event)

    def _resume(self, event: events.Resume) -> None:
        self.state.sequence(event.seq)
        self.lifecycles.apply(event)

    def _finish(self, event: events.Finish) -> None:
        self._close_next(event)
        self._must_have_blocks(self.state.sequence(event.seq), event.output)

    def _close_next(self, event: events.Preempt | events.Finish) -> None:
        """Record an event after which the sequence may have to close."""
        self.state.sequence(event.seq)
        if self.lifecycles.apply(event):
            self._next = ("FREE", event.seq)

    def _must_have_blocks(self, seq: GroupedSequence, output: int) -> None:
        """Check that `seq` has, or has had, blocks for its prompt and its output."""
        tokens = self.state.layout.tokens_of(seq.prompt, output)
        if self._tokens(seq) < tokens:
            violated(
                f"sequence {seq.id} has had blocks for {self._tokens(seq)} tokens; its prompt "
                f"and {output} tokens of output are {tokens}"
            )

    def _reject(self, event: events.Reject) -> None:
        self.lifecycles.apply(event)
        state, prompt = self.state, self.state.prompt(event.request)
        tokens = state.layout.tokens_of(prompt, self.lifecycles.output(prompt.id))
        gone = state.header.mode == "wall"  # a client may leave before it is admitted
        if gone or self._in_flight is None or self._caps.refuses(prompt.tokens, tokens):
            return
        need = sum(group.most_blocks(tokens, self._in_flight) for group in state.groups)
        if need <= state.header.blocks:
            violated(f"request {prompt.id!r} needs {need} blocks, and the pool has enough")
