"""The live view of a trace: pool, queue and hits at one time, as lines of text."""

from __future__ import annotations

from collections import deque
from itertools import accumulate, groupby, islice
from typing import Any, NamedTuple, TypeAlias

from kvcore.trace import events
from kvcore.units import NS_PER_S, format_number, format_seconds
from kvcore_cli.report.tables import bars, counted, share
from kvcore_replay.state.cache import CacheState, run_blocks
from kvcore_replay.state.groups import GroupState
from kvcore_replay.state.pools import PoolState
from kvcore_replay.timeline import TimelineBuilder

Line: TypeAlias = list[tuple[str, str]]
"""Pieces of a line, each with the part of the pool that it shows; empty for other text."""

PARTS = {"private": "P", "shared": "S", "cached": "C", "free": "."}
"""The parts of a pool, and their letters: blocks of one running sequence, shared blocks that
running sequences use, cached blocks that no sequence uses, and free blocks."""

SHOWN = {
    *("REQUEST", "HIT", "MISS", "FIRST_TOKEN", "PREEMPT", "RESUME", "FINISH", "REJECT"),
    *("LOAD_START", "EVICT"),
}
"""Events that are shown in words; a MISS only if nothing hit before it."""

WINDOW_S = 60
"""Seconds of the trace over which rates and the hit ratio are counted; a sample for each."""

WIDE = 72
"""The least columns of a view that explains the letters of a bar."""

TALL = 12
"""The least rows of a view with the names of the run and the last events."""


class Sample(NamedTuple):
    """Counts at one time, from which rates and differences are computed."""

    time: int
    lookups: int
    hits: int
    evicted: int
    used: float
    running: int


class LiveView:
    """The state of a trace that is being read, and its last seconds.

    Takes the memory of a timeline. An event costs about 15 µs, and `lines` O(spans).

    Args:
        header: the first line of the trace.

    Attributes:
        now: the time (ns) that is shown; `take` sets it to the time of the event.
        finished, rejected: number of requests that have finished, and that were rejected.
    """

    def __init__(self, header: events.Header) -> None:
        self.now = header.t
        self.finished = self.rejected = 0
        self._builder = TimelineBuilder(header)
        self._blocks = header.blocks
        self._due: int | None = None
        self._samples: deque[Sample] = deque(maxlen=WINDOW_S + 1)
        self._last: deque[events.Event] = deque(maxlen=200)

    def take(self, event: events.Event) -> None:
        """Apply the next event after the header.

        Raises:
            ValueError: the event contradicts those before it.
        """
        if self._due is None:
            self._due = event.t
        # Samples before the window of this event would not be kept.
        self._due = max(self._due, event.t - (WINDOW_S + 1) * NS_PER_S)
        while event.t >= self._due:
            self._samples.append(self._sample(self._due))
            self._due += NS_PER_S
        self._builder.take(event)
        self.now = event.t
        if event.event in SHOWN and not getattr(event, "block", 0):
            self._last.append(event)
        self.finished += event.event == "FINISH"
        self.rejected += event.event == "REJECT"

    def lines(self, width: int, height: int, progress: str) -> list[Line]:
        """Return at most `height` lines, the most important first; `progress` is in the first.

        The bar is `width` columns wide; other lines may be wider, and are to be cropped.
        """
        now, pool = self._sample(self.now), self.pool()
        hits, total, rate = self._rates(now)
        explains = width >= WIDE
        legend: Line = [(f"{self._blocks:,} blocks: " if explains else "", "")]
        for part, blocks in pool.items():
            text = f"{PARTS[part]} {part}" if explains else PARTS[part]
            legend += [(text, part), (f" {blocks / self._blocks:.0%}  ", "")]
        history = [*self._samples, now][-max(width - 10, 1) :]
        most_running = max(sample.running for sample in history) or 1
        shown: list[Line] = [
            [(f"{clock(self.now)}  {progress}", "")],
            self._bar(pool, width),
            legend,
            *_parts(self._builder.state),
            [(f"queue     waiting {self._builder.waiting:,}   running {now.running:,}", "")],
            [(f"hits      last {WINDOW_S} s {hits}   in all {total}", "")],
            [(f"evicted   {rate}   in all {now.evicted:,} blocks", "")],
            [(f"occupied  {bars(sample.used for sample in history)}", "")],
            [(f"running   {bars(sample.running / most_running for sample in history)}", "")],
        ]
        if height >= TALL:
            shown.insert(0, [(self._about(), "")])
            last = self.last_events(height - len(shown) - 2)
            shown += [[], *([(text, "")] for text in ("last events", *last))]
        return shown[:height]

    def line(self) -> str:
        """Return the state as one line."""
        now = self._sample(self.now)
        hits, total, rate = self._rates(now)
        pool = "  ".join(f"{part} {n / self._blocks:.0%}" for part, n in self.pool().items())
        return (
            f"{clock(self.now)}  {pool}  waiting {self._builder.waiting:,}  "
            f"running {now.running:,}  hits {hits} ({WINDOW_S} s) {total}  evicted {rate}"
        )

    def pool(self) -> dict[str, int]:
        """Return the blocks of each part of the pool. O(spans)."""
        state = self._builder.state
        if isinstance(state, GroupState):
            shared = state.held
        else:
            shared = sum(len(span.ids) for span in state.spans.values() if span.pins)
        counts = state.private, shared, state.cached - shared, state.free
        return dict(zip(PARTS, counts, strict=True))

    def last_events(self, limit: int) -> list[str]:
        """Return the last events in words; evictions at one time for one request are one."""
        texts = []
        for _, alike in islice(groupby(reversed(self._last), key=_kind), max(limit, 0)):
            event, *_ = group = list(alike)
            texts.append(f"{clock(event.t)}  {_words(event, group, self._builder.state)}")
        return texts[::-1]

    def _about(self) -> str:
        """Return the workload and the policies of the run."""
        header = self._builder.state.header
        plugins = (header.plugins.get(kind) for kind in ("eviction", "scheduler"))
        names = [plugin.name for plugin in plugins if plugin]
        return ", ".join([header.workload.name if header.workload else "calls", *names])

    def _sample(self, time: int) -> Sample:
        state, builder = self._builder.state, self._builder
        used = 1 - state.free / self._blocks
        hits = state.hits
        counts = hits.lookup_blocks, hits.hit_blocks, builder.evicted_blocks
        return Sample(time, *counts, used, builder.running)

    def _rates(self, now: Sample) -> tuple[str, str, str]:
        """Return the hit ratio of the window and of the run, and the evictions per second."""
        begin = now.time - WINDOW_S * NS_PER_S
        before = next((sample for sample in self._samples if sample.time >= begin), now)
        seconds = (now.time - before.time) / NS_PER_S
        evicted = now.evicted - before.evicted
        return (
            _share(now.hits - before.hits, now.lookups - before.lookups),
            _share(now.hits, now.lookups),
            f"{format_number(evicted / seconds) if seconds else 0} blocks/s",
        )

    def _bar(self, pool: dict[str, int], width: int) -> Line:
        """Return the pool as a bar of letters."""
        ends = [round(end * width / self._blocks) for end in accumulate(pool.values())]
        starts = [0, *ends]
        return [
            (PARTS[part] * (end - begin), part)
            for part, begin, end in zip(pool, starts, ends, strict=False)
        ]


