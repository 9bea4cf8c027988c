"""The contract of routers: what a new replica is, and which of equal costs wins."""

import pytest
from helpers.serving import ask

from kvcore import PolicyError
from kvcore.serving.router import Replica, Router

ASKED = ask("a")


def replicas(*counts):
    """Return replicas with these numbers of requests in flight, and of requests ever sent."""
    return [
        Replica(number, 8, 4, 2, requests=requests, routed=routed)
        for number, (requests, routed) in enumerate(counts)
    ]


def router(*costs):
    """Return a router whose costs are these, by number of the replica."""
    return type(
        "Fixed", (Router,), {"name": "fixed", "cost": lambda _, __, to: costs[to.number]}
    )()


def test_a_new_replica_is_down_and_idle():
    """A replica that was sent nothing has counts of 0, no usage and no known times."""
    new = Replica(3, blocks=8, block_size=4, max_seqs=2)
    assert (new.up, new.data, new.usage, new.prefill_seconds(5, 9)) == (False, None, 0.0, 0.0)
    assert (new.requests, new.waiting, new.waiting_tokens) == (0, 0, 0)
    assert (new.prompt_tokens, new.prompt_blocks, new.routed, new.hit_tokens) == (0, 0, 0, 0)
    new.connect(lambda: 0.5, lambda tokens, context: tokens + context)
    assert (new.usage, new.prefill_seconds(5, 9)) == (0.5, 14)
    assert repr(new).endswith("routed=0, data=None)")


@pytest.mark.parametrize(
    ("costs", "counts", "number"),
    [
        ((2, 1, 3), [(0, 0)] * 3, 1),
        ((1, 1, 2), [(4, 0), (3, 9), (0, 0)], 1),
        ((1, 1, 1), [(3, 9), (3, 8), (3, 8)], 1),
        ((float("inf"), float("-inf"), 0), [(0, 0)] * 3, 1),
    ],
)
def test_the_lowest_cost_wins_then_the_replica_that_has_had_least(costs, counts, number):
    """Of equal costs the fewest requests in flight win, then fewest ever, then the first."""
    assert router(*costs).route(ASKED, replicas(*counts), 0).number == number


@pytest.mark.parametrize(
    ("cost", "why"),
    [
        (float("nan"), "nan: give a number"),
        (None, "is a `return` missing"),
        ("a", "give numbers"),
    ],
)
def test_a_cost_that_is_no_number_is_refused(cost, why):
    """A cost that cannot be compared with others is an error that names the router."""
    with pytest.raises(PolicyError, match=rf"'fixed'.*{why}"):
        router(1.0, cost).route(ASKED, replicas((0, 0), (0, 0)), 0)
