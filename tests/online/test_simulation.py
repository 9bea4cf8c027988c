"""`route` and `serve` under drawn clients, servers, disks and signals, by a simulated clock.

`tox -e simulation` runs 20,000 seeds, the other runs few: `KVCORE_SIMULATION` is their number.
A seed that fails prints the shortest list of events that still fails.
"""

# ruff: noqa: T201 - the counts are printed

import os
from collections import Counter

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'kvcore[serve]'")
pytest.importorskip("zmq", reason="needs pyzmq: pip install 'kvcore[serve]'")

from helpers.simulated_route import RouteSimulation, RouteWorld, Script, draw_route
from helpers.simulated_serve import ServeSimulation, draw_serve
from helpers.simulation import Ask, Disk, Signal, check, failure, shortest

SEEDS = int(os.environ.get("KVCORE_SIMULATION", "200"))
PARTS = range(4)
"""Parts into which the seeds are divided, to run side by side."""


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("simulation", "draw", "counted"),
    [(RouteSimulation, draw_route, "logged"), (ServeSimulation, draw_serve, "traced")],
    ids=["route", "serve"],
)
def test_promises_are_held_whatever_happens(simulation, draw, counted, part, tmp_path):
    """Each request has one right answer or error, and nothing is lost or left behind."""
    counts = Counter()
    for seed in range(part, SEEDS // 2, len(PARTS)):
        counts += check(simulation, draw, seed, tmp_path)
    print(f"\n{SEEDS // 2} seeds, part {part}:", dict(sorted(counts.items(), key=str)))
    assert counts[200]
    assert counts[counted]


def routed(*events, servers=1, traced=False):
    """Return a world of the proxy with these events."""
    return RouteWorld(
        seed=1,
        servers=servers,
        router="round-robin",
        traced=traced,
        follows=False,
        options={"retries": 0, "failures": 100, "concurrency": 1_000},
        events=events,
    )


def test_a_second_answer_of_a_server_goes_to_nobody(tmp_path):
    """A server that answers a request twice does not shift the answers of all later ones."""
    asks = [Ask(time) for time in (1.0, 3.0, 5.0, 7.0)]
    made = RouteSimulation(routed(Script(0.0, 0, "twice"), *asks), tmp_path).run()
    assert made.counts == {200: 4}


def test_a_seed_has_one_outcome(tmp_path):
    """The same seed gives the same steps, the same answers and the same times."""
    for simulation, draw in ((RouteSimulation, draw_route), (ServeSimulation, draw_serve)):
        outcomes = []
        for _ in range(2):
            for path in tmp_path.glob("day.jsonl*"):
                path.unlink()
            made = simulation(draw(3), tmp_path).run()
            outcomes.append(
                (made.loop.steps, made.counts, [client.closed for client in made.clients])
            )
        assert outcomes[0] == outcomes[1]


def test_the_shortest_form_of_a_failure_has_no_event_too_many(tmp_path):
    """Events that a failure does not need are left out of what is printed."""

    class Failing(RouteSimulation):
        def check_end(self):
            super().check_end()
            assert not self.full, "full"

    def fails(world):
        return str(failure(Failing, world, tmp_path)).startswith("full")

    asks = [Ask(index / 10) for index in range(5)]
    world = routed(*asks, Disk(0.6, 0), Ask(0.7), Signal(2.0), traced=True)
    assert fails(world)
    assert [type(event) for event in shortest(world, fails).events] == [Disk]
