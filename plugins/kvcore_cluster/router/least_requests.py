"""Least requests in flight: join the shortest queue."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar

import attrs

from kvcore import Replica, Request, Router

by_load = attrgetter("requests", "routed", "number")
"""The order of replicas by requests in flight, then by requests ever sent, then by number."""


@attrs.define(slots=False, eq=False)
class LeastRequests(Router):
    """Send a request to the replica with the fewest in flight. O(replicas), in C."""

    name: ClassVar[str] = "least-requests"
    uses_hits: ClassVar[bool] = False

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica:
        """Return the replica with the fewest requests in flight, then the fewest ever sent."""
        return min(replicas, key=by_load)
