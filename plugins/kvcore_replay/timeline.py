"""The timeline of a trace: its requests, their phases, and the pool over time, in columns."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from itertools import compress
from math import nan
from typing import Any

import attrs

from kvcore.progress import Tick, unseen
from kvcore.trace import events
from kvcore.trace.events import methods_by_event
from kvcore_replay.state.cache import run_blocks, take_by
from kvcore_replay.state.groups import GroupState, state_of
from kvcore_replay.state.replicas import ServerReader

NEVER = -1
"""The time of an event that did not happen, and the row of no request."""

UNSTEPPED = frozenset({"REQUEST", "REJECT", "PREFETCH", "OFFLOAD", "LOAD", "DROP", "END"})
"""Events that can occur while a step runs."""


class Kind(IntEnum):
    """The state of a request in a phase."""

    QUEUED = 0
    """Waits for its first admission."""
    LOADING = 1
    """Is admitted, and waits for blocks from a tier."""
    PREFILL = 2
    """Its prompt is computed, or after a preemption all that was dropped."""
    DECODE = 3
    """Generates its output."""
    PREEMPTED = 4
    """Was preempted, and waits to run again."""

    @property
    def waits(self) -> bool:
        """Whether the request is not in the batch."""
        return self in (Kind.QUEUED, Kind.PREEMPTED)


_times: Callable[[], array[int]] = partial(array, "q")
_numbers: Callable[[], array[int]] = partial(array, "i")
_bytes: Callable[[], array[int]] = partial(array, "b")


@attrs.define(eq=False)
class Requests:
    """The requests of a trace, one row a REQUEST line, in their order.

    Attributes:
        ids: ids of the requests.
        arrival, admitted, first_token, finish: times in ns; -1 if the event did not happen.
            Without a clock no first token is recorded, and a request finishes when it is
            closed.
        prompt, output: tokens of the prompt, and of the output: those requested, and once the
            request has finished those generated.
        lookup, hit: blocks that the first admission looked up and hit.
        rejected: by row, the reason why a request was rejected.
    """

    ids: list[int | str] = attrs.field(factory=list)
    arrival: array[int] = attrs.field(factory=_times)
    admitted: array[int] = attrs.field(factory=_times)
    first_token: array[int] = attrs.field(factory=_times)
    finish: array[int] = attrs.field(factory=_times)
    prompt: array[int] = attrs.field(factory=_times)
    output: array[int] = attrs.field(factory=_times)
    lookup: array[int] = attrs.field(factory=_times)
    hit: array[int] = attrs.field(factory=_times)
    rejected: dict[int, str] = attrs.field(factory=dict)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.ids)

    def add(self, event: events.Request) -> int:
        """Add the request of a REQUEST line; return its row."""
        self.ids.append(event.id)
        self.arrival.append(event.t)
        for never in (self.admitted, self.first_token, self.finish):
            never.append(NEVER)
        self.prompt.append(event.prompt)
        self.output.append(event.output)
        self.lookup.append(0)
        self.hit.append(0)
        return len(self.ids) - 1


@attrs.define(eq=False)
class Phases:
    """The phases of the requests of a trace, one row per phase, in order of their start.

    The phases of a request follow one another without gaps from its arrival to its finish;
    those that last no time are left out. A phase that lasts when the trace ends, ends there.
    No event marks the time at which a preempted request has recomputed its tokens. It is taken
    to be the COMMIT of the last block that the request can share, its next ALLOC or, if it hits
    all those blocks, the end of the next step that has an event.

    Attributes:
        request: rows of `Requests`.
        kind: values of `Kind`.
        start, end: times in ns.
        requester: row of the request that caused a preemption; -1: there is none.
    """

    request: array[int] = attrs.field(factory=_numbers)
    kind: array[int] = attrs.field(factory=_bytes)
    start: array[int] = attrs.field(factory=_times)
    end: array[int] = attrs.field(factory=_times)
    requester: array[int] = attrs.field(factory=_numbers)

    def __len__(self) -> int:
        """Return the number of phases."""
        return len(self.request)

    def __iter__(self) -> Iterator[tuple[int, Kind, int, int, int]]:
        """Yield the rows: request, kind, start, end, requester."""
        for request, kind, *rest in zip(*attrs.astuple(self, recurse=False), strict=True):
            yield (request, Kind(kind), *rest)

    def lasting(self) -> Phases:
        """Return the phases that end after they start."""
        lasts = [end > start for start, end in zip(self.start, self.end, strict=True)]
        columns = attrs.astuple(self, recurse=False)
        return Phases(*(array(old.typecode, compress(old, lasts)) for old in columns))


@attrs.define(eq=False)
class Chunks:
    """The ends of the chunks of prefills, as far as COMMIT events show them, in order of time.

    A step that completes no block that can be shared has no such event.

    Attributes:
        request: rows of `Requests`.
        time: times in ns.
    """

    request: array[int] = attrs.field(factory=_numbers)
    time: array[int] = attrs.field(factory=_times)

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.time)


GAUGES = ("free", "cached", "private", "waiting", "running")
"""Columns of a `Series` whose values rise and fall."""

_COLUMNS = 2 + 2 * len(GAUGES)
"""The most rows of a bucket: its first and last, and two extremes per gauge."""


@attrs.define(eq=False)
class Series:
    """A pool and its queue over time: one row for each time at which a trace has events.

    A row has the state after the last event of its time, which holds up to the next row.

    Attributes:
        time: times in ns.
        free, cached, private: blocks; their sum is the pool.
        waiting: requests that are queued, were preempted or are paused.
        running: requests that are admitted, including those that wait for a load from a tier.
        lookup_blocks, hit_blocks: lookups and hits of first admissions so far.
        evicted_blocks: blocks that left the cache so far, for room or because they expired.
        tiers: slots in use, by the name of the tier, nearest first.
        groups: cached and private blocks of each cache group, by its number and kind; none
            where all layers are one.
    """

    time: array[int] = attrs.field(factory=_times)
    free: array[int] = attrs.field(factory=_numbers)
    cached: array[int] = attrs.field(factory=_numbers)
    private: array[int] = attrs.field(factory=_numbers)
    waiting: array[int] = attrs.field(factory=_numbers)
    running: array[int] = attrs.field(factory=_numbers)
    lookup_blocks: array[int] = attrs.field(factory=_times)
    hit_blocks: array[int] = attrs.field(factory=_times)
    evicted_blocks: array[int] = attrs.field(factory=_times)
    tiers: dict[str, array[int]] = attrs.field(factory=dict)
    groups: dict[str, array[int]] = attrs.field(factory=dict)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.time)

    def thinned(self, points: int) -> Series:
        """Return at most `points` rows, or 12 if `points` is less, that draw the same shape.

        Time is divided into equal buckets. In each the first and the last row are kept, and
        those in which a gauge is lowest or highest: so no peak of the pool's blocks or of
        requests is lost, and cumulative counts are those of the times that are kept.
        Costs O(rows).
        """
        rows = len(self)
        if rows <= max(points, _COLUMNS):
            return self
        first, span = self.time[0], self.time[-1] - self.time[0] + 1
        buckets = max(1, points // _COLUMNS)
        gauges = [getattr(self, name) for name in GAUGES]
        kept: list[int] = []
        low = 0
        for bucket in range(1, buckets + 1):
            high = bisect_left(self.time, first + -(-span * bucket // buckets), low)
            if high > low:
                within = range(low, high)
                chosen = {low, high - 1}
                for gauge in gauges:
                    chosen.add(min(within, key=gauge.__getitem__))
                    chosen.add(max(within, key=gauge.__getitem__))
                kept += sorted(chosen)
            low = high
        return self._rows(kept)

    def _rows(self, rows: list[int]) -> Series:
        def pick(column: array[int]) -> array[int]:
            return array(column.typecode, map(column.__getitem__, rows))

        columns: dict[str, Any] = {}
        for name in attrs.fields_dict(Series):
            column = getattr(self, name)
            named = isinstance(column, dict)
            columns[name] = {n: pick(c) for n, c in column.items()} if named else pick(column)
        return Series(**columns)

    def hit_ratio(self, window_ns: int | None = None) -> array[float]:
        """Return, for each row, the share of the looked-up blocks that hit.

        It counts admissions in the `window_ns` up to and including the time of the row; None:
        in all time before. NaN if nothing was looked up. Costs O(rows).
        """
        lookups, hits = self.lookup_blocks, self.hit_blocks
        ratios = array("d")
        oldest, looked, hit = 0, 0, 0
        for now, lookup, hits_now in zip(self.time, lookups, hits, strict=True):
            while window_ns is not None and self.time[oldest] <= now - window_ns:
                looked, hit, oldest = lookups[oldest], hits[oldest], oldest + 1
            ratios.append((hits_now - hit) / (lookup - looked) if lookup > looked else nan)
        return ratios


@attrs.define(eq=False)
class Timeline:
    """The events of a trace by time, in columns; all times are in ns.

    Attributes:
        source: path of the trace.
        header: its first line as a JSON object.
        complete: whether the trace has its END.
        cut_reason: where an incomplete trace stops.
        lines: number of lines that were read, HEADER and END included.
        begin, end: times of the first line after HEADER, and of the last one.
        requests, phases, chunks, series: the columns.
    """

    source: str
    header: dict[str, Any]
    complete: bool
    cut_reason: str | None
    lines: int
    begin: int
    end: int
    requests: Requests
    phases: Phases
    chunks: Chunks
    series: Series

    @classmethod
    def read(
        cls,
        file: str | os.PathLike[str],
        *,
        replica: int | str | None = None,
        tick: Tick = unseen,
    ) -> Timeline:
        """Return the timeline of a trace of any mode, which may be cut.

        A file with a right digest is trusted: `kvcore_replay.check.check_trace` checks whether
        its events are possible. One pass, O(lines); about 60 bytes of memory per distinct time,
        100 per request and 30 per phase, besides the state of the cache.

        Args:
            file: the trace.
            replica: the number of a replica of a cluster, with that of its life if it failed
                (`1:2`).
            tick: called with the bytes of the file that have been read.

        Raises:
            InputError: the file cannot be opened.
            TraceError: the file has no HEADER, or a line is damaged or contradicts earlier
            ones.
        """
        reader = ServerReader(file, replica)
        builder = reader.feed(TimelineBuilder, tick)
        builder.end()
        return cls(
            source=str(reader.file),
            header=builder.state.header.as_dict(),
            complete=reader.complete,
            cut_reason=reader.cut_reason,
            lines=reader.line,
            begin=builder.series.time[0],
            end=builder.series.time[-1],
            requests=builder.requests,
            phases=builder.phases.lasting(),
            chunks=builder.chunks,
            series=builder.series,
        )


class TimelineBuilder:
    """Makes a timeline while the events of a trace are read.

    Attributes:
        state: the state of the cache, rebuilt.
        waiting, running, evicted_blocks: the values of the next row of the series.
        requests, phases, chunks, series: the columns so far.
    """

    def __init__(self, header: events.Header) -> None:
        self.state: Any = state_of(header)
        self.waiting = self.running = self.evicted_blocks = 0
        self.requests = Requests()
        self.phases = Phases()
        self.chunks = Chunks()
        names = [] if self.state.tiers is None else self.state.tiers.levels
        groups = map(str, self.state.groups) if isinstance(self.state, GroupState) else ()
        self.series = Series(
            tiers={name: array("i") for name in names},
            groups={name: array("i") for name in groups},
        )
        self._untimed = header.mode == "untimed"
        self._now: int | None = None
        self._start = header.t
        self._rows: dict[int | str, int] = {}
        # By open sequence, the row of its request; by row, the number of open sequences.
        self._row_of: dict[int, int] = {}
        self._open = array("i")
        # By row, the row of its current phase, or -1; and its phase before a pause.
        self._phase = array("i")
        self._before: dict[int, Kind] = {}
        # Resumed requests that hit all blocks that they can share: no COMMIT will mark when the
        # rest is computed, which mostly is the end of the next step.
        self._returned: list[int] = []
        self._take = methods_by_event(
            self,
            *("REQUEST", "MISS", "LOAD_START", "LOAD", "ALLOC", "COMMIT", "EVICT"),
            *("FIRST_TOKEN", "PREEMPT", "RESUME", "FINISH", "REJECT", "FREE", "FORK"),
        )
        self._take["HIT"] = self._miss

    def take(self, event: events.Event) -> None:
        """Apply the next event after HEADER.

        Raises:
            ViolationError: the event names a request, span or sequence that does not exist.
        """
        if event.t != self._now:
            if self._now is not None:
                self._add_row(self._now)
            self._now = event.t
        if self._returned and event.event not in UNSTEPPED:
            self._step(event.t)
        self.state.apply(event)
        take_by(self._take, event)

    def end(self) -> None:
        """Add the last row, and end the current phases: no event follows."""
        now = self._start if self._now is None else self._now
        self._add_row(now)
        for row in self._phase:
            if row >= 0:
                self.phases.end[row] = now

    def _add_row(self, now: int) -> None:
        state, series = self.state, self.series
        series.time.append(now)
        series.free.append(state.free)
        series.cached.append(state.cached)
        series.private.append(state.private)
        series.waiting.append(self.waiting)
        series.running.append(self.running)
        series.lookup_blocks.append(state.hits.lookup_blocks)
        series.hit_blocks.append(state.hits.hit_blocks)
        series.evicted_blocks.append(self.evicted_blocks)
        if state.tiers is not None:
            for name, tier in state.tiers.levels.items():
                series.tiers[name].append(tier.used)
        if series.groups:
            for used, blocks in zip(series.groups.values(), state.used_by_group, strict=True):
                used.append(blocks)

    def _current(self, row: int) -> Kind | None:
        """Return the current phase of a request; None if it has none."""
        phase = self._phase[row]
        return Kind(self.phases.kind[phase]) if phase >= 0 else None

    def _begin(self, row: int, kind: Kind | None, now: int, requester: int = NEVER) -> None:
        """End the current phase of a request, and begin one of `kind`, unless that is None."""
        phases, last = self.phases, self._current(row)
        if last is not None:
            phases.end[self._phase[row]] = now
            self._count(last, -1)
        self._phase[row] = NEVER if kind is None else len(phases)
        if kind is not None:
            self._count(kind, 1)
            phases.request.append(row)
            phases.kind.append(kind)
            phases.start.append(now)
            phases.end.append(now)
            phases.requester.append(requester)

    def _count(self, kind: Kind, change: int) -> None:
        if kind.waits:
            self.waiting += change
        else:
            self.running += change

    def _request(self, event: events.Request) -> None:
        row = self._rows[event.id] = self.requests.add(event)
        self._open.append(0)
        self._phase.append(NEVER)
        self._begin(row, Kind.QUEUED, event.t)

    def _miss(self, event: events.Hit | events.Miss) -> None:
        """Apply a HIT or MISS line; the first one of an admission opens a sequence."""
        if event.seq in self._row_of:
            return
        requests, row = self.requests, self._rows[event.request]
        self._row_of[event.seq] = row
        self._open[row] += 1
        if requests.admitted[row] < 0:
            requests.admitted[row] = event.t
            requests.lookup[row] = self.state.requests[event.request].lookup
            requests.hit[row] = getattr(event, "blocks", 0)
        elif self._current(row) is None:
            # Without a clock a request can be opened again: then it has not finished yet.
            self._begin(row, Kind.PREEMPTED, requests.finish[row])
            requests.finish[row] = NEVER
        self._begin(row, Kind.PREFILL, event.t)
        if requests.first_token[row] >= 0:
            prompt = self.state.requests[event.request]
            if getattr(event, "blocks", 0) >= prompt.cacheable:
                self._returned.append(row)

    def _step(self, now: int) -> None:
        """Begin to decode requests that were resumed before the step that ended at `now`."""
        later = []
        for row in self._returned:
            if self._current(row) is not Kind.PREFILL:
                continue
            if self.phases.start[self._phase[row]] < now:
                self._prefilled(row, now)
            else:
                later.append(row)
        self._returned = later

    def _load_start(self, event: events.LoadStart) -> None:
        row = self._row_of.get(event.seq)
        if row is not None and self._current(row) is Kind.PREFILL:
            self._begin(row, Kind.LOADING, event.t)

    def _load(self, event: events.Load) -> None:
        row = self._row_of.get(event.seq)
        if row is not None and self._current(row) is Kind.LOADING:
            self._begin(row, Kind.PREFILL, event.t)

    def _commit(self, event: events.Commit) -> None:
        row = self._row_of.get(event.seq)
        if row is None or event.how == "shared" or self._current(row) is not Kind.PREFILL:
            return
        if event.t > self.phases.start[self._phase[row]]:
            self._add_chunk(row, event.t)
        seq = self.state.sequences[event.seq]
        if self._stored(seq) >= seq.prompt.cacheable:
            self._prefilled(row, event.t)

    def _add_chunk(self, row: int, now: int) -> None:
        """Add the end of a chunk, which each cache group has a COMMIT of."""
        requests, times = self.chunks.request, self.chunks.time
        if self.series.groups and times and (requests[-1], times[-1]) == (row, now):
            return
        requests.append(row)
        times.append(now)

    def _stored(self, seq: Any) -> Any:
        """Return the number of first blocks of a sequence that are committed."""
        if self.series.groups:
            pairs = zip(self.state.groups, seq.tables, strict=True)
            tokens = max(table.stored * group.size for group, table in pairs)
            return tokens // self.state.header.block_size
        return seq.span.end

    def _alloc(self, event: events.Alloc) -> None:
        row = self._row_of.get(event.seq)
        if row is None or self._current(row) is not Kind.PREFILL:
            return
        first = event.first
        if self.series.groups:
            size = self.state.groups[event.group].size  # type: ignore[attr-defined]
            first = first * size // self.state.header.block_size
        beyond = first >= self.state.sequences[event.seq].prompt.blocks
        if beyond and event.t > self.phases.start[self._phase[row]]:
            self._prefilled(row, event.t)

    def _prefilled(self, row: int, now: int) -> None:
        """Begin to decode a request whose prefill ends without a FIRST_TOKEN of its own."""
        if self._untimed or self.requests.first_token[row] >= 0:
            self._begin(row, Kind.DECODE, now)

    def _evict(self, event: events.Evict | events.Drop) -> None:
        if event.scope == "cache":
            self.evicted_blocks += run_blocks(event.runs)

    def _first_token(self, event: events.FirstToken) -> None:
        row = self._rows[event.request]
        self.requests.first_token[row] = event.t
        self._begin(row, Kind.DECODE, event.t)

    def _preempt(self, event: events.Preempt) -> None:
        row = self._rows[event.request]
        phase, requester = self._current(row), event.requester
        if phase is not None and not phase.waits:
            self._before[row] = phase
        whom = self._rows[requester] if isinstance(requester, (int, str)) else NEVER
        self._begin(row, Kind.PREEMPTED, event.t, whom)

    def _resume(self, event: events.Resume) -> None:
        row = self._rows[event.request]
        self._begin(row, self._before.get(row, Kind.DECODE), event.t)

    def _finish(self, event: events.Finish) -> None:
        row = self._rows[event.request]
        self.requests.finish[row], self.requests.output[row] = event.t, event.output
        self._begin(row, None, event.t)

    def _reject(self, event: events.Reject) -> None:
        row = self._rows[event.request]
        self.requests.rejected[row] = event.why
        self._begin(row, None, event.t)

    def _fork(self, event: events.Fork) -> None:
        row = self._row_of.get(event.seq)
        if row is not None:
            self._row_of[event.child] = row
            self._open[row] += 1

    def _free(self, event: events.Free) -> None:
        if event.reason != "close":
            return
        row = self._row_of.pop(event.seq, None)
        if row is None:
            return
        self._open[row] -= 1
        phase = self._current(row)
        if not self._open[row] and phase not in (None, Kind.PREEMPTED) and self._untimed:
            self.requests.finish[row] = event.t
            self._begin(row, None, event.t)
