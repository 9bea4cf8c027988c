"""The check of a cluster's trace: of each replica's lives, and of the routing between them."""

from __future__ import annotations

from typing import Any

import attrs

from kvcore.cache.residency import CacheStats
from kvcore.errors import InputError
from kvcore.trace import events
from kvcore.trace.events import Event, Header, methods_by_event, violated
from kvcore_cluster.cluster import Failure
from kvcore_cluster.phases import Split
from kvcore_plugins.traces.digest import EvictionDigest
from kvcore_replay.check.base import expires, hit_counts
from kvcore_replay.check.groups import GroupChecker
from kvcore_replay.check.pools import PoolChecker
from kvcore_replay.check.server import TraceChecker
from kvcore_replay.state.layout import count_known
from kvcore_replay.state.replicas import CHANGES, UNPLACED, Replicas

HITS = events.Hit, events.GroupHit


def server_checker(header: Header) -> TraceChecker | GroupChecker:
    """Return the checker of the trace of one server.

    Raises:
        ValueError: the sizes do not fit one another.
    """
    if header.cache_groups:
        return GroupChecker(header)
    return PoolChecker(header) if header.layer_pools else TraceChecker(header)


@attrs.define(eq=False)
class CheckedReplica:
    """A replica of a traced cluster: its present life, and counts of the earlier ones.

    Attributes:
        header: HEADER of the replica alone.
        leaving: whether it gets no more requests, and stops when all of its own have ended.
        routed, evictions: counts of all lives.
        ended: counts of requests of the earlier lives, after which it failed, or stopped.
        hits: lookups and hits of these.
        sent: keys of the requests that were routed to it in this life, and of the blocks
            that they generated.
        handed: requests that it has prefilled in this life, and that another one decodes.
    """

    header: Header
    leaving: bool = False
    routed: int = 0
    ended: list[dict[str, Any]] = attrs.field(factory=list)
    hits: CacheStats = attrs.field(factory=CacheStats)
    evictions: EvictionDigest = attrs.field(factory=EvictionDigest)
    sent: set[Any] = attrs.field(factory=set)
    handed: set[int | str] = attrs.field(factory=set)
    _life: TraceChecker | GroupChecker | None = None

    @property
    def life(self) -> TraceChecker | GroupChecker:
        """The checker of the present life, made at its first line."""
        return self._life or self.begin(server_checker(self.header))

    def begin(self, life: TraceChecker | GroupChecker) -> TraceChecker | GroupChecker:
        """Begin a life with its checker, and return that."""
        self._life, life.evictions = life, self.evictions
        return life

    @property
    def all_hits(self) -> CacheStats:
        """Lookups and hits of all lives."""
        return CacheStats.sum([self.hits, self.life.state.hits])

    def fail(self) -> None:
        """End the current life of the replica."""
        own = self.life.lifecycles
        counts = {"finished": own.finished, "rejected": own.rejected}
        self.ended.append({**counts, "preemptions": dict(own.preemptions)})
        self.hits = self.all_hits
        self._life, self.leaving = None, False
        self.sent.clear()
        self.handed.clear()

    def report(self) -> dict[str, Any]:
        """Return its state, and counts over all lives, in the form of a server's report."""
        lives = [*self.ended, self.life.report()]
        return lives[-1] | {
            "finished": sum(life["finished"] for life in lives),
            "rejected": sum(life["rejected"] for life in lives),
            "preemptions": _sums(life["preemptions"] for life in lives),
            "hit": hit_counts(self.all_hits),
        }


@attrs.define
class Moving:
    """A request between the replica that prefills it and the one that decodes it.

    Attributes:
        source: the replica that prefills it.
        target: the replica that decodes it; None: it is not routed to one yet.
        blocks: blocks of it that were moved.
        missing: blocks of its prompt that the target had not.
        due: when the source may let go, ns: it is prefilled, room is made, K/V is there.
    """

    source: int
    target: int | None = None
    blocks: int = 0
    missing: int = 0
    due: int = 0


