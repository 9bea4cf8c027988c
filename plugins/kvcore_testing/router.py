"""The conformance tests of routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import ceil
from random import Random
from typing import ClassVar

import attrs

from kvcore.plugins.base import qualified
from kvcore.request import Request
from kvcore.serving.router import Replica, Router
from kvcore_cluster.dispatcher import Dispatcher
from kvcore_cluster.views import parse_view
from kvcore_testing.plugin import PluginTests, other_hashes, seeds, unshared

_REPLICAS, _REQUESTS, _OTHERS, _KEY_TOKENS, _LONGEST = 6, 120, 7, 16, 200


@attrs.frozen
class Routing:
    """A routing decision.

    Attributes:
        request: position of the request in its stream, from 0.
        replica: number of the replica that got it; None: it was refused.
        up: numbers of the replicas that were up.
        loads: number of requests in flight at each of them, this one included.
    """

    request: int
    replica: int | None
    up: tuple[int, ...]
    loads: tuple[int, ...]


class RouterTests(PluginTests[Router]):
    """Conformance tests of a router; a derived `Test...` class makes the router.

    The attribute `router` is what `make` calls:

        class TestMine(RouterTests):
            router = Mine

    The tests route random requests, with shared prefixes and sessions, to six replicas that
    fail and return. The router sees the prefix index that the dispatcher keeps of its routes.

    Attributes:
        draws: whether decisions depend on the ids of requests, as seeds of random draws.
        bound: largest number of requests in flight at a replica that gets one, as a multiple
            of the mean over the replicas that are up; None: no bound.
    """

    base = Router
    router: ClassVar[Callable[[], Router]]
    draws: bool = False
    bound: float | None = None

    seed = seeds(4)

    def test_has_a_cost_or_a_route(self) -> None:
        """Its class, or one that it derives from, defines `cost` or `route`."""
        cls = type(self.make())
        own = {name for base in cls.__mro__ if base is not Router for name in vars(base)}
        assert own & {"cost", "route"}, f"{qualified(cls)} has no cost() and no route()"

    def test_requests_go_to_replicas_that_are_up(self, seed: int) -> None:
        """While replicas fail and return, a request goes to one that is up, or is refused."""
        for routed in drive(self.make(), _stream(seed), faults=seed):
            assert routed.replica is None or routed.replica in routed.up, (
                f"{routed}: it is down"
            )

    def test_equal_streams_are_routed_equally(self, seed: int) -> None:
        """Two routers with equal options make the same decisions, whatever others have routed.

        A number of requests that is a multiple of no number of replicas comes in between, so
        that turns which all routers of a class share are told.
        """
        router = self.make()
        with unshared(router):
            first = list(drive(router, _stream(seed), faults=seed))
        other = list(drive(self.make(), _stream(seed + 1000)[:_OTHERS]))
        assert len(other) == _OTHERS
        with other_hashes():
            second = list(drive(self.make(), _stream(seed), faults=seed))
        assert first == second, "run again, after another router, it decided otherwise"

    def test_the_future_is_not_known(self, seed: int) -> None:
        """Decisions do not depend on output lengths, nor on requests that arrive later."""
        requests = _stream(seed)
        others = [
            attrs.evolve(request, output_tokens=_LONGEST + 1 - request.output_tokens)
            for request in requests
        ]
        first, second = (list(drive(self.make(), stream)) for stream in (requests, others))
        assert first == second, "it decided otherwise for requests with other outputs"
        half = list(drive(self.make(), requests[: _REQUESTS // 2]))
        assert first[: len(half)] == half, "it decided otherwise without the later requests"

    def test_routes_do_not_depend_on_request_ids(self, seed: int) -> None:
        """Decisions do not depend on the ids of requests, unless `draws` is True."""
        requests = _stream(seed)
        renamed = [attrs.evolve(request, id=f"request {request.id}") for request in requests]
        first, second = (list(drive(self.make(), stream)) for stream in (requests, renamed))
        assert self.draws or first == second, "it decided otherwise for requests with other ids"

    def test_loads_stay_within_the_bound(self, seed: int) -> None:
        """A replica that gets a request has at most `bound` times the mean load, rounded up."""
        if self.bound is None:
            return
        for routed in drive(self.make(), _stream(seed), faults=seed):
            if routed.replica is not None:
                limit = ceil(self.bound * sum(routed.loads) / len(routed.up))
                assert routed.loads[routed.up.index(routed.replica)] <= limit, (
                    f"{routed}: above {limit}"
                )

    def test_one_replica_gets_all(self, seed: int) -> None:
        """With a single replica, every request goes there or is refused."""
        for routed in drive(self.make(), _stream(seed), replicas=1):
            assert routed.replica in (0, None)

    def test_an_idle_cluster_refuses_nothing(self, seed: int) -> None:
        """A request without an SLO is not refused when no other is in flight."""
        apart = [
            attrs.evolve(request, arrival=index * 10**12)
            for index, request in enumerate(_stream(seed)[:20])
        ]
        refused = [
            routed.request for routed in drive(self.make(), apart) if routed.replica is None
        ]
        assert not refused, f"it refused requests {refused} of an idle cluster"

    def test_replicas_are_left_as_they_are(self) -> None:
        """`route` changes none of the counts of replicas: a router writes to `data` alone."""
        router, seen = self.make(), _replicas(3)
        dispatcher = Dispatcher(router, seen, parse_view("index"))
        for replica in seen:
            dispatcher.joined(replica, 0)
        before = [_counts(replica) for replica in seen]
        for request in _stream(0):
            router.route(request, dispatcher.up, request.arrival)
        assert [_counts(replica) for replica in seen] == before, "route() changed a replica"


def drive(
    router: Router,
    requests: list[Request],
    *,
    replicas: int = _REPLICAS,
    faults: int | None = None,
) -> Iterator[Routing]:
    """Route `requests`, and yield each decision.

    The times from arrival to first token and to the end depend on the position of the request
    alone. With `faults`, a seed, replicas fail and return; the requests of a failed replica
    are not routed again.
    """
    seen = _replicas(replicas)
    dispatcher = Dispatcher(router, seen, parse_view("index"))
    for replica in seen:
        dispatcher.joined(replica, 0)
    # Time, whether the request ends or has its first token, serial, request, its replica.
    events: list[tuple[int, int, int, Request, Replica]] = []
    flying: dict[int | str, Replica] = {}
    dice = Random(faults)  # noqa: S311
    for serial, request in enumerate(requests):
        now = request.arrival
        while events and events[0][0] <= now:
            moment, ends, _, other, replica = heappop(events)
            if flying.get(other.id) is not replica:
                continue
            if ends:
                del flying[other.id]
                dispatcher.ended(other, replica, moment)
            else:
                dispatcher.first_token(other, replica, moment)
        if faults is not None:
            _break(dispatcher, dice, flying, requests, now)
        up = tuple(replica.number for replica in dispatcher.up)
        chosen = dispatcher.route(request, now)
        assert min(min(_counts(replica)) for replica in seen) >= 0
        loads = tuple(replica.requests for replica in dispatcher.up)
        yield Routing(serial, None if chosen is None else chosen.number, up, loads)
        if chosen is not None:
            flying[request.id] = chosen
            lasts = Random(serial).randint(10**6, 10**10)  # noqa: S311
            heappush(events, (now + lasts // 9, 0, 2 * serial, request, chosen))
            heappush(events, (now + lasts, 1, 2 * serial + 1, request, chosen))


def _break(
    dispatcher: Dispatcher,
    dice: Random,
    flying: dict[int | str, Replica],
    requests: list[Request],
    now: int,
) -> None:
    """Fail a replica now and then, or bring one back."""
    what = dice.random()
    up = dispatcher.up
    if what < 1 / 15 and len(up) > 1:
        gone = dice.choice(up)
        dispatcher.left(gone, now)
        by_id = {request.id: request for request in requests}
        for name in [name for name, replica in flying.items() if replica is gone]:
            del flying[name]
            dispatcher.ended(by_id[name], gone, now)
    elif what > 9 / 10:
        down = [replica for replica in dispatcher.replicas if not replica.up]
        if down:
            dispatcher.joined(dice.choice(down), now)


def _counts(replica: Replica) -> tuple[int, ...]:
    """Return the counts of a replica."""
    return (
        replica.requests,
        replica.waiting,
        replica.waiting_tokens,
        replica.prompt_tokens,
        replica.prompt_blocks,
        replica.routed,
    )


def _replicas(count: int) -> list[Replica]:
    """Return replicas that prefill 10,000 tokens a second, and use no blocks."""
    replicas = [Replica(index, 1000, _KEY_TOKENS, 32) for index in range(count)]
    for replica in replicas:
        replica.connect(float, lambda tokens, context: (tokens + context / 100) / 10_000)
    return replicas


def _stream(seed: int) -> list[Request]:
    """Return random requests: shared prefixes, sessions, tenants, bursts."""
    dice = Random(seed)  # noqa: S311
    now, requests = 0, []
    for index in range(_REQUESTS):
        now += dice.choice([0, 0, 10**6, 10**8, 3 * 10**9])
        prefix = dice.randrange(6)
        shared = [prefix * 1000 + key for key in range(dice.randrange(20))]
        own = [10**6 + index * 1000 + key for key in range(dice.randrange(1, 20))]
        keys = [*shared, *own]
        requests.append(
            Request(
                id=index,
                arrival=now,
                prompt_tokens=len(keys) * _KEY_TOKENS,
                output_tokens=dice.randint(1, _LONGEST),
                key_tokens=_KEY_TOKENS,
                keys=keys,
                session=dice.choice([None, "a", "b", "c"]),
                tenant=dice.choice([None, "x", "y"]),
            )
        )
    return requests
