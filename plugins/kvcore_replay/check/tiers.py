"""The check of the tier lines of a trace.

Between two lines of the pool stand those of tiers, in the order in which they happen:

    EVICT of the pool, COMMIT, HIT        the reason that blocks go down, by `write` of a tier
    DROP capacity, OFFLOAD                blocks that make room, and blocks that need it
    PREEMPT swap, OFFLOAD parked, FREE    a sequence that rests in a tier
    LOAD_START after an admission,        blocks that come up
    LOAD, its DROP lines, COMMIT

The blocks in a tier follow from OFFLOAD and DROP alone, and `done` from the queue of its link.

A line is checked before the accounts of pool and tiers have taken it, so that they still have
what was there before. Lines of one time are those of one call. Some lines demand others, and
what they demand is kept in an attribute until it comes:

    of these lines          demands                                     attribute
    EVICT, COMMIT           allows OFFLOAD of the blocks                _evicted, _committed
    COMMIT of what a plan   allows OFFLOAD of the blocks once they are  _plans
    shares                  computed, and none before
    PREEMPT swap            OFFLOAD parked, FREE                        _swap
    HIT, MISS, PREFETCH     allows loads of the sequence                _admitted
    the first of its loads  the others, then COMMIT                     _arriving, _owed
    LOAD                    allows DROP moved of its blocks             _loaded
    DROP capacity           OFFLOAD into the tier, which needs the room _needs_offload
    OFFLOAD of a tier       DROP of what it has copied down             _needs_drop
    OFFLOAD for a load      LOAD_START                                  _load_due
    OFFLOAD after hits      HIT at the same time                        _due_hit

Positions are those of blocks, ranges `[first, end)`, times ns; ids of sequences begin at 1.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore.trace import events
from kvcore.trace.events import methods_by_event, violated
from kvcore_replay.check.base import expires, of_own
from kvcore_replay.check.pool import CachedKeys
from kvcore_replay.state.cache import TIERED, CacheState, TracedSequence
from kvcore_replay.state.layout import TracedPrompt
from kvcore_replay.state.lifecycle import Lifecycles
from kvcore_replay.state.tiers import TracedTier, TracedTiers

BEFORE_COMMIT = frozenset({"COMMIT", "SPLIT", "FREE", "EVICT", "OFFLOAD", "DROP"})
"""Events between a load and the last commit of the loaded blocks."""

FAULTS = ("corrupt", "gone", "failed")
"""Reasons of DROP of a run on tensors. No other run moves bytes, so none else has them."""


ANY = object()
"""Stands for any request."""


@attrs.define
class _Swap:
    """A preempted sequence that is to be parked in a tier, and then closed.

    Attributes:
        seq, request: the sequence, and its request.
        parked: whether its own blocks are parked.
        tier: the tier to which its shared blocks went down; None: none has gone.
    """

    seq: int
    request: int | str
    parked: bool = False
    tier: TracedTier | None = None


class _Plans:
    """The blocks that plans have shared: they go down when they are computed.

    Args:
        header: that of the trace.

    Attributes:
        planned: by sequence its keys, and the end of the blocks that it shared last, which can
            go down later; empty where no plan shares blocks.
    """

    def __init__(self, header: events.Header) -> None:
        caps, self.planned = header.batching or {}, dict[int, tuple[list[Any], int]]()
        self._share = caps.get("commit") == "scheduled" or "rules" in header.plugins
        # Sequences that were admitted at this time, and of the blocks that these have committed
        # since, which no step has computed: keys, and the first one.
        self._new: set[int] = set()
        self._uncomputed: list[tuple[list[Any], int]] = []

    def advance(self) -> None:
        """Note that time passes: what was planned may be computed."""
        self._new.clear()
        self._uncomputed.clear()

    def admit(self, seq: int) -> None:
        """Note that a sequence is admitted."""
        if self._share:
            self._new.add(seq)

    def load(self, seq: int) -> None:
        """Note that a sequence has loaded blocks, which are not to be computed."""
        self._new.discard(seq)

    def commit(self, seq: int, keys: list[Any], first: int, end: int) -> None:
        """Note that a sequence shares its blocks from `first` to `end`."""
        if self._share:
            self.planned[seq] = keys, end
        if seq in self._new:
            self._uncomputed.append((keys, first))

    def must_be_computed(self, prompt: TracedPrompt, end: int, ratio: int) -> int:
        """Check that no block of a prompt before `end` is still to be computed. Return work."""
        for keys, first in self._uncomputed:
            key = slice(first // ratio, first // ratio + 1)
            if first < end and keys[key] == prompt.keys[key]:
                violated(f"block {first} of request {prompt.id!r} is not computed yet")
        return len(self._uncomputed) + len(self.planned)

    def have(self, keys: list[Any], end: int, ratio: int) -> bool:
        """Return True if a plan may have shared the blocks before `end`."""
        last = slice((end - 1) // ratio, (end - 1) // ratio + 1)
        return any(
            end <= upto and known[last] == keys[last] for known, upto in self.planned.values()
        )


class TierChecker:
    """Checks the lines of tiers, and the lines of the pool that must come before or after.

    Args:
        tiers: the tiers.
        state, cached, lifecycles: the accounts of the pool above them, of the keys in it, and
            of the requests.
    """

    def __init__(
        self,
        tiers: TracedTiers,
        state: CacheState,
        cached: CachedKeys,
        lifecycles: Lifecycles,
    ) -> None:
        self._state, self._tiers, self._cached = state, tiers, cached
        self._lifecycles, header = lifecycles, state.header
        # Whether the pool is sure to store computed blocks.
        prefix = header.plugins.get("prefix")
        self._shares = prefix is not None and of_own("prefix", prefix.name, "shares")
        self._moves_bytes = header.executor == "run"
        # By the wall clock a transfer takes as long as it takes.
        self._exact = header.mode != "wall"
        self._ratio = state.layout.ratio
        # What makes blocks of the pool go down into the nearest tier: `evict`, `through`, or
        # after how many hits.
        self._rule = next(iter(tiers.levels.values())).record.options.get("write")
        # The blocks of the last line of the pool, if that is EVICT, or if it is COMMIT: keys,
        # and the end of the blocks.
        self._evicted: tuple[list[Any], int] | None = None
        self._committed: tuple[list[Any], int] | None = None
        self._plans = _Plans(header)
        # From PREEMPT to the next line of the pool.
        self._swap: _Swap | None = None
        # The sequence that was just admitted, and the one with some of its loads done.
        self._admitted = self._arriving = -1
        # Of the latter, the end of its blocks that are there without a gap: those that the pool
        # has cached at first, then those that were loaded too.
        self._come = 0
        # The last load: its tier, keys, and the end of its blocks.
        self._loaded: tuple[TracedTier, list[Any], int] | None = None
        # The sequence that must commit loaded blocks, and their end.
        self._owed: tuple[int, int] | None = None
        # Whether the time of this line is later than that of the line before.
        self._is_later = False
        # Sequences that load ahead of a request, and the end of their loaded blocks; the times
        # at which requests were announced so.
        self._ahead: dict[int, int] = {}
        self._announced: dict[int | str, int] = {}
        # Tiers that have dropped blocks to make room for an OFFLOAD into them that is due.
        self._needs_offload: set[str] = set()
        # Tiers that have copied blocks farther down, whose DROP is due.
        self._needs_drop: set[str] = set()
        # Tiers into which blocks were stored since the last line of the pool, or later time.
        self._stored_into: set[str] = set()
        # Whether blocks went down to make room for a load, whose LOAD_START is due.
        self._load_due = False
        # Whether RECOVER lines may come: no other event has so far.
        self._only_recovered = True
        # The request that must hit at the time of the line before, or ANY.
        self._due_hit: Any = None
        self._checks = methods_by_event(self, *TIERED)

    def stores_before_close(self, seq: int) -> bool:
        """Return True if blocks of `seq`, which is about to close, may go down before.

        It is to be parked, or was the last to compute what a plan has shared.
        """
        return self._swap is not None or seq in self._plans.planned

    @property
    def _by_hits(self) -> bool:
        """Whether blocks of the pool go down after a number of hits."""
        return type(self._rule) is int

    def check(self, event: Any, *, begins: bool) -> bool:
        """Check the next event; return True if it is of a tier.

        Args:
            event: the event.
            begins: whether its time is not that of the line before, so that a call begins.

        Raises:
            ViolationError: it contradicts what came before.
        """
        self._is_later = begins
        if begins:
            self._plans.advance()
        if self._only_recovered and event.event != "RECOVER":
            self._must_be_recovered()
        if self._owed is not None:
            self._must_commit(event)
        check = self._checks.get(event.event)
        if check is None:
            self._between(event)
            return False
        if begins:
            self._stored_into.clear()
            unfinished = self._needs_offload or self._needs_drop or self._load_due
            hit_is_due = self._due_hit is not None
            if unfinished or hit_is_due or self._swap or self._arriving > 0:
                violated("it is of one call with the line before, which was earlier")
        check(event)
        return True

    # The lines of the pool.

    def _between(self, event: Any) -> None:  # noqa: C901 - a line, from top to bottom
        """Check that a line of the pool may stand here, and record its effects."""
        name, seq = event.event, getattr(event, "seq", -1)
        self._must_be_settled(event)
        if seq in self._tiers.loads:
            violated(f"sequence {seq} waits for what it loads")
        self._stored_into.clear()
        self._swap = self._evicted = self._committed = self._loaded = None
        if name in ("HIT", "MISS", "PREFETCH"):
            self._admitted = seq
            self._plans.admit(seq)
        elif name != "ALLOC" and not (name == "EVICT" and self._admitted in self._ahead):
            self._admitted = -1
        if name == "PREFETCH":
            self._ahead[seq] = event.blocks
            self._announced[event.request] = event.t
        elif seq in self._ahead:
            self._must_be_ahead(event)
        if name == "EVICT":
            if event.scope == "cache" and event.reason == "capacity":
                span = self._state.span(event.span)
                self._evicted = span.keys, span.end
        elif name == "COMMIT":
            prompt = self._state.sequence(seq).prompt
            if seq not in self._ahead:
                self._must_not_rest(prompt.id)
            if event.how in ("new", "grown"):
                self._committed = keys, end = prompt.keys, event.first + event.blocks
                self._plans.commit(seq, keys, event.first, end)
        elif name == "FINISH":
            self._must_not_rest(event.request)
        elif name == "PREEMPT" and event.how == "swap":
            self._swap = _Swap(event.seq, event.request)

    def _must_be_ahead(self, event: Any) -> None:
        """Check that a sequence ahead of its request loads, commits that, and closes."""
        allowed = event.event in ("ALLOC", "COMMIT", "FREE")
        if event.event == "ALLOC":
            seq = self._state.sequence(event.seq)
            allowed = self._admitted == seq.id and not seq.private
        elif event.event == "COMMIT":
            allowed = event.first + event.blocks <= self._ahead[event.seq]
        if not allowed:
            violated(f"sequence {event.seq} is there to load blocks before a request arrives")

    def arrive(self, event: events.Request, known: TracedPrompt) -> None:
        """Check that an arriving request has the prompt that was prefetched for it.

        Raises:
            ViolationError: it has not, or not so early, or it has another prompt.
        """
        early = event.hints.get("prefetch") if event.hints else None
        asks_at = self._announced.get(event.id)
        if asks_at is None or type(early) is not int or asks_at < event.t - early:
            violated(f"request {event.id!r} has not asked for a prefetch at {asks_at} ns")
        keys = self._state.layout.prompt(event).keys
        if keys[: len(known.keys)] != known.keys:
            violated(f"request {event.id!r} has other keys than its PREFETCH")

    def close(self, seq: int) -> bool:
        """Record that `seq` closes; return True if it was ahead of its request."""
        self._plans.planned.pop(seq, None)
        return self._ahead.pop(seq, None) is not None

    def _must_be_settled(self, event: Any) -> None:
        """Check that all lines that the lines of tiers call for have come."""
        if self._needs_offload:
            violated(
                f"tier {min(self._needs_offload)!r} dropped blocks to make room for nothing"
            )
        if self._needs_drop:
            violated(f"tier {min(self._needs_drop)!r} keeps what was written below to evict it")
        if self._load_due:
            violated("blocks were offloaded for a load that must come here")
        if self._arriving > 0:
            violated(f"sequence {self._arriving} waits for a load that is done")
        if self._swap is not None and not self._swap.parked:
            violated(f"sequence {self._swap.seq} is swapped out, and parked nowhere")
        if self._due_hit is not None:
            hits = event.event == "HIT" and self._due_hit in (ANY, event.request)
            if self._is_later or not hits:
                violated("blocks were offloaded for a hit that must come here")
            self._due_hit = None

    def _must_commit(self, event: Any) -> None:
        """Check that loaded blocks are committed before anything else happens."""
        assert self._owed is not None
        seq, upto = self._owed
        if self._state.sequence(seq).span.end >= upto:
            self._owed = None
        elif self._is_later or event.event not in BEFORE_COMMIT:
            violated(f"sequence {seq} has loaded blocks up to {upto}, and must commit them")

    def _must_not_rest(self, request: int | str) -> None:
        for tier in self._tiers.levels.values():
            if request in tier.parked:
                violated(f"request {request!r} has parked blocks in {tier.name!r} still")

    def _must_be_recovered(self) -> None:
        """Check that RECOVER lines name as many blocks as HEADER."""
        self._only_recovered = False
        for name, tier in self._tiers.levels.items():
            if tier.recovered != tier.record.recovered:
                violated(
                    f"tier {name!r} had {tier.record.recovered} blocks from an earlier run by "
                    f"HEADER, and {tier.recovered} by RECOVER"
                )

    # The lines of tiers.

    def _recover(self, event: events.Recover) -> None:
        tier, end = self._tiers.tier(event.tier), event.first + event.blocks
        if self._is_later or not (self._only_recovered and self._moves_bytes):
            violated("only a run on tensors finds blocks of an earlier one, before all else")
        if tier.used + event.blocks > tier.record.slots:
            violated(f"tier {tier.name!r} has {tier.record.slots} slots")
        if len(event.keys) != -(-end // self._ratio):
            violated(f"{end} blocks have not {len(event.keys)} keys")

    def _offload(self, event: events.Offload) -> None:
        tier, prompt = self._tiers.tier(event.tier), self._state.prompt(event.request)
        end = event.first + event.blocks
        source, swap = event.source or None, self._swap
        # Swapped blocks come from the pool, whatever the tier, and all go to the same one.
        swaps = swap is not None and source is None and swap.tier in (None, tier)
        if (source != tier.above or (event.parked and source)) and not swaps:
            above = repr(tier.above) if tier.above else "the pool"
            violated(f"tier {tier.name!r} takes blocks from {above}")
        used, slots = tier.used + event.blocks, tier.record.slots
        if used > slots:
            violated(f"{used} slots of tier {tier.name!r} would be in use; it has {slots}")
        if tier.name in self._needs_offload and used < slots:
            violated(f"tier {tier.name!r} dropped {slots - used} more blocks than were missing")
        self._needs_offload.discard(tier.name)
        if event.parked:
            self._park(event, tier, end)
        else:
            if self._exact and tier.free_at - event.t > max_wait(tier):
                violated(f"the link of tier {tier.name!r} is busy for longer than it may be")
            if source is None:
                self._must_be_in_pool(event, prompt, end)
            else:
                self._must_come_down(self._tiers.tier(source), tier, prompt, end)
                if self._is_later:
                    self._expect_hit()
            self._stored_into.add(tier.name)
        must_be_done(event, tier, write=True, exact=self._exact)

    def _must_be_in_pool(self, event: events.Offload, prompt: TracedPrompt, end: int) -> None:
        """Check that blocks are in the pool, or have just left it, and go down by the rule."""
        keys, last = prompt.keys, (end - 1) // self._ratio
        if last >= len(keys):
            violated(f"request {prompt.id!r} has {len(keys)} keys: none for block {end - 1}")
        self._state.count_work(self._plans.must_be_computed(prompt, end, self._ratio))
        here, leaves = self._cached.match(keys), self._rule == "evict" or self._swap is not None
        reason = self._evicted if leaves else self._committed
        led = reason is not None and end <= reason[1] and reason[0][last] == keys[last]
        if here < end and not (leaves and led):
            violated(f"{here} blocks of request {prompt.id!r} are cached, not {end}")
        if self._swap is not None:
            seq = self._state.sequence(self._swap.seq)
            shares = end <= seq.span.end and seq.prompt.keys[last] == keys[last]
            if self._swap.parked or not shares:
                violated("only what the swapped sequence shares goes down with it")
            self._swap.tier = self._tiers.tier(event.tier)
        elif self._by_hits:
            if self._is_later:
                self._expect_hit()
            self._due_hit = event.request
        elif (self._is_later or not led) and not (
            self._rule == "through" and self._plans.have(keys, end, self._ratio)
        ):
            violated("nothing was evicted or stored just before that goes down")

    def _must_come_down(
        self, above: TracedTier, tier: TracedTier, prompt: TracedPrompt, end: int
    ) -> None:
        """Check that blocks are in the tier `above`, and go down from there by the rule."""
        if above.directory.match(prompt.keys) < end:
            violated(f"tier {above.name!r} has not the blocks up to {end}")
        rule = tier.record.options.get("write")
        if rule == "evict":
            self._needs_drop.add(above.name)
        elif rule == "through":
            if above.name not in self._stored_into:
                violated(f"nothing was stored just before in tier {above.name!r}")
        elif self._admitted < 0:
            violated(f"nothing is loaded here from tier {above.name!r}")
        else:
            self._load_due = True

    def _expect_hit(self) -> None:
        """Record that a call begins with this line, which makes room for what goes down.

        It must be an admission that hits, or the end of a step that a plan has shared.
        """
        if self._by_hits:
            if self._due_hit is None:
                self._due_hit = ANY
        elif self._rule != "through" or not self._plans.planned:
            violated("nothing was evicted or stored just before that goes down")

    def _park(self, event: events.Offload, tier: TracedTier, end: int) -> None:
        swap = self._swap
        if swap is None or swap.parked or event.request != swap.request:
            violated(f"request {event.request!r} is not swapped out here")
        self._must_not_rest(event.request)
        seq = self._state.sequence(swap.seq)
        # A prompt may end within a key; generated blocks that follow it there are not shared.
        shared = min(seq.span.end, seq.prompt.cacheable)
        shared = min(tier.directory.match(seq.prompt.keys), shared)
        if event.first != shared or not shared < end <= seq.blocks:
            violated(
                f"sequence {seq.id} has {seq.blocks} blocks; {shared} of them are shared, and "
                f"in tier {tier.name!r}"
            )
        swap.parked = True

    def _load_start(self, event: events.LoadStart) -> None:
        seq, tier = self._state.sequence(event.seq), self._tiers.tier(event.tier)
        prompt, end = seq.prompt, event.first + event.blocks
        if self._is_later or event.seq != self._admitted:
            violated(f"sequence {seq.id} is not admitted here: it loads nothing")
        if event.request != prompt.id:
            violated(f"sequence {seq.id} is of request {prompt.id!r}")
        before = self._tiers.loads.get(seq.id, [])
        first = before[-1].first + before[-1].blocks if before else seq.span.end
        if event.first != first or end > seq.blocks:
            violated(f"sequence {seq.id} has {seq.blocks} blocks, {first} of them already")
        self._load_due = False
        names = list(self._tiers.levels)
        if before and names.index(before[-1].tier) >= names.index(tier.name):
            violated(f"tier {tier.name!r} is not asked after {before[-1].tier!r}")
        if tier.record.options.get("load") == "never":
            violated(f"nothing is loaded from tier {tier.name!r}")
        self._must_hold(seq, tier, end, alone=not before)
        must_be_done(event, tier, write=False, exact=self._exact)

    def _must_hold(
        self, seq: TracedSequence, tier: TracedTier, end: int, *, alone: bool
    ) -> None:
        """Check that the blocks of `seq` up to `end` are in a tier."""
        prompt = seq.prompt
        here = tier.directory.match(prompt.keys)
        for other in self._tiers.levels.values():
            parked = other.parked.get(prompt.id)
            if parked is not None:
                if other is not tier or not alone or end != parked[1] or here < parked[0]:
                    violated(f"request {prompt.id!r} has parked {parked} in {other.name!r}")
                return
        limit = prompt.cacheable if seq.resumed else prompt.limit
        if end > min(here, limit):
            violated(f"{here} blocks of request {prompt.id!r} are in tier {tier.name!r}")

    def _load(self, event: events.Load) -> None:
        seq, tier = self._state.sequence(event.seq), self._tiers.tier(event.tier)
        if self._arriving not in (-1, event.seq):
            violated(f"sequence {self._arriving} waits for a load that is done")
        waiting = self._tiers.loads.get(event.seq)
        if not waiting:
            violated(f"sequence {event.seq} has no LOAD_START before this")
        start = waiting[0]
        told = event.tier, event.request, event.first
        if told != (start.tier, start.request, start.first):
            violated(f"sequence {event.seq} loads {start.first} from {start.tier!r} next")
        done = max(load.done for load in waiting)
        if self._exact and event.t < done:
            violated(f"what sequence {event.seq} loads is there at {done} ns")
        # Blocks after a part that is not whole are of no use.
        complete = self._arriving == -1 or self._come == start.first
        useful = start.blocks if complete else 0
        if event.blocks > useful or (event.blocks < useful and not self._moves_bytes):
            violated(f"{useful} blocks are loaded, not {event.blocks}")
        end = event.first + event.blocks
        self._loaded = tier, seq.prompt.keys, end
        self._plans.load(event.seq)
        if complete:
            self._come = end
        self._arriving = event.seq if len(waiting) > 1 else -1
        # The last block of a parked sequence may have room for more tokens.
        parked = seq.prompt.id in tier.parked
        # Under a retention policy, blocks of an output with keys may be private (`reads_all`).
        ahead = seq.id in self._ahead  # of a path alone: it has no output
        retained = not ahead and "retention" in self._state.header.plugins
        known = seq.prompt.lookup if retained else seq.prompt.cacheable
        upto = min(self._come - parked, known)
        if seq.prompt.share is not None:
            upto = min(upto, seq.prompt.share)
        if self._arriving == -1 and ahead:
            self._ahead[seq.id] = upto
        if self._arriving == -1 and self._shares and upto > seq.span.end:
            self._owed = seq.id, upto

    def _drop(self, event: events.Discard) -> None:
        tier, prompt = self._tiers.tier(event.tier), self._state.prompt(event.request)
        reason, end = event.reason, event.first + event.blocks
        if reason == "parked":
            if self._is_later or self._swap is not None or self._lifecycles.waits(prompt.id):
                violated(f"request {prompt.id!r} still waits for what it has parked")
            return
        self._must_be_free(tier, prompt, event.first)
        if reason in FAULTS:
            if not self._moves_bytes:
                violated(f"no bytes are moved here, so none are {reason}")
            return
        if reason == "moved":
            self._must_be_loaded(tier, prompt, end)
            return
        if reason == "expired":
            policy = str(tier.record.options.get("eviction")).partition(":")[0]
            if not expires(policy):
                violated(f"the eviction policy of tier {tier.name!r} expires nothing")
        if self._is_later:
            self._expect_hit()
        if reason == "capacity":
            self._needs_offload.add(tier.name)
            self._needs_drop.discard(tier.name)

    def _must_be_loaded(self, tier: TracedTier, prompt: TracedPrompt, end: int) -> None:
        """Check that a tier that keeps no loaded blocks has just loaded these."""
        loaded, last = self._loaded, (end - 1) // self._ratio
        exclusive = tier.record.options.get("keep") == "exclusive"
        if self._is_later or loaded is None or loaded[0] is not tier or not exclusive:
            violated(f"nothing was loaded just before from an exclusive {tier.name!r}")
        if end > loaded[2] or loaded[1][last] != prompt.keys[last]:
            violated(f"block {end - 1} is not of what was loaded")

    def _must_be_free(self, tier: TracedTier, prompt: TracedPrompt, first: int) -> None:
        """Check that no transfer and no parked sequence needs a block of a prompt.

        A parked sequence needs its shared blocks: the others have slots of their own.
        """
        index = first // self._ratio
        needed = [
            (start.request, start.first + start.blocks)
            for loads in self._tiers.loads.values()
            for start in loads
            if start.tier == tier.name and start.request not in tier.parked
        ]
        needed += [(request, parked) for request, (parked, _) in tier.parked.items()]
        self._state.count_work(len(needed))
        for request, upto in needed:
            keys = self._state.prompt(request).keys
            if first < upto and index < len(keys) and keys[index] == prompt.keys[index]:
                violated(f"request {request!r} needs block {first} in tier {tier.name!r}")


def max_wait(tier: TracedTier) -> int:
    """Return the ns that a store may wait in the queue."""
    wait = tier.record.options.get("max_wait")
    return round(wait * 10**9) if type(wait) in (int, float) else 0  # type: ignore[operator]


def must_be_done(
    event: events.Offload | events.LoadStart, tier: TracedTier, *, write: bool, exact: bool
) -> None:
    """Check the end of a transfer, by its turn on the link and its bytes.

    Where times are not `exact`, those of a wall clock, it need only not be in the past.
    """
    done = tier.done_at(tier.size_of(event), event.t, write=write)
    if event.done != done if exact else event.done < event.t:
        violated(f"by the link of tier {tier.name!r} it is done at {done} ns")
