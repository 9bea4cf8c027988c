"""A trace in the trace-event format of Chrome, which Perfetto and chrome://tracing show.

Format: "Trace Event Format", Google, 2016; the part that Perfetto reads: "Visualizing external
trace formats with Perfetto".
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import attrs
import orjson

from kvcore.progress import Tick, ticked, unseen
from kvcore.trace import events
from kvcore.units import NS_PER_S
from kvcore_cli.report.tables import printable, setup
from kvcore_plugins.traces.reader import read_events
from kvcore_replay.state.cache import run_blocks
from kvcore_replay.state.replicas import CHANGES, Replicas
from kvcore_replay.state.tiers import TracedTiers
from kvcore_replay.timeline import NEVER, Kind, Phases, TimelineBuilder

MOST_TRACKS = 256
"""The most requests of a trace that have a track each; more requests share tracks."""

HIT_WINDOW_S = 60
"""Seconds of the window of the second hit ratio."""

REQUESTS, POOL, FIRST_TIER = 1, 2, 3
"""Numbers of the processes of the export; each tier has one."""

PROCESSES = 100
"""Distance between the processes of one server and those of the next."""

FIRST_TRACK, TRACKS = 1000, 1_000_000
"""Thread of the first request, and distance to that of the next server: Perfetto identifies
threads by their number alone."""

TRANSFERS = events.Offload, events.LoadStart
"""Events that start a transfer over the link of a tier."""


@attrs.define(eq=False)
class PerfettoTrace:
    """A trace as a document of the trace-event format, in lines: an event each.

    Each request is a slice from its arrival to its end; its phases are slices in it, and the
    chunks of a prefill are slices in that. Each life of each replica of a cluster has processes
    of its own. Times are µs with three decimals, which are the ns of the trace.

    Attributes:
        trace: the file.
        tick: called with the bytes of the trace that have been read.
        counts: number of events, requests, tracks and evictions that were yielded so far.
    """

    trace: str | os.PathLike[str]
    tick: Tick = unseen
    counts: dict[str, int] = attrs.field(init=False)
    _header: dict[str, Any] = attrs.field(factory=dict, init=False)
    # By replica and life.
    _servers: dict[tuple[int, int], _ServerTracks] = attrs.field(factory=dict, init=False)

    @counts.default
    def _none_yet(self) -> dict[str, int]:
        return dict.fromkeys(("events", "requests", "tracks", "evictions"), 0)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines. Takes the memory of a timeline, not of the document.

        Raises:
            InputError: the file cannot be opened.
            TraceError: the trace is damaged or incomplete, or an event cannot be applied.
        """
        yield b'{"traceEvents":[\n'
        before = b""
        for event in self._all():
            if before:
                yield before + b",\n"
            self.counts["events"] += 1
            before = event
        yield before + b"\n],\n"
        other = {
            "trace": printable(Path(self.trace).name),
            "run": setup(self._header).removeprefix("Setup: "),
        }
        document = {"displayTimeUnit": "ms", "otherData": other}
        yield orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)[1:]

    def _all(self) -> Iterator[bytes]:
        """Yield all events: evictions and transfers during the reading, then the others."""
        self._servers.clear()
        self.counts.update(self._none_yet())
        reader = read_events(self.trace)
        take: Callable[[events.Event], Iterator[bytes]] | None = None
        for line in ticked(reader, self.tick):
            try:
                if isinstance(line, events.Header):
                    self._header = line.as_dict()
                    if line.replicas:
                        take = partial(self._of_replica, Replicas(line))
                    else:
                        server = _ServerTracks(TimelineBuilder(line), self.counts)
                        self._servers[0, 1] = server
                        yield from server.named()
                        take = server.take
                elif take is not None:
                    yield from take(line)
            except ValueError as error:
                reader.fail(f"{line.event}: {error}")
        reader.require_complete()
        for server in self._servers.values():
            yield from server.rest()

    def _of_replica(self, replicas: Replicas, line: events.Event) -> Iterator[bytes]:
        """Apply a line of a cluster to its replica; yield the events of that replica."""
        placed, servers = replicas.place(line), self._servers
        if placed is None:
            if isinstance(line, events.End):
                for server in servers.values():
                    if server.up:
                        yield from server.take(line)
            return
        replica, own = placed
        life = replicas.lives[replica]
        if (replica, life) not in servers:
            name = f"replica {replica}" if life == 1 else f"replica {replica}, life {life}"
            builder = TimelineBuilder(replicas.headers[replica])
            server = _ServerTracks(builder, self.counts, len(servers), name)
            servers[replica, life] = server
            yield from server.named()
        server = servers[replica, life]
        server.up = replicas.up[replica]
        if own.event not in CHANGES:
            yield from server.take(own)


