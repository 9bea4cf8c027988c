"""Prefix affinity: the least loaded of the replicas with the longest prefix."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from typing import ClassVar

import attrs

from kvcore import InputError, Replica, Request, Router
from kvcore_cluster.router._draw import lowest


@attrs.define(slots=False, eq=False)
class PrefixAffinity(Router):
    """Send a request to the least loaded replica with about the longest match. O(replicas).

    A match is about the longest if it is at most `tolerance` of the prompt shorter than the
    longest. A replica with `bound` times the mean number of requests in flight is left out:
    without a bound a prefix that many requests share, such as a system prompt, stays on one
    replica, however loaded that is; with it the prefix spreads to as many as the load needs.

    Options:
        tolerance: share of the prompt, from 0 to 1.
        bound: most requests in flight as a multiple of the mean, 1 or more; 0: no bound.
        seed: number from which draws among equals are derived.

    Source: ELDR, with a tolerance of 0.1 as surveys report it; the bound is that of Mirrokni,
    Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads, 2018.
    """

    name: ClassVar[str] = "prefix-affinity"

    tolerance: float = 0.1
    bound: float = 1.5
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        """Check the options.

        Raises:
            InputError: a tolerance that is no share, or a bound below the mean.
        """
        if not 0 <= self.tolerance <= 1:
            msg = f"router 'prefix-affinity': tolerance={self.tolerance}: give 0 to 1"
            raise InputError(msg)
        if self.bound and not 1 <= self.bound < inf:
            msg = f"router 'prefix-affinity': bound={self.bound}: give 0, or 1 or more"
            raise InputError(msg)

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica:
        """Return the replica with the fewest requests of those with about the longest match."""
        if self.bound:
            flying = sum(replica.requests for replica in replicas)
            limit = ceil(self.bound * (flying + 1) / len(replicas))
            replicas = [replica for replica in replicas if replica.requests < limit]
        best = max(replica.hit_tokens for replica in replicas)
        enough = best - self.tolerance * request.prompt_tokens
        near = [replica for replica in replicas if replica.hit_tokens >= enough]
        loads = [replica.requests for replica in near]
        return lowest(loads, near, self.seed, self.name, request.id)
