"""A trace as columns that a browser can play: what each line does to the pool, and to whom.

    trace ──► TraceChecker ──► Playback ──► planes of bytes ──► static/playback.js
                                   │
                prompts ──► leaders: which block of which prompt is which block of another

Each line becomes a row of small integers, whose meaning depends on its event (`COLUMNS`). The
browser makes the state of the pool from them as `CacheState` does from the lines, so it can
show any moment. Block keys are not sent: two blocks are the same content if the prompts that
have them are one prompt up to there, and that is a tree of requests. Each prompt shares its
first blocks with an earlier one, its leader, and has the rest for itself.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from sys import byteorder
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from kvcore.analysis import Explanation, explain
from kvcore.errors import TraceError
from kvcore.progress import Tick, ticked, unseen
from kvcore.report import setup
from kvcore.report.misses import RequestReport
from kvcore.trace import TraceChecker, TraceReader, encode_runs
from kvcore.trace.check import check_event
from kvcore.trace.state import TracedPrompt, TracedSpan

if TYPE_CHECKING:
    # The Structs are imported with the first trace that is read: msgspec takes a while.
    from kvcore.trace import events

NONE = -1
"""In a column: no request, span or tier."""

PARKED = -2
"""In place of the tier that blocks come from: they are of a preempted sequence, for itself."""

KINDS = (
    *("REQUEST", "PREFETCH", "HIT", "MISS", "SPLIT", "ALLOC", "COMMIT", "EVICT", "FORGET"),
    *("COMPACT", "FREE", "FORK", "COPY", "FIRST_TOKEN", "PREEMPT", "RESUME", "RECOVER"),
    *("OFFLOAD", "LOAD_START", "LOAD", "DROP", "KEYS", "FINISH", "REJECT", "HEADER", "END"),
)
"""The kinds of rows. EVICT of scope `sequence` is FORGET, so that a row has one meaning."""

KIND = {name: number for number, name in enumerate(KINDS)}

WHY = ("absent", "partial", "expired", "no keys")
COMMITTED = ("new", "grown", "same", "shared")
FREED = ("close", "duplicate", "rollback")
PREEMPTED = ("pause", "recompute", "swap")
DROPPED = ("capacity", "expired", "moved", "parked", "corrupt", "gone", "failed")

WORDS = {
    "kinds": KINDS,
    "why": WHY,
    "committed": COMMITTED,
    "freed": FREED,
    "preempted": PREEMPTED,
    "dropped": DROPPED,
}
"""What numbers in columns stand for."""

COLUMNS = ("kind", "request", "a", "b", "c", "d", "e", "runs")
"""Of each row: its event, its request (by number), five values, and how many runs of blocks.

| kind | a | b | c | d | e | runs |
|---|---|---|---|---|---|---|
| HIT | sequence | blocks | span | again | | |
| MISS | sequence | block | why | again | | |
| PREFETCH | sequence | blocks | span or -1 | | | |
| SPLIT | span | upper half | at | | | |
| ALLOC | sequence | first | | | | blocks |
| COMMIT | sequence | span | blocks | how | | |
| EVICT | span | hits | expired | whose | end | blocks |
| FORGET | sequence | first | blocks | | | freed |
| COMPACT | sequence | tokens | held | runs freed | | freed, then all it has now |
| FREE | sequence | reason | | runs freed | | freed; of a rollback also all it has now |
| FORK | sequence | child | | | | |
| COPY | sequence | block | from | to | | |
| FIRST_TOKEN, RESUME | sequence | | | | | |
| PREEMPT | sequence | how | for whom or -1 | | | |
| FINISH | sequence | output | | | | |
| OFFLOAD | tier | first | blocks | tier it comes from, -1, or -2: parked | | |
| LOAD_START, LOAD | tier | first | blocks | sequence | | |
| DROP | tier | first | blocks | reason | | |
| RECOVER | tier | first | blocks | | | |

