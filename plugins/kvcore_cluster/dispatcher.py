"""The dispatcher of requests: calls a router and its view of the caches of replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import signature
from typing import ClassVar

from kvcore.cache import ServedCache
from kvcore.errors import PolicyError
from kvcore.plugins.base import (
    FAILURES,
    find_override,
    qualified,
    raise_policy_error,
    wrong_answer,
)
from kvcore.request import Request
from kvcore.serving.router import Replica, Router

__all__ = ["Dispatcher", "PrefixView"]

CROWDED = 10
"""Requests of a replica, as a multiple of the mean of the others, that few loads call for."""


def is_crowded(most: float | None, replicas: int) -> bool:
    """Return True if a replica gets ten times the mean of the others: a router follows it.

    Args:
        most: its requests, divided by the mean of all; None: there are none.
        replicas: number of replicas.
    """
    return (
        most is not None
        and replicas > 1
        and most * (replicas - 1) >= CROWDED * (replicas - most)
    )


class PrefixView:
    """A router's view of the caches of replicas; that of this base class is empty.

    Attributes:
        wants_events: whether replicas must report blocks when they store or evict them.
    """

    wants_events: ClassVar[bool] = False

    def connect(self, replica: int, cache: ServedCache) -> None:
        """Called when a simulated replica is up, with its cache, which is empty."""

    def find(self, request: Request, now: int) -> Mapping[int, int]:
        """Return the prompt tokens expected to hit, by replica; without any it is left out."""
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
        _check_signature(router)
        self.router, self.replicas, self.view = router, replicas, view
        self.up: tuple[Replica, ...] = ()
        self._by_number = {replica.number: replica for replica in replicas}
        self._uses_hits = router.uses_hits
        self._on_routed = find_override(router, "on_routed")
        self._on_first_token = find_override(router, "on_first_token")
        self._on_ended = find_override(router, "on_ended")
        # The replicas of which hits are expected for the request that was routed last.
        self._expected: list[Replica] = []
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
            up = tuple(replica for replica in up if replica.number not in tried)
        if not up:
            return None
        if self._uses_hits:
            self._expect_hits(request, now)
        try:
            chosen = router.route(request, up, now)
        except FAILURES as error:
            raise_policy_error(router, "route", error)
        if chosen is None:
            return None
        if not (isinstance(chosen, Replica) and chosen in up):
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
        if self._on_routed is not None:
            try:
                self._call("on_routed", self._on_routed, request, chosen, now)
            except PolicyError:
                self._uncount(request, chosen)
                chosen.routed -= 1
                raise
        if self._uses_hits:
            self.view.sent(request, chosen.number, now)
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
        self.up = tuple(replica for replica in self.replicas if replica.up)
        self._call("on_joined", self.router.on_joined, replica, now)

    def left(self, replica: Replica, now: int) -> None:
        """Remove a replica from those that are up: its K/V is lost."""
        replica.up = False
        self.up = tuple(replica for replica in self.replicas if replica.up)
        self.view.lost(replica.number, now)
        self._call("on_left", self.router.on_left, replica, now)

    def _expect_hits(self, request: Request, now: int) -> None:
        """Set the hit tokens expected at each replica, from the prefix view. O(holders)."""
        for replica in self._expected:
            replica.hit_tokens = 0
        hits, own = self.view.find(request, now), self._by_number
        # A view may know replicas of other pools, too.
        self._expected = [own[number] for number in hits if number in own]
        for replica in self._expected:
            replica.hit_tokens = hits[replica.number]

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


def _check_signature(router: Router) -> None:
    """Check that `route` and `cost` take what they are called with.

    Raises:
        PolicyError: one of them has other parameters.
    """
    for method, parameters in (
        ("route", ("request", "replicas", "now")),
        ("cost", ("request", "replica")),
    ):
        found = signature(getattr(router, method))
        try:
            found.bind(*parameters)
        except TypeError:
            msg = (
                f"router plugin {router.name!r} ({qualified(type(router))}) has the method "
                f"{method}{found}; it is called as {method}({', '.join(parameters)})"
            )
            raise PolicyError(msg) from None


_STARTED = -1
"""A mark in place of a number of tokens: the first token of the request has come."""