@attrs.define(eq=False)
class _ServerTracks:
    """The processes of one server, or of one life of a replica.

    Attributes:
        builder: makes its timeline.
        counts: those of the document, to which it adds its own.
        number: its place among the servers of the document, from 0.
        name: the first part of the names of its processes; empty for a single server.
        up: whether it runs until the end of the trace.
    """

    builder: TimelineBuilder
    counts: dict[str, int]
    number: int = 0
    name: str = ""
    up: bool = True

    def named(self) -> Iterator[bytes]:
        """Yield the names of its processes."""
        before = f"{self.name}: " if self.name else ""
        yield from _process(self._pid(REQUESTS), f"{before}requests")
        yield from _process(self._pid(POOL), f"{before}pool and queue")
        yield from _thread(self._pid(POOL), self._pid(POOL), "evictions")
        for tier, name_of_tier in enumerate(self.builder.series.tiers, FIRST_TIER):
            pid = self._pid(tier)
            yield from _process(pid, f"{before}tier {name_of_tier}")
            yield from _thread(pid, pid, "link")

    def take(self, line: events.Event) -> Iterator[bytes]:
        """Apply a line; yield its eviction, or its transfer over the link of a tier."""
        tiers = self.builder.state.tiers
        if tiers is not None and isinstance(line, TRANSFERS):
            yield from self._transfer(tiers, line)
            return
        self.builder.take(line)
        if isinstance(line, (events.Evict, events.GroupEvict, events.Drop)):
            self.counts["evictions"] += 1
            yield _eviction(self._pid(POOL), line)

    def rest(self) -> Iterator[bytes]:
        """Yield the requests and counters, after the last line."""
        self.builder.end()
        yield from self._request_tracks()
        yield from self._counters()

    def _pid(self, process: int) -> int:
        return process + PROCESSES * self.number

    def _transfer(
        self, tiers: TracedTiers, line: events.Offload | events.LoadStart
    ) -> Iterator[bytes]:
        """Apply a line that starts a transfer; yield the transfer."""
        tier = tiers.tier(line.tier)
        start = max(tier.free_at, line.t)
        self.builder.take(line)
        pid = self._pid(FIRST_TIER + list(tiers.levels).index(line.tier))
        name = "store" if isinstance(line, events.Offload) else "load"
        args = {
            "request": str(line.request),
            "blocks": line.blocks,
            "bytes": tier.size_of(line),
            "usable_s": line.done / NS_PER_S,
        }
        if tier.untimed:
            yield _event("i", pid, pid, line.t, name, args, s="t")
        else:  # The link carries one transfer after another.
            yield _event("B", pid, pid, start, name, args)
            yield _event("E", pid, pid, tier.free_at)

    def _request_tracks(self) -> Iterator[bytes]:
        """Yield the slices of all requests, one request after another."""
        requests, phases = self.builder.requests, self.builder.phases.lasting()
        chunks, pid = self.builder.chunks, self._pid(REQUESTS)
        self.counts["requests"] += len(requests)
        lanes = _Lanes(shared=len(requests) > MOST_TRACKS)
        of_request = _grouped(phases.request, len(requests))
        parts_of_request = _grouped(chunks.request, len(requests))
        for row, (own, parts) in enumerate(zip(of_request, parts_of_request, strict=True)):
            begin = requests.arrival[row]
            end = max(requests.finish[row], phases.end[own[-1]] if own else begin)
            lane, new = lanes.take(begin, end)
            tid = FIRST_TRACK + TRACKS * self.number + lane
            if new:
                self.counts["tracks"] += 1
                name = f"lane {lane + 1}" if lanes.shared else f"request {requests.ids[row]}"
                yield from _thread(pid, tid, name, order=lane)
            name, args = f"request {requests.ids[row]}", self._described(row)
            yield _event("B", pid, tid, begin, name, args)
            times = [chunks.time[part] for part in parts]
            yield from self._within(row, tid, phases, own, times)
            yield _event("E", pid, tid, end)

    def _within(
        self, row: int, tid: int, phases: Phases, own: list[int], times: list[int]
    ) -> Iterator[bytes]:
        """Yield the phases of a request, the chunks in them, and its first token."""
        requests, pid = self.builder.requests, self._pid(REQUESTS)
        first, begin = requests.first_token[row], requests.arrival[row]
        for phase in own:
            kind, requester = Kind(phases.kind[phase]), phases.requester[phase]
            start, stop = phases.start[phase], phases.end[phase]
            for_whom = {} if requester == NEVER else {"for": str(requests.ids[requester])}
            yield _event("B", pid, tid, start, kind.name.lower(), for_whom)
            if start == first:
                yield _first_token(pid, tid, first, begin)
                first = NEVER
            if kind is Kind.PREFILL:
                yield from _chunks(pid, tid, start, stop, times)
            yield _event("E", pid, tid, stop)
        if first != NEVER:
            yield _first_token(pid, tid, first, begin)

    def _described(self, row: int) -> dict[str, Any]:
        """Return the arguments shown for a request."""
        requests = self.builder.requests
        why = {"rejected": requests.rejected[row]} if row in requests.rejected else {}
        return {
            "prompt_tokens": requests.prompt[row],
            "output_tokens": requests.output[row],
            "lookup_blocks": requests.lookup[row],
            "hit_blocks": requests.hit[row],
            **why,
        }

    def _counters(self) -> Iterator[bytes]:
        """Yield the counters, one event per change."""
        series = self.builder.series
        blocks, queue = ["free", "cached", "private"], ["waiting", "running"]
        ratios = series.hit_ratio(), series.hit_ratio(HIT_WINDOW_S * NS_PER_S)
        counters: list[tuple[int, str, list[str], Iterable[Any]]] = [
            (POOL, "blocks", blocks, [getattr(series, name) for name in blocks]),
            (POOL, "requests", queue, [getattr(series, name) for name in queue]),
            (POOL, "evicted", ["blocks"], [series.evicted_blocks]),
            (POOL, "hit ratio", ["in all", f"last {HIT_WINDOW_S} s"], ratios),
        ]
        if series.groups:
            counters.append((POOL, "groups", [*series.groups], series.groups.values()))
        for tier, used in enumerate(series.tiers.values(), FIRST_TIER):
            counters.append((tier, "slots", ["used"], [used]))
        for process, name, names, values in counters:
            pid = self._pid(process)
            shown: dict[str, float] = {}
            for time, *row in zip(series.time, *values, strict=True):
                # A hit ratio without lookups is no number.
                args = {key: n for key, n in zip(names, row, strict=True) if not isnan(n)}
                if args != shown:
                    shown = args
                    yield _event("C", pid, pid, time, name, args)