The request of an EVICT is the one that needed the room; `whose` is a request whose prompt has
the blocks, and `end` the position there after the last of them. `time` holds how much later (ns)
a row is than the one before; `age` (ns) is of EVICT, and for OFFLOAD and LOAD_START how long it
takes.
"""


@attrs.define
class Prompts:
    """The prompts of a trace, by request number: lengths, and whose content they have.

    Attributes:
        ids: of the requests.
        tokens, output: lengths in tokens.
        blocks: blocks that have a key, and so a content that another prompt can have.
        lookup: how many of them are looked up.
        leader, shared: the request that first had the block before `shared`, and how many
            blocks from the first on are the same; -1 and 0 if no earlier prompt begins alike.
        last_key: the last of the prompt's keys, None if it has none.
    """

    ids: list[int | str] = attrs.field(factory=list)
    tokens: array[int] = attrs.field(factory=lambda: array("q"))
    output: array[int] = attrs.field(factory=lambda: array("q"))
    blocks: array[int] = attrs.field(factory=lambda: array("q"))
    lookup: array[int] = attrs.field(factory=lambda: array("q"))
    leader: array[int] = attrs.field(factory=lambda: array("q"))
    shared: array[int] = attrs.field(factory=lambda: array("q"))
    last_key: list[Any] = attrs.field(factory=list)
    _first: dict[Any, int] = attrs.field(factory=dict, init=False)

    def add(self, prompt: TracedPrompt, output: int, ratio: int) -> None:
        """Append a request. O(log keys), and its keys in C."""
        number, keys, first = len(self.ids), prompt.keys, self._first
        # Keys are chained: where one is known, those before it are.
        known = bisect_left(keys, True, key=lambda key: key not in first)  # noqa: FBT003
        self.ids.append(prompt.id)
        self.tokens.append(prompt.tokens)
        self.output.append(output)
        self.blocks.append(len(keys) * ratio)
        self.lookup.append(prompt.lookup)
        self.leader.append(first[keys[known - 1]] if known else NONE)
        self.shared.append(known * ratio)
        self.last_key.append(keys[-1] if keys else None)
        first.update(dict.fromkeys(keys[known:], number))

    def arrive(self, number: int, prompt: TracedPrompt, output: int) -> None:
        """Record the lengths of a request that was announced before, with the same keys."""
        self.tokens[number], self.output[number] = prompt.tokens, output
        self.lookup[number] = prompt.lookup

    def of_key(self, key: Any) -> int:
        """Return the request that first had the block of a key."""
        return self._first[key]

    def extend(self, number: int, keys: Iterable[Any], blocks: int) -> None:
        """Record keys of blocks that a request generated, and how many blocks have one now."""
        self.blocks[number] = blocks
        for key in keys:
            self._first.setdefault(key, number)


@attrs.frozen
class EvictedContent:
    """What an EVICT line took, by block keys, so that two traces can be compared.

    Attributes:
        row: of the line.
        requester: the request that needed the room.
        keys: of the whole prompt that stored the blocks.
        first, end: their positions `[first, end)` in it.
    """

    row: int
    requester: int | str
    keys: list[Any]
    first: int
    end: int


class Playback:
    """The rows of a trace, which is checked while it is read.

    Attributes:
        file: its name.
        header: the first line.
        rows: the columns of `COLUMNS`, and `time` and `age` in ns.
        run_first, run_count: the runs of blocks of all rows, one after another.
        prompts: of the requests.
        evicted: what EVICT lines took, in their order.
        explanation: why requests missed.
    """

    def __init__(self, file: str | os.PathLike[str], tick: Tick = unseen) -> None:
        """Read a trace. Costs about 30 µs a line.

        Raises:
            InputError: the file cannot be opened.
            TraceError: a line is damaged, contradicts what came before, or the file is cut.
        """
        reader = TraceReader(file)
        self.file = str(reader.file)
        self.header: dict[str, Any] = {}
        self.rows = {name: array("i") for name in COLUMNS}
        self.rows |= {name: array("q") for name in ("time", "age")}
        self.run_first, self.run_count = array("i"), array("i")
        self.prompts = Prompts()
        self.evicted: list[EvictedContent] = []
        self._now = 0
        self._numbers: dict[int | str, int] = {}
        self._of_sequence: dict[int, int] = {}
        self._tiers: dict[str, int] = {}
        checker: TraceChecker | None = None
        record: dict[str, Callable[[Any], None]] = {}
        victim: TracedSpan | None = None
        try:
            for event in ticked(reader, tick):
                if checker is not None and event.event == "EVICT":
                    victim = checker.state.spans.get(getattr(event, "span", NONE))
                    self._victim_end = 0 if victim is None else victim.end
                made = checker is None
                checker = check_event(reader, checker, event)
                if made:
                    self._state = checker.state
                    self.header = event.as_dict()
                    record = {name: getattr(self, f"_{name.lower()}") for name in KINDS}
                    names = [tier["tier"] for tier in self.header.get("tiers", ())]
                    self._tiers = {name: number for number, name in enumerate(names)}
                if event.event == "EVICT" and victim is not None:
                    self._evict(event, victim)  # type: ignore[arg-type]  # of scope `cache`
                else:
                    record["FORGET" if event.event == "EVICT" else event.event](event)
                victim = None
        except OverflowError as error:
            reader.fail(f"a number is larger than a page can show ({error})")
        if not reader.complete:
            msg = f"{self.file}: incomplete: {reader.cut_reason}"
            raise TraceError(msg)
        self.explanation: Explanation = explain(file)

    @property
    def ratio(self) -> int:
        """How many blocks a key covers."""
        return self._state.layout.ratio

    def _row(
        self,
        event: events.Event,
        request: int = NONE,
        *values: int,
        runs: Sequence[tuple[int, int]] = (),
        kind: str | None = None,
        age: int = 0,
    ) -> None:
        """Append a row; values that are not given are 0."""
        rows = self.rows
        a, b, c, d, e, *_ = (*values, 0, 0, 0, 0, 0)
        rows["kind"].append(KIND[kind or event.event])
        rows["request"].append(request)
        rows["a"].append(a)
        rows["b"].append(b)
        rows["c"].append(c)
        rows["d"].append(d)
        rows["e"].append(e)
        rows["runs"].append(len(runs))
        rows["age"].append(age)
        rows["time"].append(event.t - self._now)
        self._now = event.t
        for first, count in runs:
            self.run_first.append(first)
            self.run_count.append(count)

    def _plain(self, event: Any) -> None:
        self._row(event)

    _header = _end = _plain

    def _request(self, event: events.Request) -> None:
        number = self._numbers.get(event.id)
        prompt = self._state.requests[event.id]
        if number is None:
            number = self._numbers[event.id] = len(self._numbers)
            self.prompts.add(prompt, event.output, self.ratio)
        else:  # announced by a PREFETCH
            self.prompts.arrive(number, prompt, event.output)
        self._row(event, number)

    def _prefetch(self, event: events.Prefetch) -> None:
        number = self._numbers[event.request] = len(self._numbers)
        prompt = self._state.requests[event.request]
        self.prompts.add(prompt, 0, self.ratio)
        self._of_sequence[event.seq] = number
        span = event.span if isinstance(event.span, int) else NONE
        self._row(event, number, event.seq, event.blocks, span)

    def _hit(self, event: events.Hit) -> None:
        number = self._of_sequence[event.seq] = self._numbers[event.request]
        self._row(event, number, event.seq, event.blocks, event.span, bool(event.again))

    def _miss(self, event: events.Miss) -> None:
        number = self._of_sequence[event.seq] = self._numbers[event.request]
        why = WHY.index(event.why)
        self._row(event, number, event.seq, event.block, why, bool(event.again))

    def _split(self, event: events.Split) -> None:
        self._row(event, NONE, event.span, event.upper, event.at)

    def _alloc(self, event: events.Alloc) -> None:
        owner = self._of_sequence[event.seq]
        self._row(event, owner, event.seq, event.first, runs=event.runs)

    def _commit(self, event: events.Commit) -> None:
        owner, how = self._of_sequence[event.seq], COMMITTED.index(event.how)
        self._row(event, owner, event.seq, event.span, event.blocks, how)

    def _evict(self, event: events.Evict, victim: TracedSpan) -> None:
        place = victim.keys, victim.end, self._victim_end
        self.evicted.append(EvictedContent(len(self.rows["kind"]), event.requester, *place))
        requester = self._numbers[event.requester]
        expired = event.reason == "expired"
        whose = self.prompts.of_key(victim.keys[(self._victim_end - 1) // self.ratio])
        values = event.span, event.hits, expired, whose, self._victim_end
        self._row(event, requester, *values, runs=event.runs, age=event.age)

    def _forget(self, event: events.Drop) -> None:
        owner, place = self._of_sequence[event.seq], (event.first, event.blocks)
        self._row(event, owner, event.seq, *place, runs=event.runs, kind="FORGET")

    def _compact(self, event: events.Compact) -> None:
        runs = [*event.runs, *self._private(event.seq)]
        values = event.seq, event.tokens, event.held, len(event.runs)
        self._row(event, self._of_sequence[event.seq], *values, runs=runs)

    def _free(self, event: events.Free) -> None:
        runs, reason = event.runs, FREED.index(event.reason)
        if event.reason == "rollback":
            runs = [*runs, *self._private(event.seq)]
        values = event.seq, reason, 0, len(event.runs)
        self._row(event, self._of_sequence[event.seq], *values, runs=runs)

    def _private(self, seq: int) -> list[tuple[int, int]]:
        """Return the private blocks of a sequence, as they are after the line."""
        return [
            (first, count) for first, count in encode_runs(self._state.sequences[seq].private)
        ]

    def _fork(self, event: events.Fork) -> None:
        owner = self._of_sequence[event.child] = self._of_sequence[event.seq]
        self._row(event, owner, event.seq, event.child)

    def _copy(self, event: events.Copy) -> None:
        values = event.seq, event.block, event.source, event.to
        self._row(event, self._of_sequence[event.seq], *values)

    def _first_token(self, event: events.FirstToken | events.Resume) -> None:
        self._row(event, self._numbers[event.request], event.seq)

    _resume = _first_token

    def _preempt(self, event: events.Preempt) -> None:
        requester = NONE if not event.requester else self._numbers.get(event.requester, NONE)
        values = event.seq, PREEMPTED.index(event.how), requester
        self._row(event, self._numbers[event.request], *values)

    def _finish(self, event: events.Finish) -> None:
        self._row(event, self._numbers[event.request], event.seq, event.output)

    def _keys(self, event: events.Keys) -> None:
        number, prompt = self._numbers[event.request], self._state.requests[event.request]
        blocks = prompt.cacheable * self.ratio
        self.prompts.extend(number, event.keys, blocks)
        self._row(event, number)

    def _reject(self, event: events.Reject) -> None:
        self._row(event, self._numbers[event.request])

    def _recover(self, event: events.Recover) -> None:
        number = self._numbers[event.request] = len(self._numbers)
        prompt = self._state.requests[event.request]
        self.prompts.add(prompt, 0, self.ratio)
        self._row(event, number, self._tiers[event.tier], event.first, event.blocks)

    def _offload(self, event: events.Offload) -> None:
        source = self._tiers[event.source] if event.source else PARKED if event.parked else NONE
        values = self._tiers[event.tier], event.first, event.blocks, source
        age = event.done - event.t
        self._row(event, self._numbers[event.request], *values, age=age)

    def _load_start(self, event: events.LoadStart) -> None:
        self._move(event, event.done - event.t)

    def _load(self, event: events.Load) -> None:
        self._move(event, 0)

    def _move(self, event: events.LoadStart | events.Load, age: int) -> None:
        values = self._tiers[event.tier], event.first, event.blocks, event.seq
        self._row(event, self._numbers[event.request], *values, age=age)

    def _drop(self, event: events.Discard) -> None:
        reason = DROPPED.index(event.reason)
        values = self._tiers[event.tier], event.first, event.blocks, reason
        self._row(event, self._numbers[event.request], *values)

    def document(self) -> dict[str, Any]:
        """Return what is JSON of the playback: the run, and its requests."""
        prompts, explanation = self.prompts, self.explanation
        found = [explanation.requests.get(request) for request in prompts.ids]
        size = self.header["block_size"]
        reports = (
            None if reasons is None else str(RequestReport(explanation, reasons))
            for reasons in found
        )
        return {
            "file": self.file,
            "header": self.header,
            "setup": setup(self.header),
            "words": WORDS,
            "prefill": {
                "token": explanation.cost.token_seconds,
                "pairs": explanation.cost.pair_seconds,
                **{name: getattr(explanation.cost, name) for name in ("model", "device")},
            },
            "requests": {
                "id": list(map(str, prompts.ids)),
                **{name: getattr(prompts, name).tolist() for name in PROMPT_COLUMNS},
                "hit": [each.hit // size if each else 0 for each in found],
                "optimum": [each.optimum // size if each else 0 for each in found],
                "why": list(reports),
            },
        }

    def columns(self) -> bytes:
        """Return the rows as planes of bytes: see `pack`."""
        runs = {"run_first": self.run_first, "run_count": self.run_count}
        return pack(self.rows | runs)


PROMPT_COLUMNS = ("tokens", "output", "blocks", "lookup", "leader", "shared")


def pack(columns: Mapping[str, array[int]]) -> bytes:
    """Return columns as bytes that compress well and that a browser reads at memory's speed.

    A line of JSON with the name, type and length of each, then the columns, each plane by
    plane: the lowest bytes of all numbers, the next ones, and so on, little-endian. Most high
    planes are zeros, which take no room once compressed.
    """
    about, planes = [], []
    for name, column in columns.items():
        ordered = column if byteorder == "little" else array(column.typecode, column)
        if ordered is not column:
            ordered.byteswap()
        raw = ordered.tobytes()
        about.append({"name": name, "bytes": column.itemsize, "length": len(column)})
        planes += [raw[plane :: column.itemsize] for plane in range(column.itemsize)]
    return orjson.dumps(about) + b"\n" + b"".join(planes)
