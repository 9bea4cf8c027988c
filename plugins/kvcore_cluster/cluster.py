"""Several servers under one clock: a discrete-event simulation of a cluster.

Each replica is a serving loop whose turns are begun and ended in the order of one heap:

    requests -> router -> inbox of a replica -> begin (plan) ... end (tokens, finishes)
       ^                                                             |
       +------------------- sessions, lost requests -----------------+

A replica that decodes is not touched before its jump ends or a request comes to it, so that
a cluster costs as much as its replicas would alone. Events at the same nanosecond come in
this order: replicas that fail, then return; decisions of a planner; K/V that has moved
between replicas; requests, in the order of the workload; ends of steps, by their picosecond
and the number of the replica; requests that these ends have brought about; and plans of next
steps, also by picosecond and replica. Lines of one replica at one time are in the trace in the
order in which they happened; the order of lines of different replicas means nothing.

Hints for prefetches are ignored: a replica is picked when a request comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.errors import InputError, PolicyError
from kvcore.request import SLO, Request
from kvcore.serving.router import Replica, Router
from kvcore.units import PS_PER_NS, parse_seconds, seconds_text
from kvcore.untrusted import parse_digits
from kvcore.workloads.arrivals import NEVER, Arrivals
from kvcore_cluster.dispatcher import Dispatcher, PrefixView
from kvcore_cluster.planner import Autoscaler, Planner
from kvcore_cluster.replica import ReplicaLoop, Server

if TYPE_CHECKING:
    from kvcore_cluster.trace import ClusterTrace

__all__ = ["Cluster", "Failure"]

FAIL, RETURN, PLAN, MOVED, ARRIVAL, END, BEGIN = range(7)
"""The kinds of events, in the order in which those of one time are handled."""


@attrs.frozen
class Failure:
    """A replica that fails, loses its K/V, and returns.

    Attributes:
        at: when, ns.
        replica: its number.
        duration: ns until it returns; None: never.
    """

    at: int
    replica: int
    duration: int | None = None

    def __attrs_post_init__(self) -> None:
        """Check the numbers."""
        if min(self.at, self.replica) < 0 or (self.duration is not None and self.duration < 1):
            msg = (
                f"{self}: give a replica from 0 on, a time from 0 on, and some time to be gone"
            )
            raise InputError(msg)

    @classmethod
    def parse(cls, text: str) -> Failure:
        """Read a failure such as `replica=3,at=600,for=120`, in seconds.

        Raises:
            InputError: another name, or no such number.
        """
        fields: dict[str, str] = {}
        for piece in text.split(","):
            name, equals, value = piece.partition("=")
            if not equals or name not in ("replica", "at", "for") or name in fields:
                msg = f"{text!r} is no failure: write replica=3,at=600,for=120"
                raise InputError(msg)
            fields[name] = value
        replica = parse_digits(fields.get("replica", ""))
        if replica is None or "at" not in fields:
            msg = f"{text!r}: a failure needs replica=, its number, and at=, seconds"
            raise InputError(msg)
        gone = parse_seconds(fields["for"]) if "for" in fields else None
        return cls(parse_seconds(fields["at"]), replica, gone)

    def __str__(self) -> str:
        """Return the failure as `parse` reads it."""
        gone = "" if self.duration is None else f",for={seconds_text(self.duration)}"
        return f"replica={self.replica},at={seconds_text(self.at)}{gone}"


def check_failures(failures: Iterable[Failure], replicas: int) -> None:
    """Raise InputError if a replica that fails does not exist, or is down already."""
    down: dict[int, int | None] = {}
    for failure in sorted(failures, key=lambda failure: failure.at):
        if failure.replica >= replicas:
            msg = f"{failure}: replicas are numbered from 0 to {replicas - 1}"
            raise InputError(msg)
        until = down.get(failure.replica, -1)
        if until is None or failure.at <= until:
            msg = f"{failure}: the replica has failed before, and has not returned by then"
            raise InputError(msg)
        gone = failure.duration
        down[failure.replica] = None if gone is None else failure.at + gone


Start = Callable[[Callable[[Request, int], None], Callable[[Request, int], None]], ReplicaLoop]
"""Makes the loop of a replica, given the callbacks for first tokens and for ends."""


class Cluster:
    """Serves requests with several replicas.

    Args:
        arrivals: the requests by time of arrival.
        starts: makes the loop of each replica.
        router: picks the replica of a request.
        view: the router's view of the caches.
        failures: replicas that fail.
        planner: starts and stops replicas; None: all are up.
        slo: the SLO of the requests, for the planner.
        trace: the trace of decisions; None: there is none.

    Attributes:
        servers: the replicas.
        dispatcher: calls the router, and counts requests in flight.
        scalers: start and stop replicas, one for each pool.
        refused: requests that the router refused, with their time of arrival and the reason.
        retried: how often a request was served again because its replica had failed.
        begin: when (ns) the first request arrives, from which on replicas are paid for; 0
            without any.
        end: when (ns) the last request ended that has ended so far.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        starts: Sequence[Start],
        router: Router,
        view: PrefixView,
        *,
        failures: Iterable[Failure] = (),
        planner: Planner | None = None,
        slo: SLO | None = None,
        trace: ClusterTrace | None = None,
    ) -> None:
        self.arrivals = arrivals
        self._trace = trace
        self._now = 0
        self._heap: list[tuple[int, int, int, int, int]] = []
        # Requests that wait for a replica that is up.
        self._held: list[tuple[int, Request]] = []
        self.refused: list[tuple[int, Request, str]] = []
        self.retried = 0
        self.begin = self.end = arrivals.next_at if arrivals.next_at < NEVER else 0
        self.servers = [self._server(index, start) for index, start in enumerate(starts)]
        replicas = [server.loop.replica(server.number) for server in self.servers]
        # Replicas report stores and evictions only to a router that uses hits.
        self._reporting = self._connect(replicas, router, view)
        # Whether the end of a step at one replica may cause an event at another.
        self._chained = False
        self._returns = 0
        # Of each replica that a planner starts and stops.
        self._scaler_of: dict[int, Autoscaler] = {}
        self.scalers = [] if planner is None else self._scaled(planner, slo)
        for scaler in self.scalers:
            self._scaler_of |= dict.fromkeys(scaler.rented, scaler)
        for server in self.servers:
            own = self._scaler_of.get(server.number)
            if own is None or server.number in own.members:
                self._join(server, 0)
        if planner is not None:
            self._put(PLAN, self.begin + self.scalers[0].interval)
        self._fail_at = NEVER
        if failures and planner is not None:
            msg = "fail= and autoscale= both start and stop replicas: give one of them"
            raise InputError(msg)
        self._failures = sorted(failures, key=lambda failure: (-failure.at, -failure.replica))
        check_failures(self._failures, len(self.servers))
        self._next_failure()

    def run(self) -> None:
        """Serve all requests that arrive.

        Raises:
            InputError: the workload is out of order, or its sessions do not close.
            PolicyError: a plugin failed, or a scheduler lets nothing run.
        """
        heap, arrivals, servers = self._heap, self.arrivals, self.servers
        does = self._handlers()
        while True:
            next_at = arrivals.next_at
            if heap and heap[0] < (next_at, ARRIVAL):
                now, kind, _, number, turn = heappop(heap)
                server = servers[number]
                if kind < ARRIVAL or turn == server.turn:
                    does[kind](server, now)
            elif next_at < NEVER:
                now, request = arrivals.take()
                if self._trace is not None:
                    self._record(request, now)
                self._route(request, now, now)
            else:
                break
        self._check_all_served()
        arrivals.check_all_came()
        for scaler in self.scalers:
            scaler.end(self.end)
        if self._trace is not None:
            self._trace.flush(NEVER)

    def _handlers(self) -> dict[int, Callable[[Server, int], None]]:
        """Return the handlers of the events in the heap, by kind."""
        return {
            FAIL: self._fail,
            RETURN: self._return,
            PLAN: self._plan,
            END: self._end,
            BEGIN: self._begin,
        }

    def _connect(self, replicas: list[Replica], router: Router, view: PrefixView) -> bool:
        """Build the dispatcher; return True if replicas must report stores and evictions."""
        self.dispatcher = Dispatcher(router, replicas, view)
        return view.wants_events and router.uses_hits

    def _scaled(self, planner: Planner, slo: SLO | None) -> list[Autoscaler]:
        """Return the autoscaler of each pool."""
        return [Autoscaler(planner, self.servers, slo, self.begin)]

    def _seen(self, server: Server) -> tuple[Dispatcher, Replica]:
        """Return the dispatcher that routes to a replica, and the replica as that sees it."""
        return self.dispatcher, self.dispatcher.replicas[server.number]

    def _server(self, number: int, start: Start) -> Server:
        server: Server

        def on_first_token(request: Request, now: int) -> None:
            dispatcher, replica = self._seen(server)
            dispatcher.first_token(request, replica, now)

        def on_ended(request: Request, now: int) -> None:
            del server.sent[request.id]
            dispatcher, replica = self._seen(server)
            dispatcher.ended(request, replica, now)
            if number in self._scaler_of:
                self._scaler_of[number].ended(request.prompt_tokens)
            self._ended(server, request, now)

        server = Server(number, lambda: start(on_first_token, on_ended))
        return server

    def _ended(self, server: Server, request: Request, now: int) -> None:
        """Called when a replica has ended a request, which its session may wait for."""
        self.end = max(self.end, now)
        self.arrivals.ended(request, now)

    def _touch(self, server: Server, now: int) -> None:
        """Interrupt the jump of a busy replica at `now`, or schedule a turn of an idle one."""
        if server.busy:
            end_ps = server.loop.interrupt(now)
            if end_ps is not None:
                self._schedule(END, server, end_ps)
        else:
            self._schedule(BEGIN, server, max(now * PS_PER_NS, server.loop.clock_ps))

    def _schedule(self, kind: int, server: Server, at_ps: int) -> None:
        """Schedule the begin or end of a replica's turn; cancel its scheduled event, if any."""
        server.turn += 1
        now = at_ps // PS_PER_NS
        heappush(self._heap, (now, kind, at_ps, server.number, server.turn))

    def _end(self, server: Server, now: int) -> None:
        """END: end the turn of a replica, and begin the next, unless something comes before."""
        server.busy = False
        server.loop.end()
        if server.draining is not None and not server.sent:
            self._stop(server, now)
        elif self.arrivals.next_at <= now or (self._heap and self._heap[0][0] == now):
            self._schedule(BEGIN, server, server.loop.clock_ps)
        else:
            self._begin(server, now)

    def _begin(self, server: Server, now: int) -> None:
        """BEGIN: begin the next turn of a replica, or let it rest until there is one."""
        loop = server.loop
        loop.wake(now)
        server.busy = loop.begin()
        if server.busy:
            self._schedule(END, server, loop.due(self._horizon, reporting=self._reporting))
            return
        if server.draining is not None and not server.sent:
            self._stop(server, now)
            return
        wake = loop.idle_until()
        if wake < NEVER:
            self._schedule(BEGIN, server, max(wake * PS_PER_NS, loop.clock_ps))

    def _horizon(self) -> int:
        """Return the time (ns) before which no request comes to any replica, nor a failure."""
        horizon = min(self.arrivals.next_at, self._fail_at)
        # The end of a request may cause the next one of its session.
        if self._heap and (self._chained or self.arrivals.following or self._returns):
            horizon = min(horizon, self._heap[0][0])
        return horizon

    def _route(self, request: Request, now: int, arrival: int) -> None:
        """ARRIVAL: send a request to the replica that the router picks."""
        if not self.dispatcher.up:
            self._hold(request, now, arrival, "all replicas have failed")
            return
        server = self._dispatch(self.dispatcher, request, now, arrival)
        if server is None:
            self._refuse(request, now, arrival, "the router refused it")
            return
        server.loop.receive(request, now, arrival)
        self._touch(server, now)

    def _hold(self, request: Request, now: int, arrival: int, why: str) -> None:
        """Keep a request until a replica is up again, or refuse it where none will be."""
        if self._returns:
            self._held.append((arrival, request))
        else:
            self._refuse(request, now, arrival, why)

    def _dispatch(
        self, pool: Dispatcher, request: Request, now: int, arrival: int, leg: str = ""
    ) -> Server | None:
        """Route a request within a pool; return the replica, or None if it was refused."""
        self._now = now
        replica = pool.route(request, now)
        if replica is None:
            return None
        server = self.servers[replica.number]
        if self._trace is not None:
            self._trace.route(now, request, replica.number, replica.hit_tokens, leg)
        server.sent[request.id] = arrival, request
        if server.number in self._scaler_of:
            self._scaler_of[server.number].sent(request.prompt_tokens)
        return server

    def _record(self, request: Request, now: int) -> None:
        """Write REQUEST, and flush the lines that no later line can precede."""
        trace = self._trace
        assert trace is not None
        trace.request(request, now)
        if trace.is_full:
            begun = (server.loop.clock_ps for server in self.servers if server.sent)
            trace.flush(min(now, min(begun, default=NEVER * PS_PER_NS) // PS_PER_NS))

    def _refuse(self, request: Request, now: int, arrival: int, why: str) -> None:
        """Record a request that the router has refused."""
        if self._trace is not None:
            self._trace.refuse(now, request, why)
        self.refused.append((arrival, request, why))
        self.end = max(self.end, now)
        self.arrivals.ended(request, now)

    def _fail(self, server: Server, now: int) -> None:
        """FAIL: a replica loses its K/V; its requests are served again elsewhere."""
        failure = self._failures.pop()
        self._next_failure()
        dispatcher, replica = self._seen(server)
        if server.busy:
            server.loop.break_off(now)
        if self._trace is not None:
            self._trace.change(now, server.number, "FAIL")
        lost = list(server.sent.values())
        server.sent.clear()
        server.turn += 1
        server.restart()
        self._leave(server, now)
        for _, request in lost:
            dispatcher.ended(request, replica, now)
        if failure.duration is not None:
            self._returns += 1
            self._put(RETURN, now + failure.duration, server.number)
        for arrival, request in lost:
            self._serve_again(server, request, now, arrival)

    def _serve_again(self, server: Server, request: Request, now: int, arrival: int) -> None:
        """Route a request again that `server` has lost."""
        self.retried += 1
        self._route(request, now, arrival)

    def _return(self, server: Server, now: int) -> None:
        """RETURN: a replica is up, or up again, with an empty cache."""
        self._returns -= 1
        if self._trace is not None:
            self._trace.change(now, server.number, "RETURN")
        self._join(server, now)
        waiting, self._held = self._held, []
        for arrival, request in waiting:
            self._route(request, now, arrival)

    def _join(self, server: Server, now: int) -> None:
        """Make a replica available to its router."""
        dispatcher, replica = self._seen(server)
        server.up = True
        server.loop.wake(now)
        server.loop.join(replica, lambda: self._now)  # when a request was routed last
        if self._reporting:
            dispatcher.view.connect(server.number, server.loop.cache)
        dispatcher.joined(replica, now)

    def _leave(self, server: Server, now: int) -> None:
        """Make a replica unavailable to its router."""
        server.up = False
        dispatcher, replica = self._seen(server)
        dispatcher.left(replica, now)

    def _put(self, kind: int, at: int, number: int = 0) -> None:
        """Schedule an event at a time in ns which is none of a replica's turn."""
        heappush(self._heap, (at, kind, at * PS_PER_NS, number, 0))

    def _plan(self, _: Server, now: int) -> None:
        """PLAN: start and stop replicas by the planner's decision, while requests are left."""
        unserved = self._held or any(server.sent for server in self.servers)
        if not unserved and self.arrivals.next_at == NEVER:
            return
        for change in [change for scaler in self.scalers for change in scaler.decide(now)]:
            server = self.servers[change.replica]
            if change.up:
                self._returns += 1
                self._put(RETURN, now + self.scalers[0].start_up, server.number)
                continue
            self._leave(server, now)
            if self._trace is not None:
                self._trace.change(now, server.number, "LEAVE")
            if not server.sent:
                self._stop(server, now)
        # Where nothing else happens, those left wait for ever: no other replica gets them.
        if self._heap or self.arrivals.next_at < NEVER:
            self._put(PLAN, now + self.scalers[0].interval)

    def _stop(self, server: Server, now: int) -> None:
        """Stop a replica that is sent no more requests and has none: its K/V is lost."""
        self._scaler_of[server.number].stopped(server, now)
        if self._trace is not None:
            self._trace.change(now, server.number, "FAIL")
        server.draining = None
        server.turn += 1
        server.restart()

    def _next_failure(self) -> None:
        """Schedule the next failure."""
        self._fail_at = NEVER
        if self._failures:
            first = self._failures[-1]
            self._fail_at = first.at
            self._put(FAIL, first.at, first.replica)

    def _check_all_served(self) -> None:
        """Raise PolicyError if requests wait for ever."""
        for server in self.servers:
            if server.sent:
                waiting: Any = server.loop.batcher.waiting
                msg = (
                    f"scheduler of replica {server.number} leaves {len(server.sent)} requests "
                    f"waiting while nothing runs: the first is {next(iter(waiting), None)!r}"
                )
                raise PolicyError(msg)
