"""Autoscaling: replicas start and stop, lose their caches, and are paid for while they run."""

from io import BytesIO

import attrs
import orjson
import pytest
from helpers.clusters import serve_cluster
from helpers.serving import ask

import kvcore
from kvcore import InputError, Request, read_events
from kvcore.config import RunConfig
from kvcore.trace import Trace
from kvcore_cluster.config import ClusterParts
from kvcore_cluster.planner import Planner
from kvcore_cluster.router import LeastRequests
from kvcore_cluster.simulate import simulate_cluster
from kvcore_plugins.latency import TokenRate
from kvcore_replay.check.trace import replay

SECOND = 10**9
BUSY = 160
"""Requests in the second minute; in each of the others there are two."""


class Wave(kvcore.Workload):
    """A workload of five minutes, the second of them busy; all prompts share 512 tokens.

    The first request comes at `start` seconds.
    """

    name = "wave"
    digest = "wave"
    key_tokens = 16

    def __init__(self, start=0):
        """Take the time of the first request."""
        self.start = start

    def __iter__(self):
        """Yield the requests."""
        number = 0
        for minute, count in enumerate((2, BUSY, 2, 2, 2)):
            for each in range(count):
                at = (self.start + minute * 60) * SECOND + each * 60 * SECOND // count
                keys = [*range(32), *(1000 * (number + 1) + index for index in range(32))]
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


RATE = "token-rate:prefill=1,decode=0.1"


def serve(trace=None, autoscale="throughput:interval=20,start_up=10,cool_down=0", **options):
    """Serve the wave with at most four replicas that prefill 1,000 tokens a second."""
    config = RunConfig(
        "simulate",
        router="least-requests",
        blocks=512,
        autoscale=autoscale,
        slo="ttft=3",
        **{"workload": Wave(), "replicas": 4, "latency": RATE, **options},
    )
    parts = ClusterParts(config)
    if trace is None:
        return simulate_cluster(parts.workload, **parts.cluster())
    with Trace(trace, workload=parts.workload, seed=0) as written:
        return simulate_cluster(parts.workload, **parts.cluster(written))


