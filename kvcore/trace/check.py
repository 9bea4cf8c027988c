"""Replay: rebuild what a trace says happened, and check that it could have happened."""

from __future__ import annotations

import os
from typing import Any

import attrs

from kvcore.cache import Residency
from kvcore.errors import TraceError
from kvcore.trace.events import SCHEMA
from kvcore.trace.lifecycle import Lives
from kvcore.trace.reader import Line, TraceReader
from kvcore.trace.spans import Hits, path
from kvcore.trace.state import CacheState


@attrs.frozen
class Report:
    """What a trace holds, up to its end or to the time asked for.

    Attributes:
        file: the path, as given.
        complete: whether the file has its END; if not, `cut_reason` says where it stops.
        lines: lines read, HEADER and END included; `events` is their number by event.
        pool: blocks `free`, `cached` and `private`, and the number of `spans`.
        requests: how many REQUEST lines there were; `finished` and `rejected` of them have
            ended.
        preemptions: how often one was preempted, by kind: `pause` and `recompute`.
        hit: lookup, hit and self-hit blocks of the admissions, and the hit ratio by block
            and by request (null without lookups).
    """

    file: str
    complete: bool
    cut_reason: str | None
    lines: int
    events: dict[str, int]
    pool: dict[str, int]
    requests: int
    finished: int
    rejected: int
    preemptions: dict[str, int]
    hit: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it, with the schema number."""
        fields = attrs.asdict(self)
        del fields["cut_reason"]
        return {"schema": SCHEMA, **fields}


def replay(file: str | os.PathLike[str], at: int | None = None) -> Report:
    """Read a trace, check every line against the state that the lines before it make.

    `at` (ns) asks for the state after the last line not later than that; the lines after
    it are checked all the same. Costs about 10 µs a line.

    Raises:
        InputError: the file cannot be opened.
        TraceError: a line is damaged, or contradicts what came before: file, line, reason.
    """
    reader = TraceReader(file)
    state: CacheState | None = None
    events: dict[str, int] = {}
    report: Report | None = None
    for line in reader:
        if at is not None and report is None and line["t"] > at:
            report = _report(reader, state, events)
        state = advanced(reader, state, line)
        event = line["event"]
        events[event] = events.get(event, 0) + 1
    report = report or _report(reader, state, events)
    return attrs.evolve(report, complete=reader.complete, cut_reason=reader.cut_reason)


def advanced(reader: TraceReader, state: CacheState | None, line: Line) -> CacheState:
    """Return the state after `line`, which `reader` has just read; None comes before HEADER.

    Raises:
        TraceError: the line contradicts what came before: file, line, reason.
    """
    try:
        if state is None:
            return CacheState(line)
        state.apply(line)
    except ValueError as error:
        reader.fail(f"{line['event']}: {error}")
    return state


def _report(reader: TraceReader, state: CacheState | None, events: dict[str, int]) -> Report:
    pool = dict.fromkeys(("free", "cached", "private", "spans"), 0)
    lives, hits = Lives("untimed"), Hits()
    if state is not None:
        lives, hits = state.lives, state.hits
        pool |= {"free": state.free, "cached": state.cached, "private": state.private}
        pool["spans"] = len(state.spans)
    return Report(
        file=str(reader.file),
        complete=reader.complete,
        cut_reason=reader.cut_reason,
        lines=sum(events.values()),
        events=dict(events),
        pool=pool,
        requests=events.get("REQUEST", 0),
        finished=lives.finished,
        rejected=lives.rejected,
        preemptions=dict(lives.preemptions),
        hit=hits.as_dict(),
    )


def residency(file: str | os.PathLike[str]) -> Residency:
    """Return what a `Residency` would have been told in the run that a trace has recorded.

    The state before each line says how old its blocks are: a HIT ages the spans on its path,
    a COMMIT stores, an EVICT of scope `cache` ends lives, and the halves of a SPLIT have one
    birth. Every line is checked, as by `replay`. Costs some 10 µs a line.

    Raises:
        InputError: the file cannot be opened.
        TraceError: a line is damaged, contradicts what came before, or the file is cut.
    """
    reader = TraceReader(file)
    state: CacheState | None = None
    listener: _Listener | None = None
    for line in reader:
        if listener is not None:
            listener.hear(line)
        state = advanced(reader, state, line)
        listener = listener or _Listener(line, state)
    if listener is None or not reader.complete:
        msg = f"{reader.file}: incomplete: {reader.cut_reason}"
        raise TraceError(msg)
    return listener.seen


class _Listener:
    """Tells a `Residency` of each line before it is checked; a wrong one ends it all."""

    def __init__(self, header: Line, state: CacheState) -> None:
        self.seen = Residency(header["blocks"])
        self._state = state
        self._ratio = max(1, header["key_tokens"] // header["block_size"])
        self._born: dict[int, int] = {}

    def hear(self, line: Line) -> None:
        """Take in a line."""
        event = line["event"]
        if event == "HIT" and "again" not in line:
            self._hit(line)
        elif event == "SPLIT":
            self._born[line["upper"]] = self._born.get(line["span"], 0)
        elif event == "COMMIT" and line["how"] in ("new", "grown"):
            self._stored(line)
        elif event == "EVICT" and line["scope"] == "cache":
            self._evicted(line)

    def _hit(self, line: Line) -> None:
        span = self._state.spans.get(line["span"])
        if span is not None:
            for each in path(span):
                self.seen.record_hit(line["t"] - each.last_access, len(each.ids))

    def _stored(self, line: Line) -> None:
        self._born.setdefault(line["span"], line["t"])
        seq, first = self._state.sequences.get(line["seq"]), line["first"]
        if seq is not None:
            self.seen.record_store(seq.prompt.keys, first, first + line["blocks"], self._ratio)

    def _evicted(self, line: Line) -> None:
        span = self._state.spans.get(line["span"])
        if span is None:
            return
        blocks = sum(abs(count) for _, count in line["runs"])
        rested = line["age"], line["t"] - self._born[span.id], line["hits"]
        place = span.keys, span.end - blocks, span.end, self._ratio
        self.seen.record_evict(*place, rested, line["reason"])
        if blocks == len(span.ids):
            del self._born[span.id]
