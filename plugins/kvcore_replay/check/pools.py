"""The check of the trace of a cache with a pool for each kind of layer.

Spans, tables and pins of full attention are checked as those of any server. Beside them, of the
pools of windows and of states:

    HIT, MISS     hit up to the last position that full attention has and no pool lacks
    KEEP          after the COMMITs of a call; each tombstone among them gets what there is
    TOMBSTONE,    only while slots are missing, of the span used longest ago that no sequence
    EVICT         needs; EVICT of a leaf, TOMBSTONE of any other span
    FREE passed   what the window has passed, once

Slots are missing after an ALLOC (windows), before an admission and before the COMMITs of a
chunk (states). The lines that free them stand there, before any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Any

from msgspec import UNSET

from kvcore.trace import events
from kvcore.trace.events import POOL_EVENTS, methods_by_event, violated
from kvcore_replay.check.server import TraceChecker
from kvcore_replay.state.cache import TracedSequence, TracedSpan, path
from kvcore_replay.state.layout import TracedPrompt
from kvcore_replay.state.pools import STATES, PoolState


class Uses:
    """The spans with slots in one pool, by their last use, and those that sequences need.

    Spans of one use are in the order of their positions.
    """

    def __init__(self, kept: set[TracedSpan], *, splits: bool) -> None:
        """Start without a use. `splits`: the upper half of a span has what the span had."""
        self.needed: Counter[TracedSpan] = Counter()
        self._kept, self._splits = kept, splits
        self._last: dict[TracedSpan, int] = {}
        self._clock = 0
        self._oldest: list[tuple[int, int, int, TracedSpan]] = []

    def use(self, spans: Iterable[TracedSpan]) -> None:
        """Make those of `spans` that are no tombstones the most recent ones."""
        self._clock += 1
        for span in spans:
            if span in self._kept:
                self._last[span] = self._clock
                self._push(span)

    def release(self, span: TracedSpan) -> None:
        """Record that one sequence fewer needs a span."""
        self.needed[span] -= 1
        if not self.needed[span]:
            del self.needed[span]

    def split(self, upper: TracedSpan, lower: TracedSpan) -> None:
        """Record that the first blocks of `lower` have moved to `upper`."""
        if self._splits and lower in self.needed:
            self.needed[upper] = self.needed[lower]
        for span in (upper, lower):
            if span in self._kept:
                self._last[span] = self._last[lower]
                self._push(span)

    def older(self, victim: TracedSpan) -> set[TracedSpan]:
        """Return the spans used before `victim` that no sequence needs."""
        heap, seen = self._oldest, []
        while heap:
            clock, start, _, span = entry = heappop(heap)
            if span in self._kept and self._last[span] == clock and span.start == start:
                seen.append(entry)
                if span is victim:
                    break
        for entry in seen:
            heappush(heap, entry)
        return {span for _, _, _, span in seen[:-1] if not self.needed[span]}

    def _push(self, span: TracedSpan) -> None:
        if len(self._oldest) > 64 + 4 * len(self._kept):
            last = {kept: use for kept, use in self._last.items() if kept in self._kept}
            self._last = last
            self._oldest = [(use, kept.start, kept.id, kept) for kept, use in last.items()]
            heapify(self._oldest)
        heappush(self._oldest, (self._last[span], span.start, span.id, span))


class PoolChecker(TraceChecker):
    """Checks each event against the state before it, then applies it."""

    state: PoolState

    def __init__(self, header: events.Header) -> None:
        """Start with the empty pools that HEADER gives.

        Raises:
            ValueError: the sizes do not fit one another.
        """
        super().__init__(header, PoolState(header))
        self._checks |= methods_by_event(self, *POOL_EVENTS)
        self._evicting_pools = kept = self.state.kept
        self._uses = {pool: Uses(kept[pool], splits=pool == "window") for pool in kept}
        # By open sequence, the span at which it resumes, and where the windows begin that it
        # needs for that; by request, its sequence.
        self._held: dict[int, tuple[TracedSpan, int]] = {}
        self._of_request: dict[int | str, int] = {}
        # The sequence whose KEEP is due, and the first block that it has shared in this call;
        # the sequence for whose KEEP a state slot was evicted.
        self._sharing: tuple[int, int] | None = None
        self._claim: int | None = None
        # The request that lacks window slots; the sequence that has to end, since it has given
        # a state slot of its own; and that of the last line, if that is a KEEP.
        self._lacking: int | str | None = None
        self._ending: int | None = None
        self._last_keep: tuple[int, int] | None = None
        # The line that is due after a KEEP.
        self._closing: tuple[str, int, str | None] | None = None
        # Whether a client may pin a prompt, which no line but its REQUEST says.
        self._clients_pin = False
        # The sequence that the current line closes.
        self._ends: TracedSequence | None = None
        self._record: dict[str, Callable[[Any], None]] = {
            **dict.fromkeys(("HIT", "MISS"), self._opened),
            "SPLIT": self._halved,
            "COMMIT": self._shared,
            "KEEP": self._kept_by,
            "FREE": self._closed,
        }
        # The request for whose admission states were evicted, and states that were spared,
        # which it is to hit.
        self._admitting: int | str | None = None
        self._spared: set[TracedSpan] = set()

    def apply(self, event: Any) -> None:
        """Check the next event after HEADER, and apply it. O(spans touched), blocks in C.

        Raises:
            ViolationError: the event contradicts what came before.
        """
        name = event.event
        evicts = name == "TOMBSTONE"
        evicts |= name == "EVICT" and event.scope == "cache" and event.by in self._uses
        self._must_go_on(event, evicts=evicts, begins=event.t != self._now)
        due = self._next
        if name in ("SPLIT", "COMMIT") and due is not None and due[2] == "close":
            # Output with keys is shared as the sequence closes.
            self._closing, self._next, self._claim = due, None, due[1]
        self._ends = None
        super().apply(event)
        self._last_keep = (event.seq, event.t) if name == "KEEP" else None
        record = self._record.get(name)
        if record is not None:
            record(event)
        if self.state.free_slots.get("window", 0) >= 0:
            self._lacking = None
        elif name == "ALLOC":
            self._lacking = self.state.sequences[event.seq].prompt.id

    def cached_tokens(self, request: events.Request) -> int:
        """Return the number of tokens of a prompt that would hit now. At most O(spans²)."""
        state, prompt = self.state, self.state.layout.prompt(request)
        return state.resumable(*state.match(prompt.keys, prompt.limit)) * self._size

    def report(self) -> dict[str, Any]:
        """Return the state, and counts, as fields of a `Report`."""
        state = self.state
        return super().report() | {
            "pools": [
                {
                    "pool": pool,
                    "slots": slots,
                    "free": state.free_slots[pool],
                    "cached": sum(state.slots_of(pool, span) for span in state.kept[pool]),
                }
                for pool, slots in state.slots.items()
            ]
        }

    # The order of lines.

    def _must_go_on(self, event: Any, *, evicts: bool, begins: bool) -> None:
        """Check that a call goes on in which a line is due."""
        name, seq = event.event, getattr(event, "seq", None)
        if self._ending is not None:
            if begins or seq != self._ending or name not in ("FINISH", "PREEMPT", "FREE"):
                violated(f"state slots are missing: sequence {self._ending} has none left")
            self._ending = None
        if self._lacking is not None:
            pool = event.by if name == "EVICT" else getattr(event, "pool", None)
            if begins or not evicts or pool != "window" or event.requester != self._lacking:
                missing = -self.state.free_slots["window"]
                violated(f"{missing} window slots of request {self._lacking!r} are missing")
        if self._admitting is not None:
            whose = getattr(event, "request" if name in ("HIT", "MISS") else "requester", None)
            if begins or (name != "SPLIT" and whose != self._admitting):
                violated(
                    f"states were evicted for request {self._admitting!r}, which needs none"
                )
        due, spans = self._sharing, ("COMMIT", "SPLIT", "KEEP")
        if due is not None or self._claim is not None:
            owner = self._claim if due is None else due[0]
            goes_on = name in spans or (name == "FREE" and event.reason == "duplicate")
            if due is None:
                goes_on = goes_on or evicts
            if begins or not goes_on or seq not in (owner, None):
                violated(f"KEEP of sequence {owner} must come before this")

    # Admissions.

    def _must_hit(self, prompt: TracedPrompt, hit: int, *, resumed: bool) -> None:
        """Check that an admission hits all that no pool lacks."""
        state, ratio = self.state, self._ratio
        spans, end = state.match(prompt.keys, prompt.limit)
        if resumed:
            # It may find what it has generated, too; how much that was, no line says.
            spans = [span for span in spans if span.end <= end]
            least = state.resumable(spans, end) if spans else 0
            own = prompt.generated, len(prompt.generated) * ratio
            known, end = state.match(prompt.keys, prompt.cacheable)
            matches = [(known, end), state.match(*own), state.match(*own, after=known)]
            fits = [spans for spans, end in matches if self._resumes(spans, end, hit)]
            if hit < least or not (fits or not hit):
                violated(f"{hit} blocks hit; {least} or more have what all pools need")
            spans = fits[0] if fits else []
        else:
            if spans and spans[-1].end != end:
                violated(f"span {spans[-1].id} is not split at {end}, where the prompt ends it")
            if hit != (longest := state.resumable(spans, end)):
                violated(f"{hit} blocks hit; {longest} have what all pools need")
        if self._spared - {span for span in spans if span.end == hit}:
            violated("a state was evicted, and one that was used longer ago was not")
        self._spared.clear()
        self._admitting = None
        if (free := state.free_slots.get("state", STATES)) < STATES:
            violated(f"{free} state slots are free; an admission needs {STATES}")

    def _resumes(self, spans: list[TracedSpan], end: int, hit: int) -> bool:
        """Return True if a request can go on after `hit` blocks, at the end of a span."""
        ends = {span.end for span in spans if span.end <= end}
        return hit in ends and not self.state.lacks(spans, hit)

    def _limits(self, prompt: TracedPrompt, *, resumed: bool) -> tuple[int, int]:
        """Return the blocks that can hit, twice: `_must_hit` checks those that do."""
        return prompt.limit, prompt.limit

    def _opened(self, event: events.Hit | events.Miss) -> None:
        """Record what a new sequence uses and needs."""
        if event.seq in self._held:
            return  # MISS after HIT
        seq = self.state.sequences[event.seq]
        self._of_request[seq.prompt.id] = seq.id
        if "state" in self._uses:
            self._uses["state"].use([seq.span])
        self._use_windows(seq.span)
        self._hold(seq)

    def _halved(self, event: events.Split) -> None:
        spans = self.state.spans
        for uses in self._uses.values():
            uses.split(spans[event.upper], spans[event.span])

    def _shared(self, event: events.Commit) -> None:
        self._sharing = self._sharing or (event.seq, event.first)

    def _closed(self, event: events.Free) -> None:
        """Record what a sequence that has closed has used, and needs no more."""
        if (seq := self._ends) is not None:
            if not self.lifecycles.waits(seq.prompt.id):
                self._use_windows(seq.span)
            self._release(seq.id)
            del self._of_request[seq.prompt.id]

    # Slots.

    def _keep(self, event: events.Keep) -> None:
        state, seq = self.state, self.state.sequence(event.seq)
        if self._last_keep == (seq.id, event.t):
            violated(f"sequence {seq.id} has just shared what it has")
        windows = [span.id for span in self._windows_due(seq)]
        if (event.windows or []) != windows:
            violated(f"spans {windows} get the window slots of sequence {seq.id}")
        lacks = "state" in self._uses and seq.span not in state.kept["state"]
        gets = seq.span.id if lacks and self._sharing is not None else UNSET
        if event.state != gets:
            violated(f"span {seq.span.id} {'has a' if gets is UNSET else 'gets the'} state")
        if state.free_slots.get("state", 1) < 1:
            self._ending = seq.id

    def _windows_due(self, seq: TracedSequence) -> list[TracedSpan]:
        """Return the tombstones that `seq` shares in this call, and has the windows of.

        Raises:
            ViolationError: it has those of a part of one.
        """
        first = seq.span.end if self._sharing is None else self._sharing[1]
        passed = max(first, self.state.passed[seq.id])
        due: list[TracedSpan] = []
        for span in path(seq.span):
            if span.end <= passed or "window" not in self._uses:
                break
            if span not in self.state.kept["window"]:
                due.append(span)
        if due and due[-1].start < passed:
            violated(f"window slots of sequence {seq.id} before block {passed} are free")
        return due[::-1]

    def _kept_by(self, event: events.Keep) -> None:
        """Record a KEEP that has been applied."""
        seq, spans = self.state.sequences[event.seq], self.state.spans
        for span in event.windows or ():
            self._uses["window"].use([spans[span]])
        self._use_windows(seq.span)
        if "state" in self._uses:
            self._uses["state"].use([seq.span])
        self._release(seq.id)
        self._hold(seq)
        self._sharing = self._claim = None
        self._next, self._closing = self._closing, None

    def _evict(self, event: events.Evict | events.Drop) -> None:
        if isinstance(event, events.Evict) and event.by in self._uses:
            self._lose(event.by, self.state.span(event.span), event.requester)
        super()._evict(event)

    def _request(self, event: events.Request) -> None:
        super()._request(event)
        self._clients_pin |= event.hints is not UNSET and "pin" in event.hints

    def _tombstone(self, event: events.Tombstone) -> None:
        span = self.state.span(event.span)
        if not (span.pins or span.children or self._clients_pin):
            violated(f"span {span.id} is a leaf, and leaves whole")
        self._lose(event.pool, span, event.requester)

    def _lose(self, pool: str, span: TracedSpan, requester: int | str) -> None:
        """Check that a pool may take what it has of `span` for a request."""
        uses, state = self._uses.get(pool), self.state
        if self._evicting is not None:
            self._refuse_victims()
        if uses is None or span not in state.kept[pool]:
            violated(f"span {span.id} has no {pool}")
        self.lifecycles.want(requester)
        seq = self._of_request.get(requester)
        if pool == "state":
            if state.free_slots["state"] >= (STATES if seq is None else 1):
                violated(f"{state.free_slots['state']} state slots are free, which is enough")
            if self._claim not in (None, seq):
                violated(f"KEEP of sequence {self._claim} must come before this")
            self._claim = seq
        elif self._lacking is None:
            violated(f"{state.free_slots['window']} window slots are free: none is missing")
        if uses.needed[span]:
            violated(f"the {pool} of span {span.id} is needed by a sequence")
        older = uses.older(span)
        state.count_work(len(older))
        if pool == "state" and seq is None:
            # What the request is to hit is needed already.
            self._admitting = requester
            self._spared |= older
        elif older:
            violated(f"span {min(other.id for other in older)} was used before span {span.id}")

    def _free(self, event: events.Free) -> None:
        state, seq = self.state, self.state.sequence(event.seq)
        if event.reason != "passed":
            self._ends = seq if event.reason == "close" else None
            super()._free(event)
            return
        first = max(state.passed[seq.id], seq.span.end)
        ranges = event.forgotten or []
        if "window" not in self._uses or len(ranges) != 1 or self.state.ids(event.runs):
            violated("it has one range of blocks whose window slots are free, and no block")
        ((begin, count),) = ranges
        if begin != first or count < 1 or begin + count > seq.blocks - state.window_blocks:
            violated(
                f"sequence {seq.id} has window slots from block {first} to {seq.blocks}, and "
                f"needs the last {state.window_blocks}"
            )

    def _begin_generated(self, seq: TracedSequence, first: int) -> int:
        """Return where the blocks begin that `seq` shares, which may be in its prompt."""
        return min(first, seq.span.end)

    def _forgotten(self, seq: TracedSequence) -> list[tuple[int, int]]:
        passed, first = self.state.passed[seq.id], seq.span.end
        return [(first, passed - first)] if passed > first else []

    def _use_windows(self, span: TracedSpan) -> None:
        if "window" in self._uses:
            state = self.state
            self._uses["window"].use(state.window_path(span, state.window_blocks + 1))

    def _hold(self, seq: TracedSequence) -> None:
        """Record that `seq` needs what it takes to resume at the end of its spans."""
        span, top = seq.span, seq.span.end
        if "window" in self._uses:
            for needed in self.state.window_path(span, self.state.window_blocks):
                self._uses["window"].needed[needed] += 1
                top = needed.start
        if "state" in self._uses:
            self._uses["state"].needed[span] += 1
        self._held[seq.id] = span, top

    def _release(self, seq: int) -> None:
        """Record that a sequence no longer needs what it has needed; spans may be split."""
        span, top = self._held.pop(seq)
        if "state" in self._uses:
            self._uses["state"].release(span)
        if "window" in self._uses:
            for needed in path(span):
                if needed.start < top:
                    break
                self._uses["window"].release(needed)
