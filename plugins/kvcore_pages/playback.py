"""A trace as columns that a browser can play: the effect of each line on pool and requests.

    trace ──► TraceChecker ──► Playback ──► planes of bytes ──► static/playback.js
                                   │
                prompts ──► leaders: which block of which prompt is which block of another

Each line becomes a row of small integers, which mean different things by event (`COLUMNS`). The
browser makes the state of the pool from them as `CacheState` does from the lines, so it can
show any moment. Block keys are not sent: two blocks have the same content if their prompts are
equal up to there, which a tree of requests expresses. Each prompt shares its first blocks with
an earlier one, its leader, and has the rest for itself.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from heapq import nlargest
from struct import Struct
from sys import byteorder
from typing import Any, ClassVar

import attrs
import orjson

from kvcore.errors import InputError
from kvcore.progress import Tick, ticked, unseen
from kvcore.trace import events
from kvcore.trace.events import methods_by_event
from kvcore.units import NS_PER_S, format_seconds
from kvcore_cli.report.tables import setup
from kvcore_replay.check.trace import CheckedReader, refuse
from kvcore_replay.misses.explain import server_misses
from kvcore_replay.misses.reasons import Explanation
from kvcore_replay.report.misses import RequestReport
from kvcore_replay.state.cache import TracedSpan, run_blocks
from kvcore_replay.state.layout import TracedPrompt

NONE = -1
"""In a column: no request, span or tier."""

PARKED = -2
"""In place of the tier that blocks come from: they are parked, of a preempted sequence."""

KINDS = (
    *("REQUEST", "PREFETCH", "HIT", "MISS", "SPLIT", "ALLOC", "COMMIT", "EVICT", "FORGET"),
    *("COMPACT", "FREE", "FORK", "COPY", "FIRST_TOKEN", "PREEMPT", "RESUME", "RECOVER"),
    *("OFFLOAD", "LOAD_START", "LOAD", "DROP", "KEYS", "FINISH", "REJECT", "HEADER", "END"),
    *("KEEP", "TOMBSTONE"),
)
"""The kinds of rows. EVICT of scope `sequence` is FORGET, so that each kind has one meaning."""

KIND = {name: index for index, name in enumerate(KINDS)}

WHY = ("absent", "partial", "expired", "no keys")
COMMITTED = ("new", "grown", "same", "shared")
POOLS = ("window", "state")
EVICTED = ("capacity", "expired", "gone", *POOLS)
FREED = ("close", "duplicate", "rollback", "passed")
PREEMPTED = ("pause", "recompute", "swap")
DROPPED = ("capacity", "expired", "moved", "parked", "corrupt", "gone", "failed")

WORDS = {
    "kinds": KINDS,
    "why": WHY,
    "committed": COMMITTED,
    "freed": FREED,
    "preempted": PREEMPTED,
    "dropped": DROPPED,
    "pools": POOLS,
}
"""The words for numbers in columns, as the page's script reads them. (It knows `EVICTED`.)"""

COLUMNS = ("kind", "request", "a", "b", "c", "d", "e", "count", "time", "age")
"""Columns of a row: its event, its request (by number), five values, the number of blocks that
it takes from the pool or gives back, and its time (ns) after the row before it, or of the first
row from 0 on. REQUEST, KEYS, REJECT, HEADER and END have no values.

| kind | a | b | c | d | e | count |
|---|---|---|---|---|---|---|
| HIT | sequence | blocks | span | again | | |
| MISS | sequence | block | why | again | | |
| PREFETCH | sequence | blocks | span or -1 | | | |
| SPLIT | span | upper half | at | | | |
| ALLOC | sequence | first | | | | taken |
| COMMIT | sequence | span | blocks | how | | |
| EVICT | span | hits | reason | whose | end | freed |
| FORGET | sequence | first | blocks | private ones before them | | freed |
| COMPACT | sequence | tokens | held | taken | | freed |
| FREE | sequence | reason | private ones that stay | | | freed |
| FORK | sequence | child | | | | |
| COPY | sequence | block | from | to | | |
| FIRST_TOKEN, RESUME | sequence | | | | | |
| PREEMPT | sequence | how | requester or -1 | | | |
| FINISH | sequence | output | | | | |
| OFFLOAD | tier | first | blocks | tier it comes from, -1, or -2: parked | | |
| LOAD_START, LOAD | tier | first | blocks | sequence | | |
| DROP | tier | first | blocks | reason | | |
| RECOVER | tier | first | blocks | | | |
| KEEP | sequence | spans that get windows | span that gets a state or -1 | | | |
| TOMBSTONE | span | pool | | | | |

The ids of blocks are not sent: a pool gives the block that was freed last, and the checker has
verified that it did. The request of an EVICT is the one that needed the blocks; `whose` is a
request with these blocks in its prompt, and `end` the position after the last of them there.
The reason of an EVICT may be the pool that was short.
`age` (ns) is that of the blocks in EVICT, and the duration of the transfer in OFFLOAD and
LOAD_START.
"""

