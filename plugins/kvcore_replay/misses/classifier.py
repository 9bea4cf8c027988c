"""Miss classification on one server: why the tokens of every prompt in its trace missed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import attrs

from kvcore.trace import events
from kvcore.trace.events import methods_by_event
from kvcore_replay.belady import belady
from kvcore_replay.misses.reasons import (
    EVICTED,
    DivergencePoint,
    Eviction,
    Id,
    MissSegment,
    RequestMisses,
    TierDrop,
)
from kvcore_replay.state.cache import CacheState, TracedSpan, path, take_by
from kvcore_replay.state.groups import GroupState
from kvcore_replay.state.layout import TracedPrompt

SHARES_NOTHING = "none"
"""The prefix cache in which no request shares blocks with another."""


class MissClassifier:
    """Classifies the misses of every first admission while a trace is read.

    Attributes:
        EVENTS: the events that are recorded, each by the method of its name.
        OF_TIERS: those that are recorded if there are lower tiers.
        has_optimum: whether there is an optimum to compare with.
        state: the state of the cache, rebuilt from the trace.
        requests: the misses of each request so far, by id.
        takes: the events that `after` records, besides those that evict.
        elsewhere: on a cluster, by request, the blocks of its prompt that another replica held
            when the request was routed, and the number of that replica; None on one server.
    """

    EVENTS: ClassVar[tuple[str, ...]] = (
        *("REQUEST", "COMMIT", "SPLIT", "HIT", "MISS", "KEYS", "REJECT"),
    )
    OF_TIERS: ClassVar[tuple[str, ...]] = ("OFFLOAD", "LOAD_START", "LOAD", "DROP")
    has_optimum: ClassVar[bool] = True

    elsewhere: dict[Id, tuple[int, int]] | None = None

    def __init__(
        self,
        header: events.Header,
        state: CacheState | GroupState | None = None,
        divergences: dict[Any, DivergencePoint] | None = None,
    ) -> None:
        """Start with an empty cache, or with a `state` that the caller keeps up to date.

        Replicas share `divergences`, the points at which prompts diverge, so that each point is
        counted once.
        """
        self.state: Any = CacheState(header) if state is None else state
        self.requests: dict[Id, RequestMisses] = {}
        self._pool: int = header.blocks
        self._size: int = header.block_size
        self._ratio = max(1, header.key_tokens // self._size)
        self._by_key = header.count == "keys"
        prefix = header.plugins.get("prefix")
        self._shares = prefix is None or prefix.name != SHARES_NOTHING
        # By block, its last eviction, and the latest admission that contains it.
        self._evictions: LastEventIndex[Eviction] = LastEventIndex(self._ratio)
        self._senders: LastEventIndex[int] = LastEventIndex(self._ratio)
        # By block, the DROP by which it left a tier last. By tier, the DROPs for room whose
        # OFFLOAD is still to come.
        self._drops: LastEventIndex[TierDrop] = LastEventIndex(self._ratio)
        self._short: dict[str, list[events.Discard]] = {}
        # The first admissions, in order: their prompts, and runs (request, end) that say which
        # later request wants their blocks next.
        self._admissions: list[TracedPrompt] = []
        self._runs: list[list[tuple[int, int]]] = []
        self._serials: dict[Id, int] = {}
        # By key at which a prompt ends: the latest admission of such a prompt, and the latest
        # one with a key after it.
        self._ends: dict[Any, tuple[int, int | None]] = {}
        # By span, the request that stored it or hit it last.
        self._users: dict[int, Id] = {}
        self._divergences = {} if divergences is None else divergences
        self._salts: Counter[str | None] = Counter()
        # Requests whose last key covers a part of a block.
        self._partial: set[Id] = set()
        # The sequence of the latest readmission.
        self._returned: int | None = None
        of_tiers = () if self.state.tiers is None else self.OF_TIERS
        self._take = methods_by_event(self, *self.EVENTS, *of_tiers)
        self.takes: Collection[str] = self._take.keys()

    @property
    def header(self) -> events.Header:
        """The first line of the trace."""
        header: events.Header = self.state.header
        return header

    def take(self, event: events.Event) -> None:
        """Apply the next event after HEADER.

        Raises:
            ViolationError: the event names a request, span or sequence that does not exist.
        """
        victim = self.before(event)
        self.state.apply(event)
        self.after(event, victim)

    def before(self, event: events.Event) -> tuple[TracedSpan, int] | None:
        """Return the span from which `event` evicts, and its end before the eviction.

        Called before the event is applied to the state. None: the event evicts nothing, or
        names no span, which is an error once it is applied.
        """
        if event.event != "EVICT" or event.scope != "cache":  # type: ignore[attr-defined]
            return None
        span = self.state.spans.get(event.span)  # type: ignore[attr-defined]
        return None if span is None else (span, span.end)

    def after(self, event: events.Event, victim: tuple[TracedSpan, int] | None) -> None:
        """Record an event that has been applied to the state; `victim` is from `before`.

        Raises:
            ViolationError: the event names a request, span or sequence that does not exist.
        """
        if victim is not None:
            self._evict(event, *victim)  # type: ignore[arg-type]
        else:
            take_by(self._take, event)

    def judge(self) -> None:
        """Divide evicted segments into capacity and policy misses, after the last line.

        Only where there is an optimum to compare with.
        """
        # Most of the memory: nothing is classified after the last line.
        del self._evictions, self._senders, self._ends, self._drops
        if not self.has_optimum:
            return
        admissions = self._admissions
        lengths = [min(prompt.cacheable, self._pool) for prompt in admissions]
        needs = [prompt.blocks for prompt in admissions]
        starts = [0, *accumulate(map(len, self._runs))]
        wanted = [after for runs in self._runs for after, _ in runs]
        ends = [end for runs in self._runs for _, end in runs]
        hits = [0] * len(admissions)
        belady(lengths, needs, starts, wanted, ends, self._pool, False, hits)  # noqa: FBT003
        for prompt, cached in zip(admissions, hits, strict=True):
            reasons = self.requests[prompt.id]
            reasons.optimum = upto = min(cached, prompt.limit) * self._size
            if any(loss.category == EVICTED for loss in reasons.losses):
                reasons.losses = [
                    part for loss in reasons.losses for part in loss.split_at(upto)
                ]
        del self._admissions

    def _request(self, event: events.Request) -> None:
        prompt = self.state.requests[event.id]
        self.requests[prompt.id] = RequestMisses(
            request=prompt.id,
            tokens=prompt.blocks * self._size if self._by_key else event.prompt,
            prompt=event.prompt,
            salt=event.salt if isinstance(event.salt, str) else None,
            tenant=event.tenant if isinstance(event.tenant, str) else None,
            arrived=event.t,
        )
        unit = self._ratio * self._size
        beyond = len(prompt.keys) * unit - event.prompt if self._by_key else 0
        if 0 < beyond < unit or prompt.cacheable % self._ratio:
            self._partial.add(prompt.id)

    def _reject(self, event: events.Reject) -> None:
        self.requests[event.request].rejected = event.why

    def _keys(self, event: events.Keys) -> None:
        """Record the keys of generated blocks, which later prompts may contain."""
        serial = self._serials.get(event.request)
        if serial is None:
            return
        prompt = self.state.requests[event.request]
        keys, first = prompt.keys, (prompt.full - len(event.keys)) // self.state.layout.stride
        sent = self._senders.pieces(keys, first * self._ratio, prompt.cacheable)
        for low, high, sender in list(sent):
            if sender is None:
                self._senders.add(keys, low, high, serial)
                if high == prompt.cacheable:
                    self._ends[keys[-1]] = serial, None
        for key in keys[max(0, first - 1) : -1]:
            last, leader = self._followed(key)
            if leader is None and last is not None:
                self._ends[key] = last, serial

    def _evict(self, event: events.Evict, span: TracedSpan, end: int) -> None:
        first = span.end
        eviction = Eviction(
            line=event.n + 1,
            time=event.t,
            span=span.id,
            blocks=end - first,
            by=event.by,
            beneficiary=event.requester,
            user=self._users[span.id],
            age=event.age,
            hits=event.hits,
            expired=event.reason != "capacity",
        )
        self._evictions.add(span.keys, first, end, eviction)
        if not span.ids:
            del self._users[span.id]

    def _commit(self, event: events.Commit) -> None:
        self._users[event.span] = self.state.sequences[event.seq].prompt.id

    def _split(self, event: events.Split) -> None:
        self._users[event.upper] = self._users[event.span]

    def _hit(self, event: events.Hit) -> None:
        for span in path(self.state.spans[event.span]):
            self._users[span.id] = event.request
        self._miss(event)

    def _miss(self, event: events.Hit | events.Miss) -> None:
        """Apply a HIT or MISS line; the first one of an admission has its hit."""
        reasons = self.requests[event.request]
        if event.again:
            reasons.again += event.seq != self._returned
            self._returned = event.seq
        elif reasons.seq is None:
            reasons.admitted, reasons.seq = event.t, event.seq
            blocks = getattr(event, "blocks", 0)
            reasons.hit = blocks * self._size
            self._admit(reasons, blocks)

    def _admit(self, reasons: RequestMisses, hit: int) -> None:
        """Classify the blocks after the first `hit`, and record the prompt's keys."""
        prompt = self.state.requests[reasons.request]
        keys = self._shareable(prompt)
        serial, sent = len(self._admissions), 0
        for _, end, sender in self._senders.pieces(keys, 0, prompt.cacheable):
            if sender is None:
                break
            self._runs[sender].append((serial, end))
            sent = end
        reach = min(sent, prompt.limit)
        losses = list(self._below(reasons, prompt, hit))
        start = losses[-1].end // self._size if losses else hit
        if self.elsewhere and prompt.id in self.elsewhere:
            blocks, other = self.elsewhere.pop(prompt.id)
            first, start = start, max(start, min(blocks, prompt.limit))
            if start > first:
                losses.append(self._missed("elsewhere", first, start, replica=other))
        reasons.losses = [
            *losses,
            *self._lost(reasons, prompt, start, reach),
            *self._rest(reasons, prompt, max(sent, start), max(start, reach)),
        ]
        self._admissions.append(prompt)
        self._runs.append([])
        self._serials[prompt.id] = serial
        self._salts[reasons.salt] += 1
        full = len(keys) - (prompt.id in self._partial)
        for key in keys[max(0, full - 1) :]:
            self._ends[key] = serial, self._followed(key)[1]
        self._senders.add(keys, 0, prompt.cacheable, serial)

    def _shareable(self, prompt: TracedPrompt) -> list[Any]:
        """Return the keys of the blocks of a prompt that may be shared."""
        return prompt.keys[: -(-prompt.cacheable // self._ratio)]

    def _below(
        self, reasons: RequestMisses, prompt: TracedPrompt, hit: int
    ) -> Iterator[MissSegment]:
        """Yield the missed segments that lower tiers hold, before any load of them."""
        tiers = self.state.tiers
        if tiers is None:
            return
        for tier, first, end in tiers.found(prompt, hit):
            load_ns = tier.load_ns(end - first, reasons.admitted or 0)
            yield self._missed("recomputed", first, end, tier=tier.name, load_ns=load_ns)

    def _load_start(self, event: events.LoadStart) -> None:
        """Record a load for a first admission; other blocks in the tier are recomputed."""
        reasons, tiers = self.requests.get(event.request), self.state.tiers
        if reasons is None or reasons.seq != event.seq or tiers is None:
            return
        size = self._size
        first, end = event.first * size, (event.first + event.blocks) * size
        took: int | None = event.done - event.t
        if self.state.header.mode == "untimed":
            took = tiers.tier(event.tier).load_ns(event.blocks, event.t)
        losses: list[MissSegment] = []
        for loss in reasons.losses:
            losses += loss.between(0, first)
            if loss.first <= first < loss.end:
                # One load, also of blocks that a tier has too of which nothing is loaded.
                losses.append(self._missed(
                    "loaded", event.first, end // size, tier=event.tier, load_ns=took
                ))  # fmt: skip
            for part in loss.between(end, loss.end):
                if part.tier == event.tier and part.first == end:
                    # Its load would have waited for the one that begins.
                    blocks = part.tokens // size
                    took = tiers.tier(event.tier).load_ns(blocks, event.t)
                    part = attrs.evolve(part, load_ns=took)  # noqa: PLW2901
                losses.append(part)
        reasons.losses = losses

    def _load(self, event: events.Load) -> None:
        """Record the blocks that a load has brought and, by the wall clock, its duration."""
        reasons, size = self.requests.get(event.request), self._size
        if reasons is None or reasons.seq != event.seq:
            return
        end, losses = (event.first + event.blocks) * size, []
        for loss in reasons.losses:
            if loss.category != "loaded" or loss.tier != event.tier:
                losses.append(loss)
                continue
            if self.state.header.mode == "wall":
                loss = attrs.evolve(  # noqa: PLW2901
                    loss, load_ns=event.t - (reasons.admitted or 0)
                )
            losses += loss.between(0, end)
            losses += [
                attrs.evolve(part, category="unreadable")
                for part in loss.between(end, loss.end)
            ]
        reasons.losses = losses

    def _drop(self, event: events.Discard) -> None:
        """Record the blocks that left a tier; the OFFLOAD that follows names the request."""
        if event.reason == "capacity":
            self._short.setdefault(event.tier, []).append(event)
        elif event.reason not in ("moved", "parked"):
            self._left(event, None)

    def _offload(self, event: events.Offload) -> None:
        for drop in self._short.pop(event.tier, ()):
            self._left(drop, event.request)

    def _left(self, drop: events.Discard, beneficiary: Id | None) -> None:
        keys = self.state.requests[drop.request].keys
        note = TierDrop(drop.n + 1, drop.t, drop.tier, drop.reason, beneficiary)
        self._drops.add(keys, drop.first, drop.first + drop.blocks, note)

    def _lost(
        self, reasons: RequestMisses, prompt: TracedPrompt, hit: int, reach: int
    ) -> Iterator[MissSegment]:
        """Yield the missed segments of blocks that an earlier request contained."""
        if hit >= reach:
            return
        start, keys = hit, prompt.keys
        if self._shares:
            start, other = self._in_flight(reasons, prompt, hit, reach)
            if start > hit:
                yield self._missed("in_flight", hit, start, other=other)
        upto = max(start, min(reach, self._pool))
        for first, end, eviction in self._evictions.pieces(keys, start, upto):
            if eviction is None:
                category, other = "unstored", self._sender(keys, end)
            else:
                category = "expired" if eviction.expired else EVICTED
                other = eviction.user
            for low, high, drop in self._drops.pieces(keys, first, end):
                yield self._missed(
                    category, low, high, eviction=eviction, other=other, drop=drop
                )
        if upto < reach:
            other = self._sender(keys, reach)
            yield self._missed("truncated", upto, reach, other=other)

    def _missed(self, category: str, first: int, end: int, **about: Any) -> MissSegment:
        """Return the segment of blocks `[first, end)`."""
        tokens = (end - first) * self._size
        return MissSegment(category=category, first=first * self._size, tokens=tokens, **about)

    def _rest(
        self, reasons: RequestMisses, prompt: TracedPrompt, sent: int, first: int
    ) -> Iterator[MissSegment]:
        """Yield the missed segment from block `first` on: new or uncacheable tokens.

        Earlier prompts have the first `sent` blocks of the prompt.
        """
        start = first * self._size
        tokens = reasons.tokens - start
        if not tokens:
            return
        if sent < prompt.lookup:
            yield self._compulsory(reasons, self._shareable(prompt), sent, start)
        else:
            category = "no_keys" if prompt.unkeyed else "granularity"
            yield MissSegment(category=category, first=start, tokens=tokens)

    def _compulsory(
        self, reasons: RequestMisses, keys: list[Any], sent: int, first: int
    ) -> MissSegment:
        """Classify a compulsory miss that starts after `sent` blocks of earlier prompts."""
        known = -(-sent // self._ratio)
        way, other, point, salts = "starts", None, None, 0
        before = keys[known - 1] if known else None
        leader = self._followed(before)[1]
        if not known:
            salts = self._salts.total() - self._salts[reasons.salt]
        elif known == len(keys) - 1 and reasons.request in self._partial:
            way, other = "ends", self._sender(keys, sent)
        elif leader is None or first < known * self._ratio * self._size:
            way, other = "extends", self._sender(keys, sent)
        else:
            way, other = "diverges", self._admissions[leader].id
        tokens = reasons.tokens - first
        if way in ("starts", "diverges"):
            width = self._ratio * self._size
            new = DivergencePoint(known * width, width, reasons.request, other)
            point = self._divergences.setdefault(before, new)
            point.count(reasons.tokens, tokens)
        return MissSegment(
            category="compulsory",
            first=first,
            tokens=tokens,
            other=other,
            way=way,
            place=point,
            other_salts=salts,
        )

    def _in_flight(
        self, reasons: RequestMisses, prompt: TracedPrompt, hit: int, reach: int
    ) -> tuple[int, Id | None]:
        """Return the end of the blocks that open sequences compute after a hit, and a request.

        The request is the one whose sequence reaches furthest; None if none reaches further.
        """
        furthest, whose = hit, None
        keys, low = prompt.keys, hit // self._ratio
        for seq in self.state.sequences.values():
            other = seq.prompt
            if low >= len(other.keys) or other.keys[low] != keys[low]:
                continue  # as most do
            stop = min(reach, other.cacheable)
            if seq.id == reasons.seq or seq.has_forgotten or stop <= furthest:
                continue
            high = -(-stop // self._ratio)
            parting = bisect_left(
                range(low, high), 1, key=lambda index: other.keys[index] != keys[index]
            )
            end = min(stop, (low + parting) * self._ratio)
            if end > furthest:
                furthest, whose = end, other.id
        return furthest, whose

    def _sender(self, keys: list[Any], end: int) -> Id | None:
        """Return the latest admitted request that contains the block before `end`.

        None: only an earlier run had the block, and left it in a tier.
        """
        ((_, _, serial),) = self._senders.pieces(keys, end - 1, end)
        return None if serial is None else self._admissions[serial].id

    def _followed(self, key: Any) -> tuple[int | None, int | None]:
        """Return the latest admission with `key`, and the latest with a key after it."""
        ((_, _, last),) = self._senders.pieces([key], 0, 1)
        end, before = self._ends.get(key, (None, None))
        return last, before if last == end else last


Note = TypeVar("Note")

Piece: TypeAlias = tuple[int, int, Note | None]
"""A run of blocks: its first block, its end, and its note (None without one)."""


class LastEventIndex(Generic[Note]):
    """Maps each block to its latest event, such as the eviction that removed it.

    A key stands for `ratio` blocks. Mostly all of them have one event, called its note;
    otherwise the key has pieces, by position within the key. A note is no tuple, and not None.
    """

    __slots__ = ("_of", "_ratio")

    def __init__(self, ratio: int) -> None:
        self._ratio = ratio
        self._of: dict[Any, Note | tuple[Piece[Note], ...]] = {}

    def add(self, keys: Sequence[Any], first: int, end: int, note: Note) -> None:
        """Set the event of the blocks of `keys` from `first` up to `end`. O(keys) in C."""
        ratio = self._ratio
        low, high = -(-first // ratio), end // ratio
        if high - low == 1:
            self._of[keys[low]] = note
        else:
            self._of.update(dict.fromkeys(keys[low:high], note))
        if first % ratio:
            self._add_part(keys[low - 1], low - 1, first, end, note)
        if end % ratio and high >= low:
            self._add_part(keys[high], high, first, end, note)

    def pieces(self, keys: Sequence[Any], first: int, end: int) -> Iterator[Piece[Note]]:
        """Yield runs of the blocks from `first` up to `end` that share one event."""
        start, stop, last = first, first, None
        for low, high, note in self._runs(keys, first, end):
            if note is not last and note != last:
                if stop > start:
                    yield start, stop, last
                start, last = low, note
            stop = high
        if stop > start:
            yield start, stop, last

    def _add_part(self, key: Any, index: int, first: int, end: int, note: Note) -> None:
        """Set the event of some blocks of a key; keep the events of its other blocks."""
        base, ratio = index * self._ratio, self._ratio
        start, stop = max(first - base, 0), min(end - base, ratio)
        before = self._of.get(key)
        if not isinstance(before, tuple):
            before = ((0, ratio, before),)
        earlier = ((a, min(b, start), note) for a, b, note in before if a < start)
        later = ((max(a, stop), b, note) for a, b, note in before if b > stop)
        self._of[key] = (*earlier, (start, stop, note), *later)

    def _runs(self, keys: Sequence[Any], first: int, end: int) -> Iterator[Piece[Note]]:
        """Yield runs of keys that share one event, and the pieces of keys with several."""
        ratio = self._ratio
        low, high = first // ratio, -(-end // ratio)
        start = low * ratio
        if not self._of:
            yield first, end, None
            return
        for owner, run in groupby(map(self._of.get, keys[low:high])):
            many = ratio * len(list(run))
            if isinstance(owner, tuple):
                bases = range(start, start + many, ratio)
                pieces = [(base + a, base + b, note) for base in bases for a, b, note in owner]
            else:
                pieces = [(start, start + many, owner)]
            for a, b, note in pieces:
                if max(a, first) < min(b, end):
                    yield max(a, first), min(b, end), note
            start += many
