"""The load-aware policy of vLLM's production stack: match minus excess load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvcore import Replica, Request, Router
from kvcore_cluster.router._draw import lowest


@attrs.define(slots=False, eq=False)
class LoadAware(Router):
    """Send a request where the match, less the load above the mean, is highest. O(replicas).

        hit tokens / prompt tokens - weight * (requests - mean) / max(1, mean)

    Options:
        weight: cost of load above the mean.
        seed: number from which draws among equals are derived.

    Source: vllm-project/production-stack, pull request 1035.
    """

    name: ClassVar[str] = "loadaware"

    weight: float = 1.0
    seed: int = 0

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica:
        """Return the replica with the highest score."""
        mean = sum(replica.requests for replica in replicas) / len(replicas)
        prompt, scale = max(request.prompt_tokens, 1), self.weight / max(1.0, mean)
        costs = [
            scale * (replica.requests - mean) - replica.hit_tokens / prompt
            for replica in replicas
        ]
        return lowest(costs, replicas, self.seed, self.name, request.id)