class _Lanes:
    """Tracks for requests: one each, or shared by requests that do not overlap.

    Attributes:
        shared: whether a track is used again after its request has ended.
    """

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self._lanes = 0
        self._busy: list[tuple[int, int]] = []
        self._idle: list[int] = []

    def take(self, begin: int, end: int) -> tuple[int, bool]:
        """Return the lowest idle track for a request, and whether the track is new."""
        while self.shared and self._busy and self._busy[0][0] <= begin:
            heappush(self._idle, heappop(self._busy)[1])
        new = not self._idle
        lane = self._lanes if new else heappop(self._idle)
        self._lanes += new
        heappush(self._busy, (end, lane))
        return lane, new


def _grouped(rows: array[int], count: int) -> Iterator[list[int]]:
    """Yield, for each of `count` requests, the places of its row in the column `rows`."""
    order, end = sorted(range(len(rows)), key=rows.__getitem__), 0
    for row in range(count):
        begin = end
        while end < len(order) and rows[order[end]] == row:
            end += 1
        yield order[begin:end]


def _chunks(pid: int, tid: int, start: int, stop: int, times: list[int]) -> Iterator[bytes]:
    """Yield the chunks of a prefill, if there is more than one."""
    ends = sorted({start, stop, *(time for time in times if start < time < stop)})
    if len(ends) > len((start, stop)):
        for index, (begin, end) in enumerate(pairwise(ends), 1):
            yield _event("B", pid, tid, begin, f"chunk {index}")
            yield _event("E", pid, tid, end)


def _first_token(pid: int, tid: int, time: int, arrival: int) -> bytes:
    args = {"ttft_s": (time - arrival) / NS_PER_S}
    return _event("i", pid, tid, time, "first token", args, s="t")


def _eviction(pid: int, line: events.Evict | events.GroupEvict | events.Drop) -> bytes:
    args: dict[str, Any] = {"blocks": run_blocks(line.runs), "by": line.by}
    name = "drop"
    if isinstance(line, events.Evict):
        name = {"capacity": "evict", "expired": "expire", "gone": "lose"}[line.reason]
        args |= {"for": str(line.requester), "age_s": line.age / NS_PER_S}
        args |= {"hits": line.hits, "span": line.span}
    elif isinstance(line, events.GroupEvict):
        name = "evict"
        args |= {"for": str(line.requester), "group": line.group}
    return _event("i", pid, pid, line.t, name, args, s="t")


def _process(pid: int, name: str) -> Iterator[bytes]:
    """Yield the events that name a process and set its place."""
    yield _event("M", pid, pid, 0, "process_name", {"name": name})
    yield _event("M", pid, pid, 0, "process_sort_index", {"sort_index": pid})


def _thread(pid: int, tid: int, name: str, order: int = 0) -> Iterator[bytes]:
    """Yield the events that name a track and set its place in the process."""
    yield _event("M", pid, tid, 0, "thread_name", {"name": name})
    yield _event("M", pid, tid, 0, "thread_sort_index", {"sort_index": order})


def _event(
    phase: str,
    pid: int,
    tid: int,
    time: int,
    name: str | None = None,
    args: Mapping[str, Any] | None = None,
    **more: str,
) -> bytes:
    """Return an event at `time` ns as JSON.

    The time is formatted here: a float has too few digits for some times.
    """
    begun = f'{{"ph":"{phase}","pid":{pid},"tid":{tid},"ts":{time // 1000}.{time % 1000:03d}'
    if name is None:
        return f"{begun}}}".encode()
    rest = orjson.dumps({"name": name, "cat": "kvcore", **more, "args": args or {}})
    return f"{begun},".encode() + rest[1:]
