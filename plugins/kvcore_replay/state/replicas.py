"""The trace of a cluster, read as those of its replicas.

    cluster   REQUEST 7   ROUTE 7 -> 1   lines of 0 and 1   FAIL 1   ROUTE 7 -> 0   ...
    replica 1             REQUEST 7      lines of 1
    replica 0                            lines of 0                  REQUEST 7      ...

A replica that fails loses all that it had, and its ids begin again: each of its *lives* reads
as the trace of one server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from msgspec import UNSET
from msgspec.structs import replace

from kvcore.errors import InputError
from kvcore.trace import events
from kvcore.trace.events import Event, Header, violated
from kvcore.units import NS_PER_S
from kvcore.untrusted import parse_digits
from kvcore_cluster.trace import MOST_REPLICAS
from kvcore_plugins.traces.reader import TraceReader


def replica_headers(header: Header) -> list[Header]:
    """Return HEADER of each replica, as if it were the only server.

    Raises:
        ViolationError: HEADER is of one server, of too many replicas, or of no caches.
    """
    records = header.replicas or violated("HEADER has no replicas")
    if "eviction" not in header.plugins:
        violated(
            "a proxy has written this trace: it tells of requests and where they went, and "
            "nothing of caches; `kvcore simulate FILE` runs the requests"
        )
    if sum(record.count for record in records) > MOST_REPLICAS:
        violated(f"HEADER has more than {MOST_REPLICAS:,} replicas, which is the most")
    plugins = {kind: plugin for kind, plugin in header.plugins.items() if kind != "router"}
    base = replace(header, replicas=UNSET, routing=UNSET, plugins=plugins)
    headers: list[Header] = []
    for record in records:
        fields = {name: getattr(record, name) for name in record.__struct_fields__[1:]}
        own = replace(base, **{k: v for k, v in fields.items() if v is not UNSET})
        headers += [own] * record.count
    return headers


class Replicas:
    """Finds the replica of each line of a cluster's trace. Memory: requests in flight.

    Attributes:
        headers: HEADER of each replica.
        lives: number of the present life of each replica, from 1 on; 0: it was never up.
        up: whether each replica is up.
        requests: the REQUEST lines of the requests that have not ended, by id.
    """

    def __init__(self, header: Header) -> None:
        """Start with the replicas of HEADER.

        Raises:
            ViolationError: HEADER has no replicas, or too many.
        """
        self.headers = replica_headers(header)
        routing, count = header.routing or {}, len(self.headers)
        up = routing.get("up", range(count))
        if any(replica not in range(count) for replica in up):
            violated(f"routing says that {up!r:.40} of {count} replicas are up")
        self.up = [replica in up for replica in range(count)]
        self.lives = [int(is_up) for is_up in self.up]
        self.requests: dict[int | str, events.Request] = {}
        # The replicas that prefill requests which others decode.
        self.prefills: dict[int | str, int] = {}

    def place(self, event: Event) -> tuple[int, Event] | None:
        """Return the replica of the next line after HEADER, and the line in its own trace.

        There ROUTE is a REQUEST. None: the line is of no replica, as REQUEST, END, and the
        REJECT of a router are.

        Raises:
            ViolationError: there is no such replica or request.
        """
        name, replica = event.event, event.replica
        if isinstance(event, (events.Finish, events.Reject)):
            id_ = event.request
            if name == "REJECT" or self.prefills.get(id_) != replica:
                self.requests.pop(id_, None)
                self.prefills.pop(id_, None)
        if name in UNPLACED and replica is UNSET:
            if isinstance(event, events.Request):
                self.requests[event.id] = event
            return None
        if not isinstance(replica, int) or replica >= len(self.headers) or name in NOBODYS:
            last = len(self.headers) - 1
            must = "not be there" if name in NOBODYS else f"be one from 0 to {last}"
            violated(f"field 'replica' must {must}")
        if name == "RETURN":
            self.lives[replica] += 1
            self.up[replica] = True
        elif name == "FAIL":
            self.up[replica] = False
        elif isinstance(event, events.Route):
            return replica, self._routed(event, replica)
        return replica, event

    def _routed(self, event: events.Route, replica: int) -> events.Request:
        """Return the REQUEST in the trace of a replica that stands for ROUTE."""
        id_ = event.request
        request = self.requests.get(id_)
        if request is None:
            violated(f"request {id_!r} does not wait to be routed")
        placed = replace(request, n=event.n, t=event.t, replica=replica)
        if event.leg == "prefill":
            self.prefills[id_] = replica
            return replace(placed, output=1, output_keys=UNSET)
        return placed


CHANGES = ("FAIL", "RETURN", "LEAVE")
"""Events by which replicas start and stop."""

NOBODYS = ("REQUEST", "END")
"""Events that are of no replica."""

UNPLACED = (*NOBODYS, "REJECT", "TRANSFER")
"""Events that may be of no replica; REJECT is of none if the router rejects a request."""


class ServerReader(TraceReader):
    """Reads the trace of one server, or that of one replica of a cluster as if it were one.

    The lines of a replica have numbers of their own, a request arrives when it is routed there,
    and after the end of the life no line is yielded, while the rest of the file is checked.

    Args:
        file: the trace.
        replica: number of the replica; as text also with the number of one of its lives, from
            1 on (`1:2`). None: the trace is of one server.

    Raises:
        InputError: the text names no replica. While iterating: a replica is given for the trace
            of one server or not for that of a cluster, or there is no such replica or life.
    """

    def __init__(self, file: str | os.PathLike[str], replica: int | str | None = None) -> None:
        super().__init__(file)
        self._replica = self._life = None
        if replica is not None:
            index, colon, life = str(replica).partition(":")
            self._replica, self._life = parse_digits(index), parse_digits(life)
            if self._replica is None or (colon and self._life is None):
                msg = (
                    f"{replica!r} is no replica: give its number, such as 1, and if it has "
                    "failed which of its lives, such as 1:2"
                )
                raise InputError(msg)

    def __iter__(self) -> Iterator[Event]:
        """Yield the lines of the server."""
        lines = super().__iter__()
        for header in lines:
            if header.replicas:  # type: ignore[attr-defined]  # the reader has seen to it
                yield from self._of_replica(header, lines)  # type: ignore[arg-type]
                continue
            if self._replica is not None:
                msg = f"{self.file} is the trace of one server: leave replica out"
                raise InputError(msg)
            yield header
            yield from lines

    def _of_replica(self, header: Header, lines: Iterator[Event]) -> Iterator[Event]:
        """Yield the lines of one life of the replica."""
        try:
            replicas = Replicas(header)
        except ValueError as error:
            self.fail(f"HEADER: {error}")
        replica, life = self._replica, self._life
        last = len(replicas.headers) - 1
        if replica is None or replica > last:
            several = f"{last + 1} replicas: say which one, replica 0 to {last}"
            which = several if last else "1 replica: give replica 0"
            msg = f"{self.file} is the trace of {which}"
            raise InputError(msg)
        yield replicas.headers[replica]
        n = 1
        for event in lines:
            try:
                placed = replicas.place(event)
            except ValueError as error:
                self.fail(f"{event.event}: {error}")
            mine = placed is not None and placed[0] == replica
            current = replicas.lives[replica]
            if mine and life is None and event.event == "RETURN" and current > 1:
                msg = (
                    f"{self.file}: replica {replica} had lost all when it returned at "
                    f"{event.t / NS_PER_S:g} s: give replica {replica}:1 for what was before "
                    f"that, and {replica}:2 for what followed"
                )
                raise InputError(msg)
            if life not in (None, current):
                continue
            if placed is not None and mine and event.event not in CHANGES:
                event = placed[1]  # noqa: PLW2901
            elif event.event != "END" or not replicas.up[replica]:
                continue
            event.n = n
            n += 1
            yield event
        if life is not None and not 0 < life <= replicas.lives[replica]:
            lives = replicas.lives[replica]
            has = f"has lives 1 to {lives}, and no {life}" if lives else "was never up"
            msg = f"{self.file}: replica {replica} {has}"
            raise InputError(msg)