def test_the_number_of_replicas_follows_the_load():
    """Two replicas are started in the busy minute and stopped in the minute after it.

    All requests are served.
    """
    result = serve()
    assert result.summary()["completed"] == len(list(Wave()))
    changes = [
        (change.at // (60 * SECOND), change.replica, change.up) for change in result.changes
    ]
    assert changes == [(1, 1, True), (1, 2, True), (2, 1, False), (2, 2, False)]


def test_only_running_replicas_are_paid_for():
    """One replica is paid for during the run, the others from their start to their stop."""
    result = serve()
    extra = sum(-change.at if change.up else change.at for change in result.changes) / SECOND
    assert extra == 2 * 60
    assert result.replica_s == pytest.approx(result.simulated_s + extra)


SPLIT = {"replicas": 5, "disaggregate": "prefill=2,decode=2,mixed=1"}


@pytest.mark.parametrize(
    ("options", "rate_scale"), [({}, 1), ({}, 2), (SPLIT, 1)], ids=["one", "faster", "pools"]
)
def test_a_run_that_begins_later_is_planned_and_paid_for_as_one_that_begins_at_once(
    options, rate_scale
):
    """The first interval, and what is paid for, begin with the first request."""
    planner = "throughput:interval=20,start_up=10,cool_down=0,start=2"
    early, late = (
        serve(
            autoscale=planner,
            workload=Wave(start * rate_scale),
            rate_scale=rate_scale,
            **options,
        )
        for start in (0, 600)
    )
    assert early.changes
    assert late.replica_s == early.replica_s
    assert [attrs.evolve(change, at=change.at - 600 * SECOND) for change in late.changes] == [
        *early.changes
    ]


@pytest.mark.parametrize("option", ["least", "start"])
def test_a_smaller_pool_than_a_planner_is_to_have_up_is_all_up(option):
    """Pools of two sizes have one planner: the smaller one has as many up as there are."""
    trace = BytesIO()
    planner = f"load:{option}=2,interval=1000"
    serve(trace, planner, replicas=3, disaggregate="prefill=2,decode=1")
    assert orjson.loads(trace.getvalue().splitlines()[0])["routing"]["up"] == [0, 1, 2]


def test_a_recorded_planner_has_all_up_where_fewer_replicas_are_left(tmp_path):
    """With fewer replicas than the planner of a trace had up, all of them are up.

    A planner that replaces the recorded one must fit.
    """
    file = tmp_path / "trace.jsonl"
    serve(file, "load:start=3,interval=1000")
    assert kvcore.whatif(file, replicas=2).rerun.requests == BUSY + 8
    with pytest.raises(InputError, match="planner 'load': start=3 of 2 replicas"):
        kvcore.whatif(file, replicas=2, autoscale="load:start=3")


def test_a_restarted_replica_has_an_empty_cache():
    """Each stop ends a life of the replica, and the next life begins with a new cache."""
    result = serve()
    stops = [change.replica for change in result.changes if not change.up]
    assert stops
    for replica in set(stops):
        assert len(result.lives[replica]) == 1 + stops.count(replica)
    for lives in result.lives:
        for life in lives:
            life.cache.check_integrity()


def test_a_replica_gets_requests_only_while_it_is_up(tmp_path):
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


@pytest.mark.parametrize(
    ("plans", "start_up", "others"),
    [([2], 100, 1), ([2, 1], 0, 1), ([1] * 13 + [2], 0, 0)],
    ids=["it is not up by then", "it ends its requests last", "it is not wanted before"],
)
def test_replicas_are_paid_for_until_the_last_request_has_ended(plans, start_up, others):
    """A replica that starts 1 s after another is paid for 1 s less, up to the end of the run.

    The third request goes to it if it is up.
    """
    planner = Script(plans=plans, interval=1, start_up=start_up, cool_down=0)
    requests = [ask(0, output=4), ask(1, output=4), ask(2, round(1.5 * SECOND), output=8)]
    run = serve_cluster(
        requests,
        router=LeastRequests(),
        planner=planner,
        latency=lambda: TokenRate(decode=0.001),
    )
    result, end = run.result, run.result.simulated_s
    assert result.replica_s == pytest.approx(end + others * (end - 1))


@pytest.mark.parametrize("planner", ["throughput:interval=20", "load:interval=20,start=2"])
def test_equal_runs_write_equal_traces(tmp_path, planner):
    """Two runs with equal options write the same trace."""
    serve(tmp_path / "a.jsonl", planner)
    serve(tmp_path / "b.jsonl", planner)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("latency", "replica"),
    [("token-rate:prefill=1,decode=0.1", 1), ("token-rate:prefill=10,decode=0.03", 4)],
    ids=["prefill", "decode"],
)
def test_prefill_and_decode_pools_scale_independently(tmp_path, latency, replica):
    """With split phases, only the pool that is too slow for the busy minute is scaled.

    Replicas 0 to 2 prefill, 3 and 4 decode. Replicas 0 and 3 are always up.
    """
    result = serve(tmp_path / "trace.jsonl", latency=latency, replicas=5,
                   disaggregate="prefill=3,decode=2")  # fmt: skip
    assert result.summary()["completed"] == len(list(Wave()))
    changes = [(change.replica, change.up) for change in result.changes]
    assert changes == [(replica, True), (replica, False)]
    assert result.replica_s == pytest.approx(2 * result.simulated_s + 60)
    report = replay(tmp_path / "trace.jsonl")
    assert report.complete
    assert report.finished == len(list(Wave()))


def test_failures_with_autoscaling_are_refused():
    """A run with both failures and autoscaling is refused: both start and stop replicas."""
    with pytest.raises(InputError, match="give one of them"):
        serve(fail=["replica=0,at=1,for=2"])
