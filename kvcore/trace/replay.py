"""Replay: rebuild what a trace says happened, and check that it could have happened."""

from __future__ import annotations

import os
from typing import Any

import attrs

from kvcore.trace.lives import Lives
from kvcore.trace.reader import Line, TraceReader
from kvcore.trace.schema import SCHEMA
from kvcore.trace.state import CacheState
from kvcore.trace.tables import Hits


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
