"""Random choices: one replica, or the better of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvcore import Replica, Request, Router
from kvcore_cluster.router._draw import draw, draw_one


@attrs.define(slots=False, eq=False)
class Random(Router):
    """Send each request to a random replica. O(1).

    Options:
        seed: number from which all draws are derived.
    """

    name: ClassVar[str] = "random"
    uses_hits: ClassVar[bool] = False

    seed: int = 0

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica:
        """Return a replica that is drawn for the request."""
        return draw_one(self.seed, self.name, request.id, replicas)


@attrs.define(slots=False, eq=False)
class PowerOfTwo(Router):
    """Draw two replicas, and send the request to the one with fewer in flight. O(1).

    The longest of n queues is then O(log log n), where one random choice gives
    O(log n / log log n).

    Options:
        seed: number from which all draws are derived.

    Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
    """

    name: ClassVar[str] = "power-of-two"
    uses_hits: ClassVar[bool] = False

    seed: int = 0

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica:
        """Return the drawn replica with fewer requests in flight, of equal ones the first."""
        count = len(replicas)
        first = int(draw(self.seed, self.name, request.id) * count)
        if count == 1:
            return replicas[0]
        second = int(draw(self.seed, self.name, (request.id, 2)) * (count - 1))
        # An index into the others, so that both differ.
        second += second >= first
        first_drawn, other = replicas[first], replicas[second]
        return other if other.requests < first_drawn.requests else first_drawn
