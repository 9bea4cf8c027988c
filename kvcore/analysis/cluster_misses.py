"""Miss classification on a cluster: by replica, and whether another replica held the prefix."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcore.analysis.miss_reasons import DivergencePoint, Id, RequestMisses
from kvcore.analysis.misses import MissClassifier
from kvcore.trace.replicas import CHANGES, Replicas

if TYPE_CHECKING:
    from kvcore.trace import events


class Holders:
    """The replicas that hold each key, with how many of the `ratio` blocks of the key."""

    def __init__(self, ratio: int) -> None:
        self._ratio = ratio
        self._of: dict[Any, dict[int, int]] = {}

    def store(self, replica: int, keys: Sequence[Any], first: int, end: int) -> None:
        """Store the blocks `[first, end)` of a prompt. O(keys)."""
        self._set(replica, keys, first // self._ratio, end)

    def remove(self, replica: int, keys: Sequence[Any], first: int, end: int) -> None:
        """Remove the last blocks stored of a prompt, `[first, end)`. O(keys)."""
        whole = first // self._ratio
        for key in keys[whole : -(-end // self._ratio)]:
            holders = self._of.get(key, {})
            holders.pop(replica, None)
            if not holders:
                self._of.pop(key, None)
        self._set(replica, keys, whole, first)

    def lose(self, replica: int) -> None:
        """Remove all that a replica had. O(all keys)."""
        for holders in self._of.values():
            holders.pop(replica, None)
        self._of = {key: holders for key, holders in self._of.items() if holders}

    def find(self, keys: Sequence[Any], replica: int) -> tuple[int, int | None]:
        """Return how many blocks of a prompt a replica but `replica` has, and which one.

        That with the most, the lowest of several; None: there is none. A replica that has a
        block has those before it, so this is a bisection. O(log keys).
        """
        of = self._of

        def is_absent(key: Any) -> bool:
            holders = of.get(key, ())
            return len(holders) <= (replica in holders)

        missing = bisect_left(keys, 1, key=is_absent)
        if not missing:
            return 0, None
        last = of[keys[missing - 1]].items()
        blocks, other = max((count, -each) for each, count in last if each != replica)
        return (missing - 1) * self._ratio + blocks, -other

    def _set(self, replica: int, keys: Sequence[Any], low: int, end: int) -> None:
        for place in range(low, -(-end // self._ratio)):
            held = min(end - place * self._ratio, self._ratio)
            self._of.setdefault(keys[place], {})[replica] = held


class ClusterMisses:
    """Classifies the misses of every request on the replica that served it last.

    Attributes:
        header: the first line of the trace.
        requests: what became of those heard of, by id.
    """

    def __init__(self, header: events.Header) -> None:
        """Start with the empty caches of a cluster.

        Raises:
            ViolationError: HEADER says what cannot be.
        """
        self.header = header
        self.requests: dict[Id, RequestMisses] = {}
        self._placed = Replicas(header)
        self._places: dict[Any, DivergencePoint] = {}
        self._elsewhere: dict[Id, tuple[int, int]] = {}
        self._lives = [self._life(own) for own in self._placed.headers]
        self._holders = Holders(max(1, header.key_tokens // header.block_size))

    def take(self, event: events.Event) -> None:
        """Apply the next event after HEADER.

        Raises:
            ViolationError: the event names what is not there.
        """
        placed = self._placed.place(event)
        if placed is None:
            self._of_no_replica(event)
            return
        number, line = placed
        life = self._lives[number]
        if event.event in CHANGES:
            if event.event == "FAIL":
                life.judge()
                self._holders.lose(number)
                self._lives[number] = self._life(self._placed.headers[number])
            return
        victim = life.before(line)
        life.state.apply(line)
        life.after(line, victim)
        if event.event == "ROUTE":
            # What decodes a request has its K/V sent: its prompt missed where it was prefilled.
            if event.leg == "decode":  # type: ignore[attr-defined]
                return
            self._route(line, number, life)  # type: ignore[arg-type]  # it is a REQUEST there
        elif event.event == "COMMIT" and event.how in ("new", "grown"):  # type: ignore[attr-defined]
            prompt, first = life.state.sequences[line.seq].prompt, line.first  # type: ignore[attr-defined]
            keys = prompt.generated if line.generated is True else prompt.keys  # type: ignore[attr-defined]
            self._holders.store(number, keys, first, first + line.blocks)  # type: ignore[attr-defined]
        elif victim is not None:
            span, end = victim
            self._holders.remove(number, span.keys, span.end, end)

    def judge(self) -> None:
        """Divide evicted segments into capacity and policy misses, after the last line."""
        for life in self._lives:
            life.judge()

    def _life(self, header: events.Header) -> MissClassifier:
        life = MissClassifier(header, places=self._places)
        life.elsewhere = self._elsewhere
        return life

    def _of_no_replica(self, event: events.Event) -> None:
        if event.event == "REQUEST":
            self.requests[event.id] = RequestMisses(  # type: ignore[attr-defined]
                request=event.id,  # type: ignore[attr-defined]
                tokens=event.prompt,  # type: ignore[attr-defined]
                salt=event.salt or None,  # type: ignore[attr-defined]
                tenant=event.tenant or None,  # type: ignore[attr-defined]
                arrived=event.t,
            )
        elif event.event == "REJECT":
            self.requests[event.request].rejected = event.why  # type: ignore[attr-defined]

    def _route(self, request: events.Request, number: int, life: MissClassifier) -> None:
        """Record the longest prefix of a routed prompt that another replica holds."""
        reasons = life.requests[request.id]
        reasons.arrived, reasons.replica = self.requests[request.id].arrived, number
        self.requests[request.id] = reasons
        keys = life.state.requests[request.id].keys
        self._elsewhere.pop(request.id, None)
        blocks, other = self._holders.find(keys, number)
        if other is not None:
            self._elsewhere[request.id] = blocks, other