def _parts(state: CacheState | GroupState) -> list[Line]:
    """Return a line with the use of each cache group, or pool, by its share; none without."""
    if isinstance(state, GroupState):
        used = zip(state.groups, state.used_by_group, strict=True)
        parts = [f"{group} {blocks / state.header.blocks:.0%}" for group, blocks in used]
        return [[(f"groups    {'   '.join(parts)}", "")]]
    if isinstance(state, PoolState):
        free = state.free_slots
        parts = [f"{pool} {1 - free[pool] / slots:.0%}" for pool, slots in state.slots.items()]
        return [[(f"pools     {'   '.join(parts)}", "")]]
    return []


def _words(event: events.Event, group: list[Any], state: CacheState | GroupState) -> str:
    """Return the words for an event, or for several events of its kind."""
    match event:
        case events.Request():
            text = f"request {event.id} arrives: {counted(event.prompt, 'token')}"
        case events.Hit() | events.GroupHit() | events.Miss():
            hit, lookup = getattr(event, "blocks", 0), state.requests[event.request].lookup
            again = " again" if event.again else ""
            text = f"request {event.request} admitted{again}: {hit:,} of {lookup:,} blocks hit"
        case events.FirstToken():
            text = f"request {event.request}: first token"
        case events.Preempt():
            whom = event.requester
            sake = f" for request {whom}" if isinstance(whom, (int, str)) else ""
            text = f"request {event.request} preempted ({event.how}){sake}"
        case events.Resume():
            text = f"request {event.request} runs again"
        case events.Finish():
            text = f"request {event.request} finished: {counted(event.output, 'token')}"
        case events.Reject():
            text = f"request {event.request} rejected: {event.why}"
        case events.LoadStart():
            text = f"request {event.request} waits for {event.blocks:,} blocks of {event.tier}"
        case _:
            text = _eviction(event, group)
    return text


def _eviction(event: Any, group: list[Any]) -> str:
    """Return the words for evictions at one time for one request, or by retention."""
    blocks = counted(sum(run_blocks(event.runs) for event in group), "block")
    if isinstance(event, events.Drop):
        return f"{blocks} dropped by the retention policy"
    how = "evicted" if event.reason == "capacity" else event.reason
    if isinstance(event, events.GroupEvict):
        groups = ", ".join(map(str, sorted({event.group for event in group})))
        return f"{blocks} of cache groups {groups} {how} for request {event.requester}"
    age = format_seconds(event.age / NS_PER_S)
    return f"{blocks} {how} for request {event.requester}, aged {age}"


def _kind(event: events.Event) -> object:
    """Return the group of an event; consecutive events of one group are shown as one."""
    together = isinstance(event, (events.Evict, events.GroupEvict, events.Drop))
    return (event.t, getattr(event, "requester", None)) if together else event


def clock(time: int) -> str:
    """Return a time (ns) as hours, minutes and seconds: `1:02:03.4`, or `2:03.4`."""
    minutes, rest = divmod(time // (NS_PER_S // 10), 600)
    seconds = f"{rest // 10:02}.{rest % 10}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds}" if hours else f"{minutes}:{seconds}"


def _share(part: int, total: int) -> str:
    return share(part / total if total else None)
