"""The scorers of llm-d: queue, K/V in use, and prefix, weighted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvcore import Replica, Request, Router
from kvcore_cluster.router._draw import lowest


@attrs.define(slots=False, eq=False)
class LLMD(Router):
    """Send a request to the replica with the highest weighted score. O(replicas).

        queue * (most waiting - waiting) / (most - fewest waiting)     1 if all are equal
        + kv * (1 - share of the blocks in use)
        + prefix * blocks that hit / blocks of the prompt

    Of equal ones a random one is taken.

    Options:
        queue, kv, prefix: the weights.
        seed: number from which draws are derived.

    Source: llm-d-inference-scheduler, pkg/epp/config/loader/defaults.go, 2026.
    """

    name: ClassVar[str] = "llm-d"

    queue: float = 2.0
    kv: float = 2.0
    prefix: float = 3.0
    seed: int = 0

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica:
        """Return the replica with the highest score."""
        waiting = [replica.waiting for replica in replicas]
        longest, fewest = max(waiting), min(waiting)
        costs = []
        for replica, queued in zip(replicas, waiting, strict=True):
            idle = (longest - queued) / (longest - fewest) if longest > fewest else 1.0
            blocks = -(-request.prompt_tokens // replica.block_size) or 1
            hit = replica.hit_tokens // replica.block_size / blocks
            score = self.queue * idle + self.kv * (1 - replica.usage) + self.prefix * hit
            costs.append(-score)
        return lowest(costs, replicas, self.seed, self.name, request.id)
