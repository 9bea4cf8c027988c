"""The check of a trace: its lines must describe a run that could have happened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NoReturn, TypeAlias

import attrs

from kvcore.cache.residency import CacheStats
from kvcore.progress import Tick, ticked, unseen
from kvcore.trace import events
from kvcore.trace.events import unfit
from kvcore_plugins.traces.digest import EvictionDigest
from kvcore_plugins.traces.reader import TraceReader
from kvcore_replay.check.base import hit_counts
from kvcore_replay.check.cluster import ClusterChecker, server_checker
from kvcore_replay.check.groups import GroupChecker
from kvcore_replay.check.server import TraceChecker
from kvcore_replay.state.lifecycle import PREEMPTIONS
from kvcore_replay.state.replicas import ServerReader

SCHEMA = 1
"""The schema of a report as JSON."""

Checker: TypeAlias = ClusterChecker | TraceChecker | GroupChecker
"""Checks the lines of a trace after HEADER, one by one."""


@attrs.frozen
class Report:
    """Counts of a trace, up to its end or to a given time.

    Attributes:
        file: path of the trace.
        complete: whether the file has its END.
        cut_reason: where an incomplete file stops; None for a complete one.
        lines: number of lines read, HEADER and END included.
        events: number of lines by event.
        pool: blocks `free`, `cached` and `private`, and the number of `spans`.
        requests: number of REQUEST lines; `finished` and `rejected` of them have ended.
        preemptions: number of preemptions by kind: `pause`, `recompute` and `swap`.
        evictions: number of blocks with keys that were evicted for capacity, and the digest of
            these (`EvictionDigest`); of a cluster, the digest of its replicas' digests.
        hit: lookup, hit and self-hit blocks of the admissions, and the hit ratio by block
            and by request (null without lookups).
        tiers: for each tier, nearest first: its slots; the blocks in it and on their way from
            it; the blocks stored, loaded and dropped so far; and the use of its link.
        header: the fields of HEADER; empty if the file has none.
        replicas: the counts of each replica of a cluster, besides whether it is `up`, its
            `failures` and its `routed` requests. The counts of tiers stand only here; all
            other counts of the report are sums over the replicas, except that a request which
            one prefills and another decodes has finished once, and that those which a router
            rejects are of no replica. None for one server.
        groups: the cache groups, each with its `cached` and `private` blocks. None for a cache
            of one group.
        pools: the pools beside that of full attention, each with its `slots`, the `free` ones,
            and those of `cached` spans. None if there are none.
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
    evictions: dict[str, Any]
    hit: dict[str, Any]
    tiers: list[dict[str, Any]]
    header: dict[str, Any]
    replicas: list[dict[str, Any]] | None = None
    groups: list[dict[str, Any]] | None = None
    pools: list[dict[str, Any]] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON has it, with the schema number."""
        fields = attrs.asdict(self)
        del fields["cut_reason"]
        for name in ("replicas", "groups", "pools"):
            if fields[name] is None:
                del fields[name]
        return {"schema": SCHEMA, **fields}


def check_trace(
    file: str | os.PathLike[str], at: int | None = None, tick: Tick = unseen
) -> Report:
    """Check every line of a trace against the state that the lines before it make.

    Costs about 10 µs a line.

    Args:
        file: path of the trace.
        at: time in ns of the state that is reported; lines after it are checked as well.
            None: the state at the end.
        tick: called with the number of bytes of the file that are done.

    Raises:
        InputError: the file cannot be opened.
        TraceError: a line is damaged, or contradicts what came before: file, line, reason.
    """
    reader = TraceReader(file)
    checker: Checker | None = None
    counts: dict[str, int] = {}
    report: Report | None = None
    for event in ticked(reader, tick):
        if at is not None and report is None and event.t > at:
            report = _report(reader, checker, counts)
        checker = check_event(reader, checker, event)
        name = event.event
        counts[name] = counts.get(name, 0) + 1
    report = report or _report(reader, checker, counts)
    return attrs.evolve(report, complete=reader.complete, cut_reason=reader.cut_reason)


def check_event(reader: TraceReader, checker: Checker | None, event: events.Event) -> Checker:
    """Check the event that `reader` read last; return the checker, which HEADER makes.

    Raises:
        TraceError: the event contradicts what came before: file, line, reason.
    """
    try:
        if checker is not None:
            checker.apply(event)
            return checker
        assert isinstance(event, events.Header)  # the reader has seen to it
        return ClusterChecker(event) if event.replicas else server_checker(event)
    except (LookupError, ArithmeticError, ValueError) as error:
        # The first two are of an event that names what there is not.
        refuse(reader, event, error)


def refuse(reader: TraceReader, event: events.Event, error: Exception) -> NoReturn:
    """Raise TraceError for the event that `reader` read last and a check found wrong."""
    reason = error if isinstance(error, ValueError) else unfit(error)
    reader.fail(f"{event.event}: {reason}")


class CheckedReader(ServerReader):
    """Reads the lines of one server, and checks them beside those of the other replicas.

    A replica that decodes what others prefill cannot be checked alone: its requests were
    admitted elsewhere, and may be given up when another replica fails.

    Attributes:
        checker: the checker of the server; None before HEADER.
    """

    def __init__(self, file: str | os.PathLike[str], replica: int | str | None = None) -> None:
        super().__init__(file, replica)
        self.checker: Any = None
        self._cluster: Any = None
        self._line: events.Event | None = None

    def check(self, event: events.Event) -> None:
        """Check the line that was yielded last, and apply it. HEADER makes the checker.

        Raises:
            TraceError: the event contradicts what came before: file, line, reason.
        """
        if self._line is not None:
            self._check_line()
            return
        self.checker = check_event(self, self.checker, event)
        if self._cluster is not None:
            self._start_life()

    def _of_replica(
        self, header: events.Header, lines: Iterator[events.Event]
    ) -> Iterator[events.Event]:
        self._cluster = check_event(self, None, header)
        yield from super()._of_replica(header, self._checked(lines))

    def _checked(self, lines: Iterator[events.Event]) -> Iterator[events.Event]:
        """Yield the lines of the cluster; check those that `check` is not called for."""
        for event in lines:
            self._line = event
            yield event
            if self._line is not None:
                self._check_line()

    def _check_line(self) -> None:
        event, self._line = self._line, None
        assert event is not None
        check_event(self, self._cluster, event)
        if event.event == "RETURN" and event.replica == self._replica:
            self._start_life()

    def _start_life(self) -> None:
        """Let the cluster use `checker` from the beginning of the life that is read."""
        if self._cluster.lives[self._replica] == (self._life or 1):
            self._cluster.replicas[self._replica].begin(self.checker)


replay = check_trace


def _report(reader: TraceReader, checker: Checker | None, counts: dict[str, int]) -> Report:
    pool = dict.fromkeys(("free", "cached", "private", "spans"), 0)
    nothing: dict[str, Any] = {"preemptions": dict.fromkeys(PREEMPTIONS, 0)}
    nothing |= {"hit": hit_counts(CacheStats()), "evictions": EvictionDigest().as_dict()}
    nothing |= {"pool": pool, "finished": 0, "rejected": 0, "tiers": [], "header": {}}
    return Report(
        file=str(reader.file),
        complete=reader.complete,
        cut_reason=reader.cut_reason,
        lines=sum(counts.values()),
        events=dict(counts),
        requests=counts.get("REQUEST", 0),
        **(nothing if checker is None else checker.report()),
    )
