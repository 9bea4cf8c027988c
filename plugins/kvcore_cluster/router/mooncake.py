"""The conductor of Mooncake: the shortest time to first token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvcore import Replica, Request, Router
from kvcore.units import NS_PER_S


@attrs.define(slots=False, eq=False)
class Mooncake(Router):
    """Send a request where its first token is expected first. O(replicas).

    The time is that of the prompts that are queued there, and of its own prompt after the
    tokens that hit, each by itself, as fitted offline. With `reject` a request is refused if
    no replica can keep its TTFT.

    The other branch of the algorithm, in which a replica fetches a prefix from another one,
    is left out: replicas here do not share K/V.

    Options:
        reject: whether requests may be refused.

    Source: Qin et al., Mooncake, arXiv 2407.00079, algorithm 1.
    """

    name: ClassVar[str] = "mooncake"

    reject: bool = False

    _queued: dict[int, float] = attrs.field(factory=dict, init=False)
    _own: dict[int | str, float] = attrs.field(factory=dict, init=False)

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica | None:
        """Return the replica with the shortest time; None if that is too long."""
        best = super().route(request, replicas, now)
        slo = request.slo
        if self.reject and best is not None and slo is not None and slo.ttft_ns is not None:
            return best if self.cost(request, best) * NS_PER_S <= slo.ttft_ns else None
        return best

    def cost(self, request: Request, replica: Replica) -> float:
        """Return the seconds until the first token."""
        return self._queued.get(replica.number, 0.0) + _prefill(request, replica)

    def on_routed(self, request: Request, replica: Replica, now: int) -> None:
        """Queue its prefill."""
        self._own[request.id] = seconds = _prefill(request, replica)
        self._queued[replica.number] = self._queued.get(replica.number, 0.0) + seconds

    def on_first_token(self, request: Request, replica: Replica, now: int) -> None:
        """Subtract the prefill of `request` from the queue of its replica."""
        seconds = self._own.pop(request.id, 0.0)
        # A queue without a request has no time: sums of floats leave some.
        self._queued[replica.number] -= seconds
        if not replica.waiting:
            self._queued[replica.number] = 0.0

    def on_ended(self, request: Request, replica: Replica, now: int) -> None:
        """Subtract the prefill of `request` from the queue, if it ends without a token."""
        if request.id in self._own:
            self.on_first_token(request, replica, now)


def _prefill(request: Request, replica: Replica) -> float:
    hit = min(replica.hit_tokens, max(request.prompt_tokens - 1, 0))
    return replica.prefill_seconds(request.prompt_tokens - hit, hit)
