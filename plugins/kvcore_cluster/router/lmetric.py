"""LMetric: tokens to prefill, times requests."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import Replica, Request, Router


@attrs.define(slots=False, eq=False)
class LMetric(Router):
    """Send a request where tokens to prefill, times the batch, are fewest. O(replicas).

    The tokens are those that the replica has yet to prefill, with this request; the batch is
    the number of requests in flight, with this one. There are no options.

    Source: arXiv 2603.15202 (OSDI 2026).
    """

    name: ClassVar[str] = "lmetric"

    def cost(self, request: Request, replica: Replica) -> float:
        """Return tokens to prefill times requests in flight, this request included."""
        prefill = replica.waiting_tokens
        if request.prompt_tokens > replica.hit_tokens:
            prefill += request.prompt_tokens - replica.hit_tokens
        return prefill * (replica.requests + 1)
