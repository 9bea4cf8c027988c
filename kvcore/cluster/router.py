"""The contract of routers, and a replica as its router sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import isnan
from typing import Any, ClassVar

import attrs

from kvcore.cache import KVCache
from kvcore.errors import PolicyError
from kvcore.plugins.base import (
    FAILURES,
    Plugin,
    find_override,
    raise_policy_error,
    wrong_answer,
)
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
        costs = [self.cost(request, each) for each in replicas]
        question = f"cost() of request {request.id!r}"
        try:
            # The sum is NaN if a cost is, and also if infinite costs cancel.
            has_nan = isnan(sum(costs)) and any(map(isnan, costs))
        except TypeError as error:
            hint = "is a `return` missing?" if None in costs else "give numbers"
            raise wrong_answer(self, question, f"{costs}: {hint}") from error
        if has_nan:
            raise wrong_answer(self, question, "nan: give a number")
        return min(
            zip(costs, replicas, strict=True),
            key=lambda pair: (pair[0], pair[1].requests, pair[1].routed, pair[1].number),
        )[1]

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


class PrefixView:
    """A router's view of the caches of replicas; that of this base class is empty.

    Attributes:
        wants_events: whether replicas must report blocks when they store or evict them.
    """

    wants_events: ClassVar[bool] = False

    def connect(self, replica: int, cache: KVCache) -> None:
        """Called when a simulated replica is up, with its cache, which is empty."""

    def find(self, request: Request, now: int) -> Mapping[int, int]:
        """Return the prompt tokens expected to hit, by replica; without any it is left out."""
        del request, now
        return {}

    def sent(self, request: Request, replica: int, now: int) -> None:
        """Called when `request` is sent to a replica."""

    def lost(self, replica: int, now: int) -> None:
        """Called when a replica has lost all of its K/V."""


class Dispatcher:
    """Calls a router, checks its answers, and keeps the counts of replicas.

    The servers may be simulated or real.

    Args:
        router: the router, not in use.
        replicas: all replicas, by number; none is up yet.
        view: the view of their caches.

    Attributes:
        up: the replicas that are up, by number.
    """

    def __init__(self, router: Router, replicas: Sequence[Replica], view: PrefixView) -> None:
        router.bind()
        self.router, self.replicas, self.view = router, replicas, view
        self.up: tuple[Replica, ...] = ()
        self._own = frozenset(replicas)
        self._uses_hits = router.uses_hits
        self._on_routed = find_override(router, "on_routed")
        self._on_first_token = find_override(router, "on_first_token")
        self._on_ended = find_override(router, "on_ended")
        # Prompt tokens that were not expected to hit; negative once the first token has come.
        self._sent: dict[int | str, int] = {}

    def route(self, request: Request, now: int, tried: Collection[int] = ()) -> Replica | None:
        """Return the replica that the router picks, and count the request; None: refused.

        Args:
            request: a request that is not in flight.
            now: the time, ns.
            tried: numbers of replicas to leave out, though they may be up.

        Raises:
            PolicyError: the router failed, or returned anything but one of the replicas.
        """
        router, up = self.router, self.up
        if tried:
            up = tuple(each for each in up if each.number not in tried)
        if not up:
            return None
        if self._uses_hits:
            self._expect_hits(request, up, now)
        try:
            chosen = router.route(request, up, now)
        except FAILURES as error:
            raise_policy_error(router, "route", error)
        if chosen is None:
            return None
        ours = isinstance(chosen, Replica) and chosen in self._own
        if not ours or not chosen.up or chosen.number in tried:
            why = f"{chosen!r:.80}, which is none of the replicas that it was given"
            raise wrong_answer(router, f"route() of request {request.id!r}", why)
        tokens = request.prompt_tokens
        missing = max(tokens - chosen.hit_tokens, 0)
        self._sent[request.id] = missing
        chosen.requests += 1
        chosen.waiting += 1
        chosen.waiting_tokens += missing
        chosen.prompt_tokens += tokens
        chosen.prompt_blocks += -(-tokens // chosen.block_size)
        chosen.routed += 1
        if self._uses_hits:
            self.view.sent(request, chosen.number, now)
        if self._on_routed is not None:
            try:
                self._call("on_routed", self._on_routed, request, chosen, now)
            except PolicyError:
                self._uncount(request, chosen)
                chosen.routed -= 1
                raise
        return chosen

    def first_token(self, request: Request, replica: Replica, now: int) -> None:
        """Count a request whose first token has come; a second call does nothing."""
        missing = self._sent[request.id]
        if missing >= 0:
            self._sent[request.id] = _STARTED
            replica.waiting -= 1
            replica.waiting_tokens -= missing
            if self._on_first_token is not None:
                self._call("on_first_token", self._on_first_token, request, replica, now)

    def ended(self, request: Request, replica: Replica, now: int) -> None:
        """Count a request that has ended: finished, refused, or lost with its replica."""
        self._uncount(request, replica)
        if self._on_ended is not None:
            self._call("on_ended", self._on_ended, request, replica, now)

    def joined(self, replica: Replica, now: int) -> None:
        """Add a replica to those that are up."""
        replica.up = True
        self.up = tuple(each for each in self.replicas if each.up)
        self._call("on_joined", self.router.on_joined, replica, now)

    def left(self, replica: Replica, now: int) -> None:
        """Remove a replica from those that are up: its K/V is lost."""
        replica.up = False
        self.up = tuple(each for each in self.replicas if each.up)
        self.view.lost(replica.number, now)
        self._call("on_left", self.router.on_left, replica, now)

    def _expect_hits(self, request: Request, up: Iterable[Replica], now: int) -> None:
        """Set the hit tokens expected at each replica, from the prefix view."""
        hits = self.view.find(request, now)
        for replica in up:
            replica.hit_tokens = hits.get(replica.number, 0)

    def _uncount(self, request: Request, replica: Replica) -> None:
        missing, tokens = self._sent.pop(request.id), request.prompt_tokens
        if missing >= 0:
            replica.waiting -= 1
            replica.waiting_tokens -= missing
        replica.requests -= 1
        replica.prompt_tokens -= tokens
        replica.prompt_blocks -= -(-tokens // replica.block_size)

    def _call(self, method: str, function: Callable[..., object], *arguments: object) -> None:
        try:
            function(*arguments)
        except FAILURES as error:
            raise_policy_error(self.router, method, error)


_STARTED = -1
"""A mark in place of a number of tokens: the first token of the request has come."""
