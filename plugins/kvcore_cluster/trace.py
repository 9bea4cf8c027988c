"""One trace of many replicas: their lines, merged by time."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Any, Literal

from kvcore.errors import InputError
from kvcore.request import Request
from kvcore.trace.fields import encode_runs, plain
from kvcore.trace.writer import JsonRecorder, Trace

_LINES = 4096
"""Number of buffered lines from which on it is worth writing those that are due."""

MOST_REPLICAS = 10_000
"""Replicas of a cluster: more would be a mistake, since each has a cache of its own."""

LAYERED = ("cache_groups", "layer_pools")
"""Fields of the header on what layers keep, which it has once for all replicas."""

COMMON = ("count", "block_size", "key_tokens", "mode", "executor", "rate_scale", "slo")
"""Fields of the header that are the same for all replicas."""


class ReplicaRecorder(JsonRecorder):
    """Records the decisions of one replica.

    Args:
        trace: the trace of the cluster.
        replica: its number.

    Attributes:
        header: fields of HEADER that describe the replica.
    """

    def __init__(self, trace: ClusterTrace, replica: int) -> None:
        self.header: dict[str, Any] = {"plugins": {}}
        self._number = replica
        self._put = trace.put
        self.write = self._write

    def begin(self, *, plugins: Mapping[str, Mapping[str, Any]], **cache: Any) -> None:
        """Store the fields of the header that describe the cache."""
        self.describe(plugins=plugins, **cache)

    def describe(self, **header: Any) -> None:
        """Add fields of the header that describe the replica."""
        plugins = self.header["plugins"] | (header.pop("plugins", None) or {})
        self.header |= plain(header) | {"plugins": plain(plugins)}

    def request(self, request: Request, now: int) -> None:
        """Write nothing: the cluster writes REQUEST."""

    def _write(self, line: dict[str, Any]) -> None:
        runs = line.get("runs")
        if type(runs) is array:
            # The sequence goes on writing into its array.
            line["runs"] = encode_runs(runs)
        self._put({"n": 0, "t": line["t"], "replica": self._number} | line)


class ClusterTrace:
    """Writes the decisions of a cluster to a trace, in which no line is earlier than another.

    A replica that decodes undisturbed records its blocks afterwards, so lines are buffered
    until the clocks of all replicas have passed them. Lines of equal time keep the order in
    which they were made.

    Args:
        trace: the trace, which has not begun.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._recorders: list[ReplicaRecorder] = []
        self._lines: list[tuple[int, int, dict[str, Any]]] = []
        self._made = 0
        self._full = _LINES

    def recorder(self, number: int) -> ReplicaRecorder:
        """Return the recorder of a replica, or of a further life of it."""
        recorder = ReplicaRecorder(self, number)
        if number == len(self._recorders):
            self._recorders.append(recorder)
        return recorder

    def begin(self, router: Mapping[str, Any], **header: Any) -> None:
        """Describe the cluster in the header: replica 0, and how others differ.

        Args:
            router: name and options of the router.
            header: more fields.

        Raises:
            InputError: replicas have other cache groups, or other pools of layers.
        """
        first, *_ = headers = [recorder.header for recorder in self._recorders]
        for name in LAYERED:
            if any(fields.get(name) != first.get(name) for fields in headers):
                msg = (
                    f"trace: replicas have different {name.replace('_', ' ')}, and a trace has "
                    "those of one: give all the same model and pool, or leave the trace out"
                )
                raise InputError(msg)
        cache = ("count", "block_size", "key_tokens", "blocks")
        plugins = first["plugins"] | {"router": plain(router)}
        self._trace.begin(**{name: first[name] for name in cache}, plugins={})
        # Fields of the deployment come first, in whatever order they were described.
        named = dict.fromkeys(("model", "device", "recompute")) | first
        rest = {
            name: first[name]
            for name in named
            if name in first and name not in (*cache, "plugins")
        }
        replicas: list[dict[str, Any]] = []
        for fields in headers:
            differs = {
                name: value
                for name, value in fields.items()
                if name not in COMMON and value != first.get(name)
            }
            # The only optional field that some replicas may lack.
            if "tiers" in first and "tiers" not in fields:
                differs["tiers"] = []
            if replicas and differs == {k: v for k, v in replicas[-1].items() if k != "count"}:
                replicas[-1]["count"] += 1
            else:
                replicas.append({"count": 1, **differs})
        self._trace.describe(plugins=plugins, **rest, replicas=replicas, **header)

    @property
    def is_full(self) -> bool:
        """Whether enough lines are buffered to `flush` them."""
        return len(self._lines) > self._full

    def put(self, line: dict[str, Any]) -> None:
        """Buffer a line until `flush` is called for its time."""
        self._made += 1
        heappush(self._lines, (line["t"], self._made, line))

    def flush(self, until: int) -> None:
        """Write the buffered lines before `until` (ns); no further line is made before it."""
        lines = self._lines
        while lines and lines[0][0] < until:
            # `Trace.write` is looked up for each line: the first one replaces it.
            self._trace.write(heappop(lines)[2])
        self._full = _LINES + 2 * len(lines)

    def request(self, request: Request, now: int) -> None:
        """Write REQUEST."""
        self.put(self._trace.request_line(request, now))

    def route(
        self, now: int, request: Request, replica: int, hit_tokens: int, leg: str = ""
    ) -> None:
        """Write ROUTE: `request` is sent to `replica`, where `hit_tokens` tokens should hit."""
        line = {"n": 0, "t": now, "event": "ROUTE", "request": request.id, "replica": replica}
        if hit_tokens:
            line["tokens"] = hit_tokens
        if leg:
            line["leg"] = leg
        self.put(line)

    def refuse(self, now: int, request: Request, why: str) -> None:
        """Write REJECT: `request` is answered by no replica."""
        self.put({"n": 0, "t": now, "event": "REJECT", "request": request.id, "why": why})

    def change(self, now: int, replica: int, event: Literal["FAIL", "LEAVE", "RETURN"]) -> None:
        """Write that `replica` has lost its K/V, gets no more requests, or is up again."""
        self.put({"n": 0, "t": now, "replica": replica, "event": event})

    def transfer(
        self,
        now: int,
        request: Request,
        source: int,
        target: int,
        blocks: int,
        size: int,
        done: int,
    ) -> None:
        """Write TRANSFER: K/V of `request` begins to move, and can be used at `done` (ns)."""
        line = {"n": 0, "t": now, "event": "TRANSFER", "request": request.id}
        line |= {"source": source, "target": target, "blocks": blocks}
        self.put(line | {"bytes": size, "done": done})
