"""Round robin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvcore import Replica, Request, Router


@attrs.define(slots=False, eq=False)
class RoundRobin(Router):
    """Send requests to one replica after the other. O(1)."""

    name: ClassVar[str] = "round-robin"
    uses_hits: ClassVar[bool] = False

    _turn: int = attrs.field(default=0, init=False)

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica:
        """Return the next replica."""
        chosen = replicas[self._turn % len(replicas)]
        self._turn += 1
        return chosen
