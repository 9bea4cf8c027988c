"""Session affinity: consistent hashing with bounded loads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, inf
from typing import ClassVar

import attrs

from kvcore import InputError, Replica, Request, Router
from kvcore_cluster.router._draw import draw


@attrs.define(slots=False, eq=False)
class SessionAffinity(Router):
    """Send the requests of a session to one replica, unless that has too many.

    Each replica has points on a ring; a session goes to the replica of the next point after
    its own hash. A replica that has `bound` times the mean number of requests in flight is
    passed over. A replica that leaves or joins moves only the sessions of its own points. A
    request without a session is hashed by its tenant, else by the first key of its prompt,
    else by its id. O(log points + points that are passed over + replicas).

    Options:
        bound: most requests in flight as a multiple of the mean, above 1.
        points: number of points of each replica on the ring.
        seed: number from which the hashes are derived.

    Source: Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads, 2018.
    """

    name: ClassVar[str] = "session"
    uses_hits: ClassVar[bool] = False

    bound: float = 1.25
    points: int = 100
    seed: int = 0

    _ring: list[tuple[float, int]] = attrs.field(factory=list, init=False)
    _members: dict[int, Replica] = attrs.field(factory=dict, init=False)
    _in_flight: int = attrs.field(default=0, init=False)
    _changed: bool = attrs.field(default=True, init=False)

    def __attrs_post_init__(self) -> None:
        """Check the options.

        Raises:
            InputError: a bound that leaves no room, or no points.
        """
        if not 1 < self.bound < inf or self.points < 1:
            msg = f"router 'session': bound={self.bound} must be above 1, and points 1 or more"
            raise InputError(msg)

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica:
        """Return the first replica on the ring, from the session on, that has room."""
        if self._changed:
            self._ring = sorted(
                (draw(self.seed, self.name, (number, point)), number)
                for number in self._members
                for point in range(self.points)
            )
            self._changed = False
        limit = ceil(self.bound * (self._in_flight + 1) / len(replicas))
        ring = self._ring
        start = bisect_right(ring, (draw(self.seed, self.name, _hashed(request)), -1))
        for step in range(len(ring)):
            replica = self._members[ring[(start + step) % len(ring)][1]]
            # A proxy leaves out replicas that it has tried.
            if replica.requests < limit and replica in replicas:
                return replica
        msg = "some replica has at most the mean"
        raise AssertionError(msg)

    def on_routed(self, request: Request, replica: Replica, now: int) -> None:
        """Add 1 to the requests in flight."""
        self._in_flight += 1

    def on_ended(self, request: Request, replica: Replica, now: int) -> None:
        """Subtract 1 from the requests in flight."""
        self._in_flight -= 1

    def on_joined(self, replica: Replica, now: int) -> None:
        """Add the replica's points to the ring."""
        self._members[replica.number] = replica
        self._changed = True

    def on_left(self, replica: Replica, now: int) -> None:
        """Remove the replica's points from the ring."""
        del self._members[replica.number]
        self._changed = True


def _hashed(request: Request) -> object:
    """Return the identity by which a request is hashed."""
    if request.session is not None:
        return "session", request.session
    if request.tenant is not None:
        return "tenant", request.tenant
    if request.keys:
        return "key", request.keys[0]
    return "request", request.id
