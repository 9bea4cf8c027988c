"""Autoscaling: replicas start and stop, lose their caches, and are paid for while they run."""

import attrs
import pytest
from helpers.clusters import serve_cluster
from helpers.serving import ask

import kvcore
from kvcore import InputError, Request
from kvcore.cluster import simulate_cluster
from kvcore.cluster.planner import Planner
from kvcore.config import RunConfig
from kvcore.config.cluster import ClusterParts
from kvcore.trace import Trace, read_events, replay
from kvcore_plugins.latency import TokenRate

SECOND = 10**9
BUSY = 160
"""Requests in the second minute; in each of the others there are two."""


class Wave(kvcore.Workload):
    """A workload of five minutes, the second of them busy; all prompts share 512 tokens."""

    name = "wave"
    digest = "wave"
    key_tokens = 16

    def __iter__(self):
        """Yield the requests."""
        number = 0
        for minute, count in enumerate((2, BUSY, 2, 2, 2)):
            for each in range(count):
                at = minute * 60 * SECOND + each * 60 * SECOND // count
                keys = [*range(32), *(1000 * (number + 1) + place for place in range(32))]
                yield Request(
                    id=number,
                    arrival=at,
                    prompt_tokens=1024,
                    output_tokens=20,
                    key_tokens=16,
                    keys=keys,
                )
                number += 1

    def options(self):
        """Return no options."""
        return {}


def serve(trace=None, autoscale="throughput:interval=20,start_up=10,cool_down=0", **options):
    """Serve the wave with at most four replicas that prefill 1,000 tokens a second."""
    config = RunConfig.of(
        "simulate",
        workload=Wave(),
        router="least-requests",
        latency="token-rate:prefill=1,decode=0.1",
        blocks=512,
        slo="ttft=3",
        autoscale=autoscale,
        **{"replicas": 4, **options},
    )
    parts = ClusterParts(config)
    if trace is None:
        return simulate_cluster(parts.workload, **parts.cluster())
    with Trace(trace, workload=parts.workload, seed=0) as written:
        return simulate_cluster(parts.workload, **parts.cluster(written))


def test_replicas_come_and_go_with_the_requests():
    """Replicas are started and stopped during the run, and all requests are served."""
    result = serve()
    assert result.summary()["completed"] == len(list(Wave()))
    assert any(change.up for change in result.changes)
    assert any(not change.up for change in result.changes)


def test_only_replicas_that_are_up_are_paid_for():
    """The paid replica seconds exceed those of one replica and are fewer than those of four."""
    result = serve()
    assert result.simulated_s < result.replica_s < 4 * result.simulated_s


def test_a_replica_that_starts_again_has_an_empty_cache():
    """Each stop ends a life of the replica, and the next life begins with a new cache."""
    result = serve()
    stops = [change.replica for change in result.changes if not change.up]
    assert stops
    for replica in set(stops):
        assert len(result.lives[replica]) == 1 + stops.count(replica)
    for lives in result.lives:
        for life in lives:
            life.cache.check_integrity()


def test_a_replica_that_starts_up_gets_no_request_before(tmp_path):
    """No request is routed to a replica before its RETURN event or after its LEAVE event."""
    serve(tmp_path / "trace.jsonl")
    up = {0}
    seen = set()
    for event in read_events(tmp_path / "trace.jsonl"):
        if event.event == "RETURN":
            up.add(event.replica)
        elif event.event == "LEAVE":
            up.discard(event.replica)
        elif event.event == "ROUTE":
            assert event.replica in up
            seen.add(event.replica)
    assert len(seen) > 1


def test_no_replica_leaves_while_it_is_calm():
    """With a cool-down that is longer than the run, replicas are started but not stopped."""
    result = serve(autoscale="throughput:interval=20,start_up=10,cool_down=1000")
    assert result.changes
    assert all(change.up for change in result.changes)


@attrs.define(eq=False, kw_only=True)
class Script(Planner):
    """A planner that wants the listed numbers of replicas in turn, then the last one again."""

    name = "script"
    plans: list[int] = attrs.field(factory=list)
    _calls: int = attrs.field(default=0, init=False)

    def wanted(self, demand, replicas, profile, slo, phase):
        """Return the next number of replicas."""
        del demand, replicas, profile, slo, phase
        self._calls += 1
        return self.plans[min(self._calls, len(self.plans)) - 1]


def test_planning_goes_on_while_requests_wait_for_a_replica():
    """The planner is still called while a request waits for a replica that is starting up.

    The only other replica has left; the request is routed and decodes when the start-up is
    over.
    """
    planner = Script(plans=[2, 1], interval=1, start_up=10, cool_down=0)
    requests = [ask(0), ask(1, round(2.5 * SECOND), output=3)]
    run = serve_cluster(requests, planner=planner, latency=lambda: TokenRate(decode=0.0005))
    assert [line["t"] for line in run.of("ROUTE")] == [0, 11 * SECOND]
    assert planner._calls > 11


@pytest.mark.parametrize("planner", ["throughput:interval=20", "load:interval=20,start=2"])
def test_equal_commands_equal_bytes(tmp_path, planner):
    """Two runs with equal options write the same trace."""
    serve(tmp_path / "a.jsonl", planner)
    serve(tmp_path / "b.jsonl", planner)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_pools_of_split_phases_have_planners_of_their_own(tmp_path):
    """With split phases, the prefill pool and the decode pool are scaled independently."""
    result = serve(
        tmp_path / "trace.jsonl",
        "throughput:interval=20,start_up=10,cool_down=0",
        replicas=5,
        disaggregate="prefill=3,decode=2",
    )
    assert result.summary()["completed"] == len(list(Wave()))
    starts = {change.replica for change in result.changes if change.up}
    assert starts & {1, 2}
    assert not starts & {0, 3}  # one of each pool is always up
    assert result.replica_s < 5 * result.simulated_s
    report = replay(tmp_path / "trace.jsonl")
    assert report.complete
    assert report.finished == len(list(Wave()))


def test_failures_and_a_planner_are_too_much():
    """A run with both failures and autoscaling is refused: both start and stop replicas."""
    with pytest.raises(InputError, match="give one of them"):
        serve(fail=["replica=0,at=1,for=2"])
