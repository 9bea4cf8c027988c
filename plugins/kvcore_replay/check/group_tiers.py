"""The check of the lines of tiers below a cache of groups.

    of these lines             demands or allows
    EVICT of the pool          before it, OFFLOAD of its blocks where a tier takes victims
    COMMIT                     OFFLOAD of what it named, by `through`; later where a plan may
                               name blocks, and then not when their sequence is admitted
    HIT, LOAD_START            OFFLOAD of what was hit, by a number of uses
    HIT, MISS                  LOAD_START of the sequence, one for each run of blocks, at once
    LOAD_START                 LOAD, when its last transfer is done, in the same order
    LOAD, all of them          DROP moved of exclusive tiers, COMMIT of all that was loaded
    DROP capacity              OFFLOAD into that tier, which needs the room
    OFFLOAD from a tier        DROP capacity of what it copied, by `evict`

A line is checked before the state has taken it. Lines of one call have one time.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvcore.trace import events
from kvcore.trace.events import methods_by_event, violated
from kvcore_replay.check.tiers import max_wait, must_be_done
from kvcore_replay.state.group_tiers import Place, TracedGroupTiers
from kvcore_replay.state.groups import TIERED, GroupedSequence, GroupState, name_of
from kvcore_replay.state.tiers import TracedTier

POOL = "the pool"


class GroupTierChecker:
    """Checks the lines of tiers, and that what they demand comes.

    Args:
        state: the pool.
        tiers: the tiers below it.
    """

    def __init__(self, state: GroupState, tiers: TracedGroupTiers) -> None:
        self._state, self._tiers = state, tiers
        self._exact = state.header.mode != "wall"
        self._now = 0
        # Of this call: the sequence that was admitted; the blocks that were named, hit, loaded,
        # or written into a tier, each with the name of the store.
        self._admitted: int | None = None
        self._named: set[tuple[str, Place]] = set()
        self._hits: set[tuple[str, Place]] = set()
        self._loaded: set[tuple[str, Place]] = set()
        # What must leave a store, since it was written down for that; and the tiers that made
        # room for blocks.
        self._leaving: set[tuple[str, Place]] = set()
        self._making_room: set[str] = set()
        # Blocks that a tier takes, since it is written through; of this call, the number of
        # blocks that each tier took, and the blocks that left it for others.
        self._owed: set[tuple[str, Place]] = set()
        self._taken: Counter[str] = Counter()
        self._dropped: set[tuple[str, Place]] = set()
        # Where plans name blocks: by sequence, those that it has named; and those of sequences
        # that were admitted in this call, whose tokens no step has computed.
        caps = state.header.batching or {}
        self._plans = caps.get("commit") == "scheduled" or "rules" in state.header.plugins
        self._planned: dict[int, set[Place]] = {}
        self._uncomputed: set[Place] = set()
        self._new: set[int] = set()
        # Tier and source of the line before, if that is an OFFLOAD.
        self._writing: tuple[str, str] | None = None
        # The nearest tier, and the one below each.
        names = [*tiers.levels]
        self._below = dict(zip([POOL, *names], names, strict=False))
        # The blocks of the load that begins which no line has named yet.
        self._missing: set[Place] = set()
        # The sequence of which a load is done.
        self._arriving: int | None = None
        self._checks = methods_by_event(self, *TIERED, "HIT", "MISS", "EVICT", "COMMIT", "FREE")

    def check(self, event: Any) -> None:
        """Check an event against the state before it.

        Raises:
            ViolationError: it contradicts what came before.
        """
        is_later = event.t != self._now
        if is_later or event.event != "OFFLOAD":
            self._writing = None
        if is_later or event.event not in ("OFFLOAD", "DROP", "COMMIT"):
            for name, place in self._owed:
                self._must_be_in(self._tiers.levels[name], place)
            self._owed.clear()
        if is_later or event.event not in (*TIERED, "EVICT", "COMMIT"):
            self._must_be_settled()
        if is_later:
            self._now, self._admitted = event.t, None
            self._taken.clear()
            for places in (self._named, self._hits, self._loaded, self._dropped):
                places.clear()
            self._uncomputed.clear()
            self._new.clear()
        if self._arriving is not None:
            self._must_arrive(event)
        check = self._checks.get(event.event)
        if check is not None:
            check(event)

    def _must_be_settled(self) -> None:
        """Check that all that the lines of tiers before this demand has come."""
        if self._missing:
            violated(f"{len(self._missing)} blocks of a load are missing, and no line has them")
        if self._leaving:
            store, _ = min(self._leaving, key=str)
            violated(f"blocks were written down to leave {store!r}, and stay there")
        if self._making_room:
            violated(f"tier {min(self._making_room)!r} dropped blocks to make room for nothing")

    def _takes(self, store: str, rule: str) -> str | None:
        """Return the tier below a store, if it is written by a rule."""
        below = self._below.get(store)
        if below is None or self._tiers.levels[below].record.options.get("write") != rule:
            return None
        return below

    def _must_be_in(self, tier: TracedTier, place: Place) -> None:
        """Check that a block is in a tier, or was, which had room for it and an idle link."""
        if place in self._tiers.places[tier.name] or (tier.name, place) in self._dropped:
            return
        is_busy = not self._exact or tier.free_at - self._now > max_wait(tier)
        read = sum(count > 0 for count in self._tiers.held[tier.name].values())
        if not is_busy and self._taken[tier.name] < tier.record.slots - read:
            violated(f"block {place[1]!r} is not in {tier.name!r}, which could take it")

    def _must_arrive(self, event: Any) -> None:
        """Check that loaded blocks get their names before anything else happens."""
        assert self._arriving is not None
        seq, name = self._state.sequence(self._arriving), event.event
        waits = seq.id in self._tiers.loads
        if not waits and not any(seq.loading):
            self._arriving = None
        elif name != "DROP" and (name, getattr(event, "seq", None)) not in (
            ("LOAD" if waits else "COMMIT", seq.id),
            ("OFFLOAD", None),
        ):
            violated(f"sequence {seq.id} has loaded blocks, and must name them")

    # The pool.

    def _hit(self, event: events.GroupHit) -> None:
        tokens = event.blocks * self._state.header.block_size
        needed = self._state.needed(event.request, tokens)
        self._hits.update((POOL, place) for _, place in needed)
        self._miss(event)

    def _miss(self, event: events.GroupHit | events.Miss) -> None:
        self._admitted = event.seq
        self._new.add(event.seq)

    def _commit(self, event: events.GroupCommit) -> None:
        group = self._state.group(event.group)
        prompt = self._state.prompt_in(group, self._state.sequence(event.seq).prompt.id)
        self._state.count_work(event.blocks)
        for position in range(event.first, event.first + event.blocks):
            place = group.index, name_of(prompt, group, position)
            self._named.add((POOL, place))
            if self._plans:
                self._planned.setdefault(event.seq, set()).add(place)
                if event.seq not in self._new:
                    self._uncomputed.discard(place)
                elif place[1] not in self._state.names[place[0]]:
                    self._uncomputed.add(place)
            elif (below := self._takes(POOL, "through")) is not None:
                self._owed.add((below, place))

    def _free(self, event: events.GroupFree) -> None:
        if event.reason == "close":
            self._planned.pop(event.seq, None)

    def _evict(self, event: events.GroupEvict) -> None:
        for block in self._state.ids(event.runs):
            victim = self._state.blocks.get(block)
            if victim is not None:
                place = event.group, victim.name
                self._leaving.discard((POOL, place))
                if (below := self._takes(POOL, "evict")) is not None:
                    self._must_be_in(self._tiers.levels[below], place)

    # The tiers.

    def _offload(self, event: events.Offload) -> None:
        tier, places = self._tiers.tier(event.tier), self._state.places(event)
        source = event.source or POOL
        if source != (tier.above or POOL) or event.parked:
            violated(f"tier {tier.name!r} takes blocks from {tier.above or POOL!r}, {source!r}")
        used = tier.used + len(places)
        if used > tier.record.slots:
            violated(f"{used} slots of tier {tier.name!r} would be in use")
        goes_on, self._writing = self._writing == (tier.name, source), (tier.name, source)
        # The runs of blocks that go down together wait for each other.
        if self._exact and not goes_on and tier.free_at - event.t > max_wait(tier):
            violated(f"the link of tier {tier.name!r} is busy for longer than it may be")
        self._making_room.discard(tier.name)
        self._taken[tier.name] += len(places)
        write = tier.record.options.get("write")
        for place in places:
            there = place[1] in self._state.names[place[0]]
            if source != POOL:
                there = place in self._tiers.places[source]
            if not there or place in self._tiers.places[tier.name]:
                violated(
                    f"block {place[1]!r} is not in {source!r}, or in {tier.name!r} already"
                )
            moved = source, place
            if write == "evict":
                self._leaving.add(moved)
            else:
                self._must_go_down(source, place, through=write == "through")
            self._named.add((tier.name, place))
            if (below := self._takes(tier.name, "through")) is not None:
                self._owed.add((below, place))
        must_be_done(event, tier, write=True, exact=self._exact)

    def _must_go_down(self, source: str, place: Place, *, through: bool) -> None:
        """Check that a block was stored or hit in this call, or named by a plan before."""
        planned = self._planned.values() if through and source == POOL else ()
        self._state.count_work(len(planned))
        if source == POOL and place in self._uncomputed:
            violated(f"block {place[1]!r} is not computed yet")
        if (source, place) not in (self._named if through else self._hits) and not any(
            place in places for places in planned
        ):
            violated(f"block {place[1]!r} was not stored or hit in {source!r} before this")

    def _drop(self, event: events.Discard) -> None:
        tier, places = self._tiers.tier(event.tier), self._state.places(event)
        held = self._tiers.held[tier.name]
        for place in places:
            if place not in self._tiers.places[tier.name] or held[place] > 0:
                violated(f"block {place[1]!r} is not in {tier.name!r}, or is being loaded")
            moved = tier.name, place
            self._leaving.discard(moved)
            below = self._takes(tier.name, "evict")
            if below is not None and event.reason == "capacity":
                self._must_be_in(self._tiers.levels[below], place)
            if event.reason == "moved" and moved not in self._loaded:
                violated(f"block {place[1]!r} was not loaded from {tier.name!r} before this")
        if event.reason == "moved":
            if tier.record.options.get("keep") != "exclusive":
                violated(f"tier {tier.name!r} keeps what was loaded")
        elif event.reason != "capacity":
            violated(f"blocks of cache groups leave no tier as {event.reason!r}")
        else:
            self._making_room.add(tier.name)
            self._dropped.update((tier.name, place) for place in places)

    def _load_start(self, event: events.LoadStart) -> None:
        tier, seq = self._tiers.tier(event.tier), self._state.sequence(event.seq)
        if event.seq != self._admitted or event.request != seq.prompt.id:
            violated(f"sequence {seq.id} of request {seq.prompt.id!r} is not admitted here")
        starts = self._tiers.loads.get(seq.id)
        if starts is None:
            self._missing = self._begin(event, seq)
        elif starts[0].hit != event.hit or not self._missing:
            violated(f"sequence {seq.id} loads all that it lacks at once")
        for place in self._state.places(event):
            if place not in self._missing or self._tiers.has(place) != tier.name:
                violated(f"block {place[1]!r} is not to be loaded from {tier.name!r}")
            self._missing.remove(place)
            self._hits.add((tier.name, place))
        must_be_done(event, tier, write=False, exact=self._exact)

    def _begin(self, event: events.LoadStart, seq: GroupedSequence) -> set[Place]:
        """Return the blocks that a load must have, whose first line this is."""
        state = self._state
        if not isinstance(event.hit, int):
            violated("LOAD_START has no field 'hit', and HEADER has cache groups")
        size, limit = state.header.block_size, state.limit(seq.prompt.id)
        tokens = event.hit * size
        if not seq.resumed and tokens != state.reach(seq.prompt.id, limit):
            violated(f"pool and tiers have not {event.hit} blocks of request {seq.prompt.id!r}")
        if event.hit <= seq.hit:
            violated(f"sequence {seq.id} has {seq.hit} blocks without a load")
        names = state.names
        needed = (place for _, place in state.needed(seq.prompt.id, tokens))
        return {place for place in needed if place[1] not in names[place[0]]}

    def _load(self, event: events.Load) -> None:
        waiting = self._tiers.loads.get(event.seq)
        if not waiting:
            violated(f"sequence {event.seq} has no LOAD_START before this")
        start = waiting[0]
        fields = ("tier", "request", "group", "first", "blocks", "hit")
        if any(getattr(event, field) != getattr(start, field) for field in fields):
            violated(f"sequence {event.seq} loads {start.first} from {start.tier!r} next")
        done = max(each.done for each in waiting)
        if self._exact and event.t < done:
            violated(f"what sequence {event.seq} loads is there at {done} ns")
        self._arriving = event.seq
        self._new.discard(event.seq)
        self._loaded.update((event.tier, place) for place in self._state.places(event))
