"""Miss classification of a trace: of one server, or of all replicas of a cluster."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from kvcore.progress import Tick, unseen
from kvcore.trace import events
from kvcore.trace.events import violated
from kvcore_plugins.traces.reader import read_events
from kvcore_replay.misses.classifier import MissClassifier
from kvcore_replay.misses.groups import GroupMisses
from kvcore_replay.misses.pools import PoolMisses
from kvcore_replay.misses.reasons import DivergencePoint, Explanation, Id, RequestMisses
from kvcore_replay.state.replicas import Replicas, ServerReader

__all__ = ["explain"]


def explain(
    file: str | os.PathLike[str],
    *,
    source: str | None = None,
    replica: int | str | None = None,
    tick: Tick = unseen,
) -> Explanation:
    """Return the hit of each request of a trace at first admission, and why the rest missed.

    A file with a right digest is trusted: `kvcore_replay.check.check_trace` checks whether its
    events are possible. Of an incomplete trace the lines before the cut are explained. Costs
    about twice such a check; memory grows with the distinct keys, about 300 bytes each.

    Args:
        file: the trace.
        source: the name of the trace in reports; None: its path.
        replica: the number of a replica of a cluster, with that of its life if it failed
            (`1:2`); None: all, with each request explained on the replica that served it last.
        tick: called with the bytes of the file that have been read.

    Raises:
        InputError: the file cannot be opened.
        TraceError: the file has no HEADER, or a line is damaged or contradicts earlier ones.
    """
    reader = read_events(file) if replica is None else ServerReader(file, replica)
    misses = reader.feed(_classifier, tick)
    misses.judge()
    return Explanation(
        source=str(reader.file) if source is None else source,
        header=misses.header.as_dict(),
        complete=reader.complete,
        cut_reason=reader.cut_reason,
        requests=misses.requests,
    )


def _classifier(header: events.Header) -> MissClassifier | ClusterMisses:
    """Return the classifier of a trace: of one server, or of a cluster."""
    if (header.cache_groups or header.layer_pools) and header.replicas:
        violated("misses of hybrid models are explained for one replica: give replica")
    if header.replicas:
        return ClusterMisses(header)
    return server_misses(header)


def server_misses(header: events.Header, state: Any = None) -> MissClassifier:
    """Return the classifier of the trace of one server, or of one whose `state` is kept."""
    if header.cache_groups:
        return GroupMisses(header, state)
    if header.layer_pools:
        return PoolMisses(header, state)
    return MissClassifier(header, state)


class Holders:
    """The replicas that hold each key, and the number of its `ratio` blocks that each holds."""

    def __init__(self, ratio: int) -> None:
        self._ratio = ratio
        self._of: dict[Any, dict[int, int]] = {}

    def store(self, replica: int, keys: Sequence[Any], first: int, end: int) -> None:
        """Store the blocks `[first, end)` of a prompt. O(keys)."""
        self._set(replica, keys, first // self._ratio, end)

    def remove(self, replica: int, keys: Sequence[Any], first: int, end: int) -> None:
        """Remove the last stored blocks of a prompt, `[first, end)`. O(keys)."""
        index = first // self._ratio
        for key in keys[index : -(-end // self._ratio)]:
            holders = self._of.get(key, {})
            holders.pop(replica, None)
            if not holders:
                self._of.pop(key, None)
        self._set(replica, keys, index, first)

    def lose(self, replica: int) -> None:
        """Remove all blocks of a replica. O(all keys)."""
        for holders in self._of.values():
            holders.pop(replica, None)
        self._of = {key: holders for key, holders in self._of.items() if holders}

    def find(self, keys: Sequence[Any], replica: int) -> tuple[int, int | None]:
        """Return the most blocks of a prompt on any replica but `replica`, and its number.

        The lowest number of several; None if no other replica holds a block. A replica that
        holds a block holds the blocks before it, so bisection finds the last. O(log keys).
        """
        by_key = self._of

        def is_absent(key: Any) -> bool:
            holders = by_key.get(key, ())
            return len(holders) <= (replica in holders)

        missing = bisect_left(keys, 1, key=is_absent)
        if not missing:
            return 0, None
        last = by_key[keys[missing - 1]].items()
        blocks, other = max((count, -holder) for holder, count in last if holder != replica)
        return (missing - 1) * self._ratio + blocks, -other

    def _set(self, replica: int, keys: Sequence[Any], low: int, end: int) -> None:
        for index in range(low, -(-end // self._ratio)):
            blocks = min(end - index * self._ratio, self._ratio)
            self._of.setdefault(keys[index], {})[replica] = blocks


class ClusterMisses:
    """Classifies the misses of every request on the replica that served it last.

    Attributes:
        header: the first line of the trace.
        requests: the misses of each request so far, by id.
    """

    def __init__(self, header: events.Header) -> None:
        """Start with the empty caches of a cluster.

        Raises:
            ViolationError: HEADER describes no possible cluster.
        """
        self.header = header
        self.requests: dict[Id, RequestMisses] = {}
        self._placed = Replicas(header)
        self._divergences: dict[Any, DivergencePoint] = {}
        self._elsewhere: dict[Id, tuple[int, int]] = {}
        self._lives = [self._life(own) for own in self._placed.headers]
        self._holders = Holders(max(1, header.key_tokens // header.block_size))

    def take(self, event: Any) -> None:
        """Apply the next event after HEADER.

        Raises:
            ViolationError: the event names a request, span or sequence that does not exist.
        """
        placed = self._placed.place(event)
        if placed is None:
            self._of_no_replica(event)
            return
        replica, line = placed
        if event.event == "FAIL":
            self._lives[replica].judge()
            self._holders.lose(replica)
            self._lives[replica] = self._life(self._placed.headers[replica])
        elif event.event not in ("RETURN", "LEAVE"):
            self._of_replica(event, replica, line)

    def judge(self) -> None:
        """Divide evicted segments into capacity and policy misses, after the last line."""
        for life in self._lives:
            life.judge()

    def _life(self, header: events.Header) -> MissClassifier:
        life = MissClassifier(header, divergences=self._divergences)
        life.elsewhere = self._elsewhere
        return life

    def _of_no_replica(self, event: Any) -> None:
        """Apply a line of the cluster as a whole."""
        if event.event == "REQUEST":
            self.requests[event.id] = RequestMisses(
                request=event.id,
                tokens=event.prompt,
                prompt=event.prompt,
                salt=event.salt or None,
                tenant=event.tenant or None,
                arrived=event.t,
            )
        elif event.event == "REJECT":
            if event.request not in self.requests:
                violated(f"request {event.request!r} does not exist")
            self.requests[event.request].rejected = event.why

    def _of_replica(self, event: Any, replica: int, line: Any) -> None:
        """Apply a line of one replica, which reads it as `line`."""
        life = self._lives[replica]
        victim = life.before(line)
        life.state.apply(line)
        life.after(line, victim)
        if event.event == "ROUTE":
            # The K/V of a prompt is sent to the replica that decodes: where the request was
            # prefilled is where its prompt hit or missed.
            if event.leg != "decode":
                self._route(line, replica, life)
        elif event.event == "COMMIT" and event.how in ("new", "grown"):
            prompt, first = life.state.sequences[line.seq].prompt, line.first
            keys = prompt.generated if line.generated is True else prompt.keys
            self._holders.store(replica, keys, first, first + line.blocks)
        elif victim is not None:
            span, end = victim
            self._holders.remove(replica, span.keys, span.end, end)

    def _route(self, request: events.Request, replica: int, life: MissClassifier) -> None:
        """Record the longest prefix of a routed prompt that another replica holds."""
        reasons = life.requests[request.id]
        reasons.arrived, reasons.replica = self.requests[request.id].arrived, replica
        self.requests[request.id] = reasons
        keys = life.state.requests[request.id].keys
        self._elsewhere.pop(request.id, None)
        blocks, other = self._holders.find(keys, replica)
        if other is not None:
            self._elsewhere[request.id] = blocks, other
