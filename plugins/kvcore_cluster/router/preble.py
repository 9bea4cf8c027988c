"""Preble: exploit a long prefix, otherwise explore by load."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import ClassVar

import attrs

from kvcore import InputError, Replica, Request, Router
from kvcore.units import NS_PER_S


@attrs.define(slots=False, eq=False)
class Preble(Router):
    """Follow the prefix of a prompt that mostly hits; else spread the work. O(replicas).

    If at least half of a prompt hits, the request goes to the replica with the longest match,
    of equal ones to that with the least work. Once `warm` requests for each replica were
    routed, that replica must not have more than `imbalance` times the work of another. Every
    other request goes to the replica with the least work: the seconds of prefill that were
    sent there within the window, and its requests in flight times the output of a request and
    the time of a token.

    Options:
        window: seconds for which prefill counts as work.
        imbalance: largest ratio between the work of two replicas.
        warm: requests for each replica before the imbalance is checked.
        output_tokens, token_seconds: assumed output of a request in flight, and seconds of a
            token.

    Source: Srivatsa et al., Preble: Efficient Distributed Prompt Scheduling for LLM Serving,
    2024 (E2), and WukLab/preble, global_scheduler_with_time.py, May 2024. That moves prefixes
    from a loaded GPU to an idle one, and copies one whose TTFT has doubled; here the requests
    of a loaded replica go where the least work is, and leave a copy of the prefix there.
    """

    name: ClassVar[str] = "preble"

    window: float = 180.0
    imbalance: float = 1.5
    warm: int = 50
    output_tokens: float = 45.0
    token_seconds: float = 0.15

    _work: dict[int, deque[tuple[int, float]]] = attrs.field(factory=dict, init=False)
    _sum: dict[int, float] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        """Check the options.

        Raises:
            InputError: no window, or an imbalance below 1.
        """
        if not 0 < self.window < inf or self.imbalance < 1:
            msg = "router 'preble': give a window above 0 s, and an imbalance of 1 or more"
            raise InputError(msg)

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica:
        """Return the replica with the prefix, or with the least work."""
        work = {replica.number: self._load(replica, now) for replica in replicas}
        idlest = min(replicas, key=lambda replica: (work[replica.number], replica.number))
        best = min(
            replicas,
            key=lambda replica: (-replica.hit_tokens, work[replica.number], replica.number),
        )
        hit, least = best.hit_tokens, work[idlest.number]
        overloaded = work[best.number] > self.imbalance * least and sum(
            replica.routed for replica in replicas
        ) >= self.warm * len(replicas)
        exploits = hit > 0 and request.prompt_tokens - hit <= hit and not overloaded
        return best if exploits else idlest

    def on_routed(self, request: Request, replica: Replica, now: int) -> None:
        """Add the seconds of the request's prefill to the work of the replica."""
        hit = min(replica.hit_tokens, max(request.prompt_tokens - 1, 0))
        seconds = replica.prefill_seconds(request.prompt_tokens - hit, hit)
        self._work.setdefault(replica.number, deque()).append((now, seconds))
        self._sum[replica.number] = self._sum.get(replica.number, 0.0) + seconds

    def on_left(self, replica: Replica, now: int) -> None:
        """Drop the work of the replica."""
        self._work.pop(replica.number, None)
        self._sum.pop(replica.number, None)

    def _load(self, replica: Replica, now: int) -> float:
        """Return the seconds of work of the window."""
        sent = self._work.get(replica.number)
        if sent:
            oldest = now - round(self.window * NS_PER_S)
            while sent and sent[0][0] < oldest:
                self._sum[replica.number] -= sent.popleft()[1]
            if not sent:
                self._sum[replica.number] = 0.0
        prefill = self._sum.get(replica.number, 0.0)
        return prefill + replica.requests * self.output_tokens * self.token_seconds