WIDTH = len(COLUMNS)

PACK = Struct(f"{WIDTH}q").pack
"""Makes the bytes of a row, faster than an array takes the numbers."""

MOST_FLAT = WIDTH << 16
"""Numbers of rows that are not in columns yet, at the begin of a moment."""

MOST = 2**53
"""Bound of the numbers that are exact in a browser; in ns it is 104 days."""


_column = partial(array, "q")
"""Makes an empty column of 64-bit numbers."""


@attrs.define
class Prompts:
    """The prompts of a trace, by request number: their lengths, and shared content.

    Attributes:
        ids: ids of the requests.
        tokens, output: lengths of prompt and output in tokens.
        blocks: number of blocks with a key, whose content another prompt can have too.
        lookup: number of these blocks that are looked up.
        leader, shared: the first request with the most equal blocks at the beginning, and
            the number of these; -1 and 0 if there is none.
        last_key: the last of the prompt's keys; None if it has none.
        admitted, when: line and time (ns) of the first admission; -1 if there is none.
    """

    ids: list[int | str] = attrs.field(factory=list)
    tokens: array[int] = attrs.field(factory=_column)
    output: array[int] = attrs.field(factory=_column)
    blocks: array[int] = attrs.field(factory=_column)
    lookup: array[int] = attrs.field(factory=_column)
    leader: array[int] = attrs.field(factory=_column)
    shared: array[int] = attrs.field(factory=_column)
    last_key: list[Any] = attrs.field(factory=list)
    admitted: array[int] = attrs.field(factory=_column)
    when: array[int] = attrs.field(factory=_column)
    _first: dict[Any, int] = attrs.field(factory=dict, init=False)

    def announce(self, prompt: TracedPrompt, ratio: int) -> None:
        """Append a request that is yet to arrive, of whose prompt the first keys are known.

        It has none of their blocks for itself: they are those of earlier requests, and what
        follows them may come with another request before it arrives.
        """
        self._share(self._append(prompt), prompt.keys, ratio)

    def arrive(self, request: int, prompt: TracedPrompt, output: int, ratio: int) -> None:
        """Record the whole prompt of a request, which may have been announced.

        O(log keys) in Python, and O(keys) in C.
        """
        if request == len(self.ids):
            self._append(prompt)
        keys = prompt.keys
        self.tokens[request], self.output[request] = prompt.tokens, output
        self.lookup[request] = prompt.lookup
        self.last_key[request] = keys[-1] if keys else None
        known = self._share(request, keys, ratio)
        self._first.update(dict.fromkeys(keys[known:], request))

    def _append(self, prompt: TracedPrompt) -> int:
        """Append a request of which nothing but its id is known yet; return its row."""
        self.ids.append(prompt.id)
        self.last_key.append(None)
        for column in (self.tokens, self.output, self.blocks, self.lookup, self.shared):
            column.append(0)
        for column in (self.leader, self.admitted, self.when):
            column.append(NONE)
        return len(self.ids) - 1

    def _share(self, request: int, keys: list[Any], ratio: int) -> int:
        """Record the blocks of a prompt; return how many keys an earlier request has too."""
        first = self._first
        # Keys are chained: if one is known, so are those before it.
        known = bisect_left(keys, True, key=lambda key: key not in first)  # noqa: FBT003
        self.leader[request] = first[keys[known - 1]] if known else NONE
        self.shared[request] = known * ratio
        self.blocks[request] = len(keys) * ratio
        return known

    def close(self) -> None:
        """Forget which request has which key, after the last line."""
        self._first.clear()

    def admit(self, request: int, line: int, now: int) -> None:
        """Record an admission, of which the first one counts."""
        if self.admitted[request] == NONE:
            self.admitted[request], self.when[request] = line, now

    def pieces(self, request: int, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the blocks `[first, end)` of a prompt in pieces, each with its owner first."""
        while end > first and request != NONE:
            shared = self.shared[request]
            if end > shared:
                yield request, max(first, shared), end
                end = shared
            request = self.leader[request]

    def of_key(self, key: Any) -> int:
        """Return the request that first had the block of a key."""
        return self._first[key]

    def name(self, request: int, keys: Iterable[Any]) -> None:
        """Record that a request has the blocks of `keys`, of those that no earlier one has."""
        for key in keys:
            self._first.setdefault(key, request)


@attrs.define
class Lives:
    """How far requests are, by number, of which the state of the cache does not tell.

    Attributes:
        answered: those that had their first token.
        waits: those that wait, and whether they were preempted.
        opened: by open sequence, when that was (ns).
    """

    answered: set[int] = attrs.field(factory=set)
    waits: dict[int, bool] = attrs.field(factory=dict)
    opened: dict[int, int] = attrs.field(factory=dict)

    def told(self, there: Iterable[int]) -> dict[str, Any]:
        """Return it as a JSON value, of the requests `there` and of those that wait."""
        answered = sorted(self.answered & {*there, *self.waits})
        return {"answered": answered, "waiting": list(self.waits.items())}


@attrs.frozen
class EvictedContent:
    """The block keys that an EVICT line removed, to compare two traces.

    Attributes:
        row: row of the line.
        requester: the request that needed the blocks.
        keys: all keys of the prompt that stored the blocks.
        first, end: positions `[first, end)` of the blocks in that prompt.
    """

    row: int
    requester: int | str
    keys: list[Any]
    first: int
    end: int


@attrs.frozen
class Window:
    """The part of a trace that a page plays.

    Attributes:
        start, end: times in ns: rows from `start` on and before `end`; None: to the last row.
        max_rows: largest number of rows, which the first moment or the last one may exceed:
            the rows of one moment stay together.
    """

    start: int = 0
    end: int | None = None
    max_rows: int = 1_000_000


WHOLE = Window()


class Playback:
    """The rows of a trace, which is checked while it is read.

    Attributes:
        file: name of the trace.
        header: the first line.
        rows: the columns of `COLUMNS`, for the lines in the window.
        first_line: number of the first line in the window, from 0 on.
        lines: number of lines of the trace.
        ended: time (ns) of the last line of the trace.
        opening: the state before the first line in the window; None: an empty pool.
        ratio: the number of blocks of a key.
        prompts: the prompts of the requests.
        evicted: contents that EVICT lines in the window removed, in their order; none if
            it is not to be compared.
        explanation: the reasons of misses.
        words: the words for numbers in columns.
    """

    PREPARED: ClassVar[tuple[str, ...]] = ("EVICT",)
    """Events of which `_prepare` has to know what was before them."""

    # EVICT of scope `sequence`, where a retention policy drops private blocks, has a Struct of
    # its own, and so rows of their own kind. (DROP, of a tier, is `Discard`.)
    STRUCTS: ClassVar[Mapping[str, type[events.Event]]] = events.EVENTS | {
        "FORGET": events.Drop
    }
    """The Structs of the trace by the kinds of their rows."""

    words: ClassVar[Mapping[str, tuple[str, ...]]] = WORDS

    def __init__(
        self,
        file: str | os.PathLike[str],
        tick: Tick = unseen,
        window: Window = WHOLE,
        replica: int | str | None = None,
        *,
        compared: bool = True,
    ) -> None:
        """Read a trace, or of a cluster that of a `replica`. Costs about 15 µs a line.

        `compared` is whether to keep the `evicted` contents, to compare it with another trace.

        Raises:
            InputError: the file cannot be opened.
            TraceError: a line is damaged, contradicts what came before, or the file is cut.
        """
        reader = CheckedReader(file, replica)
        self.file = str(reader.file)
        self.first_line, self.lines, self.ended = 0, 0, 0
        self.opening: dict[str, Any] | None = None
        self.prompts = Prompts()
        self.evicted: list[EvictedContent] = []
        self._window, self._compared = window, compared
        self._flat = array("q")  # the last rows, after those in columns
        self.rows = {name: array("i") for name in COLUMNS}
        # The first row of the current moment; and where that is: before the window, inside it,
        # or after.
        self._boundary, self._stage = 0, "before" if window.start else "inside"
        self._before = 0  # time (ns) of the last row
        self._numbers: dict[int | str, int] = {}
        self._of_sequence: dict[int, int] = {}
        # What the state of the cache lacks: by span, the request that stored it, and when (ns);
        # and how far requests are.
        self._stored: dict[int, tuple[int, int]] = {}
        self._lives = Lives()
        self._read(reader, tick)
        self._must_be_shown(reader)
        self._inquest.judge()
        self._pool_blocks: int = self._checker.pool.high_water
        self.explanation = Explanation(
            source=self.file,
            header=self.header,
            complete=True,
            cut_reason=None,
            requests=self._inquest.requests,
        )
        # What no page needs goes, since its making needs memory, too.
        self.prompts.close()
        self._state.requests.clear()
        del self._record, self._inquest, self._checker, self._state

    def _read(self, reader: CheckedReader, tick: Tick) -> None:
        """Check the lines, and make rows of them."""
        for event in ticked(reader, tick):
            self.lines += 1
            if reader.checker is None:
                reader.check(event)
                self._start(event, reader.checker)  # type: ignore[arg-type]  # it is HEADER
                inquest = self._inquest
                continue
            if event.t != self.ended:
                self._turn(event)
            try:
                victim = self._prepare(event) if event.event in self.PREPARED else None
                reader.check(event)
                if victim is not None or event.event in inquest.takes:
                    inquest.after(event, victim)
            except (LookupError, ArithmeticError, ValueError) as error:
                refuse(reader, event, error)
            if type(event) is self._evict_type:
                self._evict(event, victim)  # type: ignore[arg-type]  # of scope `cache`
            else:
                self._record[type(event)](event)
        reader.require_complete()
        self._to_columns()

    def _must_be_shown(self, reader: CheckedReader) -> None:
        """Check that there are rows, whose numbers a browser can hold."""
        if self._stage == "before" or not self.rows["kind"]:
            msg = (
                f"{self.file}: no line is in the window; the trace ends at "
                f"{format_seconds(self.ended / NS_PER_S)}"
            )
            raise InputError(msg)
        beyond = "goes beyond 2^53, which is the most that a page can show"
        if self.ended >= MOST:
            reader.fail(f"its time in ns {beyond}: 104 days")
        for name, column in self.rows.items():
            if column.typecode == "q" and not -MOST < min(column) <= max(column) < MOST:
                reader.fail(f"{name} {beyond}")

    def _start(self, header: events.Header, checker: Any) -> None:
        """Prepare for the lines after HEADER: check them, and find the reasons of misses."""
        self._checker, self._state = checker, checker.state
        self._inquest = server_misses(header, checker.state)
        self.header: dict[str, Any] = header.as_dict()
        self.ratio: int = checker.state.layout.ratio
        checker.digests = False  # of its report, which no page has
        names = [tier["tier"] for tier in self.header.get("tiers", ())]
        self._tiers = {name: index for index, name in enumerate(names)}
        # By tier and owner of the content, the position after the last block in the tier.
        self._ends: dict[str, dict[int, int]] = {name: {} for name in names}
        structs = {name: self.STRUCTS[name] for name in KIND if name in self.STRUCTS}
        self._kinds = {struct: KIND[name] for name, struct in structs.items()}
        self._evict_type = structs.pop("EVICT")
        methods = methods_by_event(self, *structs)
        self._record = {structs[name]: method for name, method in methods.items()}
        self._row(header)

    def _prepare(self, event: Any) -> Any:
        """Return what an event evicts, before it is applied."""
        return self._inquest.before(event)

    def _turn(self, event: events.Event) -> None:
        """Start or stop keeping rows, before the first line of a moment."""
        self.ended, window = event.t, self._window
        if self._stage == "before" and event.t >= window.start:
            self._stage, self.first_line, self._before = "inside", event.n, 0
            there = map(self._of_sequence.__getitem__, self._lives.opened)
            numbers = {"numbers": len(self._numbers)}
            self.opening = self._snapshot() | self._lives.told(there) | numbers
        if self._stage != "inside":
            return
        rows = self._count
        if rows > window.max_rows and self._boundary:
            del self._flat[len(self._flat) - (rows - self._boundary) * WIDTH :]
            while self.evicted and self.evicted[-1].row >= self._boundary:
                self.evicted.pop()
        if rows >= window.max_rows or (window.end is not None and event.t >= window.end):
            self._stage = "after"
        self._boundary = self._count
        if len(self._flat) > MOST_FLAT:
            self._to_columns()

    @property
    def _count(self) -> int:
        """The number of rows so far."""
        return len(self.rows["kind"]) + len(self._flat) // WIDTH

    def _to_columns(self) -> None:
        """Move the last rows to the columns, which take half of the memory."""
        for index, (name, column) in enumerate(self.rows.items()):
            more = narrowed(self._flat[index::WIDTH])
            if column.typecode != more.typecode:
                column, more = array("q", column), array("q", more)  # noqa: PLW2901
            column += more  # noqa: PLW2901
            self.rows[name] = column
        del self._flat[:]

    def _snapshot(self) -> dict[str, Any]:
        """Return the state as a JSON value."""
        state, hits, stored = self._state, self._state.hits, self._stored
        pool = self._checker.pool
        parents = (span.parent for span in state.spans.values())
        spans = {
            "id": list(state.spans),
            "parent": [NONE if parent is None else parent.id for parent in parents],
            "start": [span.start for span in state.spans.values()],
            "ids": [span.ids.tolist() for span in state.spans.values()],
            "hits": [span.hits for span in state.spans.values()],
            "last": [span.last_access for span in state.spans.values()],
            "request": [stored[span][0] for span in state.spans],
            "stored": [stored[span][1] for span in state.spans],
        }
        open_ones = state.sequences.values()
        sequences = {
            "id": list(state.sequences),
            "request": [self._of_sequence[seq.id] for seq in open_ones],
            "span": [seq.span.id for seq in open_ones],
            "ids": [seq.private.tolist() for seq in open_ones],
            "opened": [self._lives.opened[seq.id] for seq in open_ones],
        }
        tiers = () if state.tiers is None else state.tiers.levels.values()
        return {
            "spans": spans,
            "sequences": sequences,
            "freed": pool.free_ids().tolist(),
            "fresh": pool.high_water,
            "owners": list(pool.owners.items()),
            "lookups": hits.lookup_blocks,
            "hits": hits.hit_blocks,
            "tiers": [
                {
                    "used": tier.used,
                    "ends": list(ends.items()),
                    "parked": [
                        (self._numbers[request], end - first)
                        for request, (first, end) in tier.parked.items()
                    ],
                }
                for tier, ends in zip(tiers, self._ends.values(), strict=True)
            ],
        }

    def _row(
        self,
        event: events.Event,
        request: int = NONE,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        d: int = 0,
        e: int = 0,
        count: int = 0,
        age: int = 0,
    ) -> None:
        """Append a row, if it is in the window."""
        now = event.t
        if self._stage == "inside":
            kind = self._kinds[type(event)]
            row = PACK(kind, request, a, b, c, d, e, count, now - self._before, age)
            self._flat.frombytes(row)
        self._before = now

    _header = _end = _row

    def _request(self, event: events.Request) -> None:
        # It has a number if it was announced by a PREFETCH.
        request = self._numbers.setdefault(event.id, len(self._numbers))
        prompt = self._state.requests[event.id]
        self.prompts.arrive(request, prompt, event.output, self.ratio)
        if (shared := self.prompts.shared[request] // self.ratio) > 0:
            # Equal keys are one object: others would take most of the memory.
            leader = self._state.requests[self.prompts.ids[self.prompts.leader[request]]]
            prompt.keys[:shared] = leader.keys[:shared]
        self._lives.waits[request] = False
        self._row(event, request)

    def _prefetch(self, event: events.Prefetch) -> None:
        request = self._numbers[event.request] = len(self._numbers)
        self.prompts.announce(self._state.requests[event.request], self.ratio)
        self._of_sequence[event.seq], self._lives.opened[event.seq] = request, event.t
        span = event.span if isinstance(event.span, int) else NONE
        self._row(event, request, event.seq, event.blocks, span)

    def _admit(self, event: events.Hit | events.Miss) -> int:
        """Record that a sequence is opened for a request; return the number of the request."""
        request = self._numbers[event.request]
        self._of_sequence[event.seq], self._lives.opened[event.seq] = request, event.t
        self._lives.waits.pop(request, None)
        if not event.again:
            self.prompts.admit(request, event.n, event.t)
        return request

    def _hit(self, event: events.Hit) -> None:
        request = self._admit(event)
        self._row(event, request, event.seq, event.blocks, event.span, bool(event.again))

    def _miss(self, event: events.Miss) -> None:
        request, why = self._admit(event), WHY.index(event.why)
        self._row(event, request, event.seq, event.block, why, bool(event.again))

    def _split(self, event: events.Split) -> None:
        self._stored[event.upper] = self._stored[event.span]
        self._row(event, NONE, event.span, event.upper, event.at)

    def _alloc(self, event: events.Alloc) -> None:
        owner, count = self._of_sequence[event.seq], run_blocks(event.runs)
        self._row(event, owner, event.seq, event.first, count=count)

    def _commit(self, event: events.Commit) -> None:
        owner, how = self._of_sequence[event.seq], COMMITTED.index(event.how)
        if event.how == "new":
            self._stored[event.span] = owner, event.t
        if event.generated is True:
            self.prompts.name(owner, self._state.sequences[event.seq].prompt.generated)
        self._row(event, owner, event.seq, event.span, event.blocks, how)

    def _evict(self, event: events.Evict, victim: tuple[TracedSpan, int]) -> None:
        span, end = victim
        if self._compared and self._stage == "inside":
            content = span.keys, span.end, end
            row = self._count
            self.evicted.append(EvictedContent(row, event.requester, *content))
        if not span.ids:
            del self._stored[span.id]
        requester = self._numbers[event.requester]
        whose = self.prompts.of_key(span.keys[(end - 1) // self.ratio])
        reason = (
            event.by if self._state.header.layer_pools and event.by in POOLS else event.reason
        )
        values = event.span, event.hits, EVICTED.index(reason), whose, end
        self._row(event, requester, *values, end - span.end, event.age)

    def _keep(self, event: events.Keep) -> None:
        state = event.state if isinstance(event.state, int) else NONE
        values = event.seq, len(event.windows or ()), state
        self._row(event, self._of_sequence[event.seq], *values)

    def _tombstone(self, event: events.Tombstone) -> None:
        self._row(event, self._numbers[event.requester], event.span, POOLS.index(event.pool))

    def _forget(self, event: events.Drop) -> None:
        seq, end = self._state.sequences[event.seq], event.first + event.blocks
        before = seq.private_slice(event.first, end).start
        values = event.seq, event.first, event.blocks, before, 0, run_blocks(event.runs)
        self._row(event, self._of_sequence[event.seq], *values)

    def _compact(self, event: events.Compact) -> None:
        taken, freed = run_blocks(event.new or []), run_blocks(event.runs)
        values = event.seq, event.tokens, event.held, taken, 0, freed
        self._row(event, self._of_sequence[event.seq], *values)

    def _free(self, event: events.Free) -> None:
        reason, kept = FREED.index(event.reason), 0
        if event.reason in ("rollback", "passed"):
            kept = len(self._state.sequences[event.seq].private)
        elif event.reason == "close":
            del self._lives.opened[event.seq]
        values = event.seq, reason, kept, 0, 0, run_blocks(event.runs)
        self._row(event, self._of_sequence[event.seq], *values)

    def _fork(self, event: events.Fork) -> None:
        owner = self._of_sequence[event.child] = self._of_sequence[event.seq]
        self._lives.opened[event.child] = event.t
        self._row(event, owner, event.seq, event.child)

    def _copy(self, event: events.Copy) -> None:
        values = event.seq, event.block, event.source, event.to
        self._row(event, self._of_sequence[event.seq], *values)

    def _first_token(self, event: events.FirstToken) -> None:
        request = self._numbers[event.request]
        self._lives.answered.add(request)
        self._row(event, request, event.seq)

    def _resume(self, event: events.Resume) -> None:
        request = self._numbers[event.request]
        self._lives.waits.pop(request, None)
        self._row(event, request, event.seq)

    def _preempt(self, event: events.Preempt) -> None:
        given = isinstance(event.requester, (int, str))
        requester = self._numbers.get(event.requester, NONE) if given else NONE  # type: ignore[arg-type]
        values = event.seq, PREEMPTED.index(event.how), requester
        request = self._numbers[event.request]
        self._lives.waits[request] = True
        self._row(event, request, *values)

    def _finish(self, event: events.Finish) -> None:
        request = self._numbers[event.request]
        self._lives.waits.pop(request, None)
        self._row(event, request, event.seq, event.output)

    def _keys(self, event: events.Keys) -> None:
        request, prompt = self._numbers[event.request], self._state.requests[event.request]
        self.prompts.blocks[request] = prompt.cacheable * self.ratio
        self.prompts.name(request, event.keys)
        self._row(event, request)

    def _reject(self, event: events.Reject) -> None:
        request = self._numbers[event.request]
        self._lives.waits.pop(request, None)
        self._row(event, request)

    def _recover(self, event: events.Recover) -> None:
        request = self._numbers[event.request] = len(self._numbers)
        prompt = self._state.requests[event.request]
        self.prompts.arrive(request, prompt, 0, self.ratio)
        self._store(event, request)
        self._row(event, request, self._tiers[event.tier], event.first, event.blocks)

    def _store(self, event: events.Recover | events.Offload, request: int) -> None:
        """Record that blocks of a prompt are in a tier."""
        pieces = self.prompts.pieces(request, event.first, event.first + event.blocks)
        self._ends[event.tier].update((owner, end) for owner, _, end in pieces)

    def _offload(self, event: events.Offload) -> None:
        source = self._tiers[event.source] if event.source else PARKED if event.parked else NONE
        values = self._tiers[event.tier], event.first, event.blocks, source
        request = self._numbers[event.request]
        if not event.parked:
            self._store(event, request)
        self._row(event, request, *values, age=event.done - event.t)

    def _load_start(self, event: events.LoadStart | events.Load) -> None:
        values = self._tiers[event.tier], event.first, event.blocks, event.seq
        age = event.done - event.t if isinstance(event, events.LoadStart) else 0
        self._row(event, self._numbers[event.request], *values, age=age)

    _load = _load_start

    def _drop(self, event: events.Discard) -> None:
        reason = DROPPED.index(event.reason)
        values = self._tiers[event.tier], event.first, event.blocks, reason
        request, ends = self._numbers[event.request], self._ends[event.tier]
        if event.reason != "parked":
            end = event.first + event.blocks
            for owner, first, _ in self.prompts.pieces(request, event.first, end):
                if first > self.prompts.shared[owner]:
                    ends[owner] = first
                else:
                    del ends[owner]
        self._row(event, request, *values)

    def document(self) -> dict[str, Any]:
        """Return the JSON part of the playback: the run, and its requests."""
        prompts, explanation = self.prompts, self.explanation
        explained = [explanation.requests.get(request) for request in prompts.ids]
        last = self.first_line + len(self.rows["kind"])
        lost = {
            index: sum(loss.tokens for loss in request.losses if loss.eviction is not None)
            for index, (request, line) in enumerate(
                zip(explained, prompts.admitted, strict=True)
            )
            if request is not None and (line == NONE or self.first_line <= line < last)
        }
        told = set(nlargest(MOST_REASONS, lost, key=lost.__getitem__))
        whys = [
            str(RequestReport(explanation, request))
            if request is not None and index in told
            else NOT_TOLD
            for index, request in enumerate(explained)
        ]
        return {
            "file": self.file,
            "header": self.header,
            "setup": setup(self.header),
            "words": self.words,
            "pool": self._pool_blocks,
            "begin": self.opening,
            "first": self.first_line,
            "lines": self.lines,
            "ended": self.ended,
            "prefill": {
                "token": explanation.cost.token_seconds,
                "pairs": explanation.cost.pair_seconds,
                **{name: getattr(explanation.cost, name) for name in ("model", "device")},
            },
            "requests": {
                "id": list(map(str, prompts.ids)),
                "why": share_phrases(whys),
            },
        }

    def columns(self) -> dict[str, bytearray]:
        """Return the rows, and numbers of the requests, as planes of bytes: see `pack`."""
        prompts, requests = self.prompts, self.explanation.requests
        explained = [requests.get(request) for request in prompts.ids]
        size = self.header["block_size"]
        columns = {name: getattr(prompts, name) for name in PROMPT_COLUMNS}
        for name in ("hit", "optimum"):
            tokens = (getattr(request, name) if request else 0 for request in explained)
            columns[name] = array("q", [count // size for count in tokens])
        return {"rows": pack(self.rows), "requests": pack(columns)}


PROMPT_COLUMNS = (
    *("tokens", "output", "blocks", "lookup", "leader", "shared", "admitted", "when"),
)

MOST_REASONS = 50_000
NOT_TOLD = (
    "This page has the reasons of requests that are admitted in its window, and of the "
    f"{MOST_REASONS:,} among them that lost most to evictions. `kvcore explain` has all."
)

NUMBER = re.compile(r"(\d+(?:[.,]\d+)*)")


def share_phrases(texts: Iterable[str]) -> dict[str, Any]:
    """Return texts as lines without their numbers, each once, and which lines a text has.

    Sentences on requests are few and long, and differ in their numbers: `lines` are the
    sentences, with a NUL for each number; `uses` are, text by text and separated by newlines,
    which lines it has, and after each the numbers that go into it.
    """
    lines: dict[str, int] = {}
    uses = []
    for text in texts:
        words: list[str] = []
        for line in text.replace("\0", "").splitlines():
            parts = NUMBER.split(line)
            phrase = "\0".join(parts[::2])
            words += (str(lines.setdefault(phrase, len(lines))), *parts[1::2])
        uses.append(" ".join(words))
    return {"lines": list(lines), "uses": "\n".join(uses)}


def narrowed(column: array[int]) -> array[int]:
    """Return a column with 4 bytes a number if they are enough, otherwise with 8."""
    if column.typecode == "q":
        with suppress(OverflowError):
            return array("i", column)
    return column


def pack(columns: Mapping[str, array[int]]) -> bytearray:
    """Return columns as bytes that compress well and that a browser reads at memory's speed.

    A line of JSON with the name, length and bytes a number of each, then the columns, each
    plane by plane: the lowest bytes of all numbers, the next ones, and so on, little-endian.
    Numbers of 4 bytes or more are signed.
    """
    narrow = {name: narrowed(column) for name, column in columns.items()}
    about = [
        {"name": name, "bytes": column.itemsize, "length": len(column)}
        for name, column in narrow.items()
    ]
    packed = bytearray(orjson.dumps(about) + b"\n")
    for column in narrow.values():
        ordered = column[:]
        if byteorder != "little":
            ordered.byteswap()
        raw, size = ordered.tobytes(), ordered.itemsize
        for plane in range(size):
            packed += raw[plane::size]
    return packed