class ClusterChecker:
    """Checks each event of a cluster's trace.

    It is checked as `TraceChecker` does that of its replica; and every request is routed to a
    replica that is up, to one at a time, until it has ended.

    Attributes:
        replicas: by number.
    """

    def __init__(self, header: Header) -> None:
        """Start with the empty caches that HEADER gives.

        Raises:
            ValueError: sizes that do not fit one another, or fields that cannot be.
        """
        self._header = header
        self._placed = Replicas(header)
        self.lives = self._placed.lives
        self.replicas = [CheckedReplica(own) for own in self._placed.headers]
        self._up = self._placed.up[:]
        self._rejected = 0
        self._known: set[int | str] = set()
        # The replica of each request; and for requests without one, since when (ns).
        self._replica_of: dict[int | str, int] = {}
        self._since: dict[int | str, int] = {}
        self._returned: int | None = None
        # Of split phases: requests between their replicas, and how much of them has moved.
        self._moving: dict[int | str, Moving] = {}
        self._handed = 0
        # Requests given up where they were to decode, since their prefill was lost.
        self._dropped: dict[int | str, int] = {}
        # By lines of no replica: of a router, of the links between replicas, or END.
        self._of_none = methods_by_event(self, *UNPLACED)
        routing = header.routing or {}
        self._scales = routing.get("autoscale") is not None
        self._failures = None
        if "fail" in routing and not self._scales:
            self._failures = _schedule(routing["fail"])
        split = routing.get("disaggregate")
        self._pools = None if split is None else _pools(split)
        self._prefill_answers = bool(self._pools and self._pools.first_output == "prefill")
        eviction = header.plugins.get("eviction")
        self._exact = routing.get("view") == "exact" and not (
            eviction is None or expires(eviction.name)
        )

    def apply(self, event: Event) -> None:
        """Check the next event after HEADER, and apply it. Costs little more than on a server.

        Raises:
            ViolationError: the event contradicts what came before.
        """
        placed = self._placed.place(event)
        if placed is None:
            self._of_none[event.event](event)
            return
        index, line = placed
        replica = self.replicas[index]
        if event.event in CHANGES:
            self._change(event, index)
            return
        if not self._up[index]:
            violated(f"replica {index} is not up")
        if isinstance(event, events.Route) and isinstance(line, events.Request):
            self._route(event, line, index)
        replica.life.apply(line)
        if isinstance(event, (events.Finish, events.Reject)):
            self._finish(event, index)
        elif isinstance(event, (*HITS, events.Route, events.Miss, events.FirstToken)):
            self._arrived(event, index)
        elif isinstance(event, events.Keys):
            replica.sent.update(event.keys)

    def report(self) -> dict[str, Any]:
        """Return the sums over all replicas, and what each has."""
        parts = [replica.report() for replica in self.replicas]
        hits = CacheStats.sum(replica.all_hits for replica in self.replicas)
        return {
            "pool": _sums(part["pool"] for part in parts),
            "finished": sum(part["finished"] for part in parts) - self._handed,
            "rejected": self._rejected + sum(part["rejected"] for part in parts),
            "preemptions": _sums(part["preemptions"] for part in parts),
            "evictions": EvictionDigest.joined(r.evictions for r in self.replicas).as_dict(),
            "hit": hit_counts(hits),
            "tiers": [],
            "header": self._header.as_dict(),
            "replicas": [
                {"replica": index, "up": self._up[index], "failures": len(replica.ended)}
                | {"routed": replica.routed}
                | {name: value for name, value in part.items() if name != "header"}
                for index, (replica, part) in enumerate(zip(self.replicas, parts, strict=True))
            ],
        }

    def _request(self, event: events.Request) -> None:
        if event.id in self._known:
            violated(f"request {event.id!r} has a REQUEST line already")
        self._known.add(event.id)
        self._since[event.id] = event.t

    def _reject(self, event: events.Reject) -> None:
        """Check that the router may turn a request away."""
        if self._since.pop(event.request, None) is None:
            violated(f"request {event.request!r} does not wait to be routed")
        self._forget(event.request)
        self._rejected += 1

    def _transfer(self, event: events.Transfer) -> None:
        """Check that K/V moves between the replicas of a request, and how much."""
        moving = self._moving.get(event.request)
        if moving is None or (moving.source, moving.target) != (event.source, event.target):
            violated(f"request {event.request!r} does not move so")
        moving.blocks += event.blocks
        size = (self._header.routing or {}).get("block_bytes")
        if type(size) is not int or event.bytes != event.blocks * size:
            violated(f"{event.blocks} blocks of {size} bytes are not {event.bytes} bytes")
        if event.done < event.t:
            violated(f"K/V is there at {event.done} ns, before it moves")
        moving.due = max(moving.due, event.done)

    def _arrived(
        self,
        event: events.Route | events.Hit | events.GroupHit | events.Miss | events.FirstToken,
        replica: int,
    ) -> None:
        """Record how far a request is on its way from one replica to another."""
        moving = self._moving.get(event.request)
        if moving is None or replica not in (moving.source, moving.target):
            return
        if isinstance(event, events.FirstToken) or replica == moving.target:
            moving.due = max(moving.due, event.t)
        if replica == moving.target:
            if isinstance(event, events.Route):
                lifecycles = self.replicas[replica].life.lifecycles
                lifecycles.adopt(event.request, answered=self._prefill_answers)
            elif isinstance(event, HITS):
                moving.missing -= event.blocks

    def _finish(self, event: events.Finish | events.Reject, replica: int) -> None:
        """Record that a request has ended at a replica, or goes on elsewhere."""
        request, moving = event.request, self._moving.get(event.request)
        if moving is not None and moving.source == replica:
            current = self._replica_of.get(request)
            if current not in (replica, None) and moving.blocks != moving.missing:
                violated(
                    f"{moving.blocks} blocks of request {request!r} are moved, "
                    f"{moving.missing} were missing"
                )
            if current not in (replica, None) and event.t != moving.due:
                violated(f"request {request!r} goes on at {moving.due} ns")
            del self._moving[request]
            if event.event == "FINISH":
                self._handed += 1
                self.replicas[replica].handed.add(request)
                if current == replica:
                    # No replica decodes it: its router refuses it, and no ROUTE may follow.
                    del self._replica_of[request]
                    self._since[request] = -1
                return
        del self._replica_of[request]

    def _forget(self, request: int | str) -> None:
        """Record that a request no longer goes to the replica that was to decode it."""
        target = self._dropped.pop(request, None)
        if target is not None:
            self.replicas[target].life.forget(request)

    def _route(self, event: events.Route, request: events.Request, number: int) -> None:
        """Check that a request may go to a replica, and record that it is there."""
        self._must_be_in_pool(event, request, number)
        id_, replica = event.request, self.replicas[number]
        if replica.leaving:
            violated(f"replica {number} leaves: it is sent no more requests")
        if event.leg == "decode":
            moving = self._moving.get(id_)
            if moving is None or moving.target is not None:
                violated(f"request {id_!r} is not being prefilled elsewhere")
            moving.target = number
            moving.missing = -(-request.prompt // self._header.block_size)
        else:
            if event.leg == "prefill":
                self._moving[id_] = Moving(number)
            if id_ in self._replica_of:
                violated(f"request {id_!r} is at replica {self._replica_of[id_]}")
            self._forget(id_)
            if id_ in replica.handed:
                # It went on elsewhere, was lost there, and begins again.
                replica.handed.remove(id_)
                replica.life.forget(id_)
            since = self._since.pop(id_)
            if self._header.mode != "wall" and event.t not in (since, self._returned):
                violated(f"request {id_!r} waits since {since} ns, with replicas up")
        self._replica_of[id_] = number
        self._check_expected(event.tokens or 0, request, replica)
        replica.routed += 1
        replica.sent.update(request.keys, request.output_keys or ())

    def _must_be_in_pool(
        self, event: events.Route, request: events.Request, replica: int
    ) -> None:
        """Check that a replica belongs to the pool of the phase that is routed to it."""
        leg = event.leg if isinstance(event.leg, str) else ""
        if self._pools is None:
            fits = not leg
        else:
            pools = self._pools
            mixed, prefills = replica >= pools.prefill + pools.decode, replica < pools.prefill
            fits = {"prefill": prefills, "decode": not prefills}.get(
                leg, mixed or (prefills and request.output <= self._prefill_answers)
            )
        if not fits:
            violated(f"replica {replica} is not in a pool for {leg or 'whole requests'}")

    def _check_expected(
        self, tokens: int, request: events.Request, replica: CheckedReplica
    ) -> None:
        """Check that a router may expect `tokens` tokens of a prompt in `replica`'s cache."""
        sent = count_known(request.keys, replica.sent) * request.key_tokens
        if tokens > sent:
            violated(f"the router expects {tokens} cached tokens; {sent} were ever sent")
        if tokens and self._exact:
            cached = replica.life.cached_tokens(request)
            if tokens != cached:
                violated(f"the router expects {tokens} cached tokens; {cached} are")

    def _change(self, event: Event, number: int) -> None:
        """Apply FAIL, RETURN or LEAVE."""
        name, replica = event.event, self.replicas[number]
        if self._up[number] is (name == "RETURN"):
            violated(f"replica {number} is {'up' if self._up[number] else 'not up'}")
        if name == "LEAVE":
            if replica.leaving or not self._scales:
                violated(f"replica {number} does not leave")
            replica.leaving = True
            return
        if self._failures is not None:
            due = self._failures.pop() if self._failures else None
            if due != (event.t, name == "RETURN", number):
                violated("HEADER has no such failure next")
        self._up[number] = name == "RETURN"
        if name == "RETURN":
            self._returned = event.t
            return
        lost = self._lost(number)
        if self._scales and (lost or not replica.leaving):
            violated(f"replica {number} stops before it has ended all")
        replica.fail()
        for id_ in lost:
            del self._replica_of[id_]
            self._since[id_] = event.t

    def _lost(self, replica: int) -> list[int | str]:
        """Return the requests that begin again, since a replica fails."""
        lost = [id_ for id_, current in self._replica_of.items() if current == replica]
        for id_, moving in [*self._moving.items()]:
            if moving.source == replica:
                del self._moving[id_]
                # A request that its decoding replica has rejected is not lost.
                if moving.target is not None and id_ in self._replica_of:
                    if self._replica_of[id_] != replica:
                        lost.append(id_)
                    self._dropped[id_] = moving.target
            elif moving.target == replica and id_ in lost:
                # Its prefill replica still has it, and sends it to another one.
                lost.remove(id_)
                self._replica_of[id_], self._moving[id_] = moving.source, Moving(moving.source)
        self._dropped = {
            id_: current for id_, current in self._dropped.items() if current != replica
        }
        return lost

    def _end(self, event: events.End) -> None:
        for replica in self.replicas:
            replica.life.apply(event)
        left = [*self._since, *self._replica_of]
        if left:
            violated(f"requests that are not served: {len(left)}; the first is {left[0]!r}")
        stuck = [n for n, replica in enumerate(self.replicas) if replica.leaving]
        if stuck:
            violated(f"replica {stuck[0]} has ended all, and does not stop")
        if self._failures:
            violated(f"failures of HEADER that are not there: {len(self._failures)}")


def _schedule(texts: list[str]) -> list[tuple[int, bool, int]]:
    """Return when replicas fail and return, the last first: time, whether it returns, replica.

    Raises:
        ViolationError: HEADER has a text that is no failure.
    """
    try:
        failures = [Failure.parse(text) for text in texts]
    except InputError:
        violated(f"HEADER has failures that cannot be: {texts!r:.80}")
    changes = [(each.at, False, each.replica) for each in failures]
    changes += [
        (each.at + each.duration, True, each.replica)
        for each in failures
        if each.duration is not None
    ]
    return sorted(changes, reverse=True)


def _pools(text: str) -> Split:
    """Return the pools that the routing of HEADER gives.

    Raises:
        ViolationError: HEADER has a text that gives no pools.
    """
    try:
        return Split.parse(text)
    except InputError:
        violated(f"HEADER has pools that cannot be: {text!r:.80}")


def _sums(tables: Any) -> dict[str, int]:
    """Return the sums of tables that have the same names."""
    total: dict[str, int] = {}
    for table in tables:
        for name, value in table.items():
            total[name] = total.get(name, 0) + value
    return total
