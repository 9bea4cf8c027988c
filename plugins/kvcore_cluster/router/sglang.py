"""The cache-aware policy of SGLang's gateway: a prefix, unless the load is uneven."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvcore import Replica, Request, Router
from kvcore_cluster.router.least_requests import by_load


@attrs.define(slots=False, eq=False)
class SGLang(Router):
    """Follow the longest match, but the shortest queue while the load is uneven. O(replicas).

    The load is uneven if a replica has more than `absolute` requests above the fewest *and*
    more than `relative` times as many. Otherwise the replica with the longest match is taken
    if that is more than `threshold` of the prompt, else the one with the fewest requests in
    flight.

    Options:
        threshold: share of the prompt from which on a match is followed.
        absolute, relative: requests in flight from which on the load is uneven.

    Source: sgl-project, sgl-model-gateway/src/policies/cache_aware.rs, with the defaults of
    its command line, 2026.
    """

    name: ClassVar[str] = "sglang"

    threshold: float = 0.3
    absolute: int = 64
    relative: float = 1.5

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica:
        """Return the replica of the longest match, or of the shortest queue."""
        shortest = min(replicas, key=by_load)
        fewest, longest = shortest.requests, max(replica.requests for replica in replicas)
        if longest - fewest > self.absolute and longest > self.relative * fewest:
            return shortest
        best = min(replicas, key=lambda replica: (-replica.hit_tokens, *by_load(replica)))
        return best if best.hit_tokens > self.threshold * request.prompt_tokens else shortest
