"""Least requests in flight: join the shortest queue."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import Replica, Request, Router


@attrs.define(slots=False, eq=False)
class LeastRequests(Router):
    """Send a request to the replica with the fewest in flight. O(replicas)."""

    name: ClassVar[str] = "least-requests"
    uses_hits: ClassVar[bool] = False

    def cost(self, request: Request, replica: Replica) -> float:
        """Return the number of requests in flight."""
        del request
        return replica.requests
