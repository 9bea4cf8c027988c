"""The contract of routers, and a replica as its router sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from typing import Any, ClassVar

import attrs

from kvcore.plugins.base import Plugin, wrong_answer
from kvcore.request import Request


@attrs.define(eq=False, slots=True)
class Replica:
    """A replica as its router sees it: its options, requests in flight, and reports.

    A router counts requests and answers that pass through it; only `usage` is reported by the
    server. Routers read these fields, and write only `data`.

    Attributes:
        number: from 0 on; its name in traces.
        blocks, block_size: blocks of its pool, and tokens in a block.
        max_seqs: sequences that it runs at a time.
        up: whether it can be sent requests.
        requests: requests in flight: sent to it, and not ended.
        waiting: requests in flight without a first token.
        waiting_tokens: prompt tokens of the waiting requests that were not expected to hit.
        prompt_tokens: prompt tokens of all requests in flight.
        prompt_blocks: blocks that these prompts fill; shared ones count for each request.
        routed: requests that were ever sent to it.
        data: for the router's own use.
        hit_tokens: tokens of the prompt that is routed now that are expected to hit there.
    """

    number: int
    blocks: int
    block_size: int
    max_seqs: int
    up: bool = False
    requests: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    prompt_tokens: int = 0
    prompt_blocks: int = 0
    routed: int = 0
    data: Any = None
    hit_tokens: int = attrs.field(default=0, init=False, repr=False)
    _usage: Callable[[], float] = attrs.field(default=float, init=False, repr=False)
    _seconds: Callable[[int, int], float] | None = attrs.field(
        default=None, init=False, repr=False
    )

    def connect(
        self,
        usage: Callable[[], float],
        prefill_seconds: Callable[[int, int], float] | None = None,
    ) -> None:
        """Set the sources of `usage` and `prefill_seconds`."""
        self._usage, self._seconds = usage, prefill_seconds

    @property
    def usage(self) -> float:
        """The share of its blocks that running requests hold, as the server reports it."""
        return self._usage()

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """Return the time to prefill `tokens` tokens after `context` others, by themselves.

        For a simulated replica it is that of its latency model; 0 if nothing is known.
        """
        return 0.0 if self._seconds is None else self._seconds(tokens, context)


class Router(Plugin):
    """Decides which replica serves a request.

    The easy tier is one method, `cost`: the replica with the lowest cost gets the request.
    The full tier overrides `route`. A router must not use the future: the length of an output
    (its prediction is allowed), or later requests.

    Attributes:
        uses_hits: whether `hit_tokens` of replicas is read. If not, it is not looked up.
    """

    kind: ClassVar[str] = "router"
    uses_hits: ClassVar[bool] = True

    def cost(self, request: Request, replica: Replica) -> float:
        """Return the cost of sending `request` to `replica`; the lowest cost wins.

        Of equal ones the replica with the fewest requests in flight wins, then the one with
        the fewest ever sent, then the first.
        """
        msg = "neither cost() nor route() is defined: define one"
        raise NotImplementedError(msg)

    def route(self, request: Request, replicas: Sequence[Replica], now: int) -> Replica | None:
        """Return the replica that serves `request`; None refuses the request.

        Args:
            request: the request that has arrived.
            replicas: the replicas to choose from, by number; at least one.
            now: the time, ns.
        """
        del now
        costs = [self.cost(request, replica) for replica in replicas]
        question = f"cost() of request {request.id!r}"
        try:
            # The sum is NaN if a cost is, and also if infinite costs cancel.
            has_nan = isnan(sum(costs)) and any(map(isnan, costs))
        except TypeError as error:
            hint = "is a `return` missing?" if None in costs else "give numbers"
            raise wrong_answer(self, question, f"{costs}: {hint}") from error
        if has_nan:
            raise wrong_answer(self, question, "nan: give a number")
        least = min(costs)
        pairs = zip(costs, replicas, strict=True)
        cheapest = (replica for cost, replica in pairs if cost == least)
        return min(cheapest, key=lambda one: (one.requests, one.routed, one.number))

    def on_routed(self, request: Request, replica: Replica, now: int) -> None:
        """Called when `request` was sent to `replica`, whose counts include it."""

    def on_first_token(self, request: Request, replica: Replica, now: int) -> None:
        """Called when the first token of `request` comes back."""

    def on_ended(self, request: Request, replica: Replica, now: int) -> None:
        """Called when `request` has ended: finished, refused, or lost with its replica."""

    def on_left(self, replica: Replica, now: int) -> None:
        """Called when `replica` is no longer up, and its K/V is lost."""

    def on_joined(self, replica: Replica, now: int) -> None:
        """Called when `replica` is up, at the start and after it has returned."""
