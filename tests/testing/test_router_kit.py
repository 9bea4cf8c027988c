"""The conformance tests of routers fail each wrong router in the test about its fault."""

from itertools import count
from typing import ClassVar

import pytest
from helpers.faults import faulty, run_test

from kvcore import Router
from kvcore.testing import RouterTests


class Fewest(Router):
    """A router that picks the replica with the fewest requests in flight."""

    name = "fewest"

    def cost(self, _request, replica):
        """Return the number of requests in flight."""
        return replica.requests

    def on_routed(self, request, replica, _now):
        """Count the tokens that the request will generate."""
        replica.data = (replica.data or 0) + request.output_tokens


def _counting(_self, request, replica):
    replica.waiting += request.arrival > 0
    return replica.requests


Foreseeing = faulty(
    "A router that balances the lengths of outputs.",
    Fewest,
    cost=lambda _, __, replica: replica.data or 0,
)
Counting = faulty("A router that counts later requests itself.", Fewest, cost=_counting)
Refusing = faulty("A router that refuses all.", Fewest, route=lambda *_: None)
Named = faulty(
    "A router that goes by the id of a request.",
    Fewest,
    route=lambda _, request, up, __: up[len(str(request.id)) % len(up)],
)

Hashed = faulty(
    "A router that goes by the hash of a text.",
    Fewest,
    route=lambda _, request, up, __: up[hash(f"{request.arrival}") % len(up)],
)


class Common(Fewest):
    """A router whose class counts the requests."""

    counts: ClassVar[list[int]] = [0]

    def route(self, _request, replicas, _now):
        """Return the next replica."""
        self.counts[0] += 1
        return replicas[self.counts[0] % len(replicas)]


TURNS = count()

InTurns = faulty(
    "A router that goes by a counter of its module.",
    Fewest,
    route=lambda _, __, up, ___: up[next(TURNS) % len(up)],
)


@pytest.mark.parametrize(
    ("wrong", "test", "message"),
    [
        (Foreseeing, "the_future_is_not_known", "for requests with other outputs"),
        (Counting, "replicas_are_left_as_they_are", "changed a replica"),
        (Refusing, "an_idle_cluster_refuses_nothing", "of an idle cluster"),
        (Hashed, "equal_streams_are_routed_equally", "it decided otherwise"),
        (Common, "equal_streams_are_routed_equally", "changed counts of its class, which all"),
        (InTurns, "equal_streams_are_routed_equally", "after another router"),
        (Named, "routes_do_not_depend_on_request_ids", "with other ids"),
    ],
)
def test_each_wrong_router_fails_the_test_of_its_fault(wrong, test, message):
    """Each wrong router fails the conformance test about its fault; the right one passes it."""
    run_test(RouterTests, Fewest, test, seed=0)
    with pytest.raises(AssertionError, match=message):
        run_test(RouterTests, wrong, test, seed=0)
