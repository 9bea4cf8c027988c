"""Clusters: failures, faulty routers, the order of simultaneous events, and views as text."""

import tracemalloc
from functools import partial
from math import nan
from typing import ClassVar

import attrs
import pytest
from helpers.clusters import Longest, RandomRouter, serve_cluster
from helpers.serving import BLOCK, ask

from kvcore import SLO, InputError, PolicyError, Router, Scheduler
from kvcore.request import Request
from kvcore.serving import StepPlan
from kvcore.serving.router import Replica
from kvcore.units import NS_PER_S
from kvcore_cluster.cluster import Failure
from kvcore_cluster.dispatcher import Dispatcher
from kvcore_cluster.planner import parse_planner
from kvcore_cluster.views import ExactView, SentIndex, parse_view
from kvcore_plugins.drafter.acceptance import Acceptance


@attrs.define(eq=False)
class Answers(Router):
    """A router that answers with the result of a function."""

    name: ClassVar[str] = "answers"
    answer: object = None

    def route(self, request, replicas, now):
        """Return the result of the function."""
        return self.answer(request, replicas, now)


@attrs.define(eq=False)
class Closed(Scheduler):
    """A scheduler that admits no job."""

    name: ClassVar[str] = "closed"

    def priority(self, job, now):
        """Return any number."""
        del job, now
        return 0

    def plan(self, state):
        """Return an empty plan."""
        del state
        return StepPlan()


def to(number):
    """Return a router that sends all requests to one replica while that is up."""
    return Answers(
        lambda _, replicas, __: min(replicas, key=lambda each: each.number != number)
    )


def shared(name, at=0, count=4, **fields):
    """Return a request whose `count` blocks are shared by all other such requests."""
    keys = list(range(count))
    return ask(name, at, count * BLOCK, keys=keys, **fields)


# Failures.


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("replica=3,at=600,for=120", Failure(600 * NS_PER_S, 3, 120 * NS_PER_S)),
        ("at=5ms,replica=0", Failure(5_000_000, 0)),
    ],
)
def test_a_failure_is_parsed_with_its_parts_in_any_order(text, failure):
    """The parts of a failure may be in any order; without `for`, the replica never returns."""
    assert Failure.parse(text) == failure
    assert Failure.parse(str(failure)) == failure


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("replica=1", "needs replica=, its number, and at="),
        ("replica=x,at=1", "needs replica="),
        pytest.param(f"replica={'1' * 5000},at=1", "needs replica=", id="endless"),
        ("replica=1,at=1,at=2", "is no failure"),
        ("replica=1,when=3", "is no failure"),
        ("replica=1,at=soon", "expected a number of seconds"),
        ("replica=1,at=1,for=0", "some time to be gone"),
    ],
)
def test_malformed_failures_are_refused(text, why):
    """A malformed failure is refused with the reason."""
    with pytest.raises(InputError, match=why):
        Failure.parse(text)


@pytest.mark.parametrize("fields", [(-1, 0), (0, -1), (0, 0, 0), (0, 0, -1)])
def test_failures_with_invalid_times_and_numbers_are_refused(fields):
    """`Failure` refuses a negative time or number, and a duration that is not positive."""
    with pytest.raises(InputError, match="some time to be gone"):
        Failure(*fields)


@pytest.mark.parametrize(
    ("failures", "why"),
    [
        (["replica=2,at=1"], "numbered from 0 to 1"),
        (["replica=1,at=2", "replica=1,at=1"], "failed before"),
        (["replica=1,at=1,for=2", "replica=1,at=2"], "has not returned by then"),
        (["replica=1,at=1,for=2", "replica=1,at=3"], "has not returned by then"),
        (["replica=1,at=1", "replica=1,at=1"], "failed before"),
    ],
)
def test_failures_of_missing_or_stopped_replicas_are_refused(failures, why):
    """A failure of a replica that does not exist, or that is down already, is refused."""
    with pytest.raises(InputError, match=why):
        serve_cluster([ask(0)], failures=failures)


def test_requests_of_a_failed_replica_are_served_elsewhere():
    """The requests of a failed replica begin again on another one, and keep their arrival."""
    run = serve_cluster(
        [ask(0, 5, output=10)], router=to(0), failures=["replica=0,at=40ns,for=10ns"]
    )
    columns = run.result.requests
    assert columns["replica"] == [1]
    assert columns["arrival_s"] == [5e-9]
    assert columns["finish_s"] == [140e-9]
    assert run.result.retried == 1
    assert [(line["event"], line["t"]) for line in run.lines if "seq" not in line] == [
        ("REQUEST", 5), ("ROUTE", 5), ("FAIL", 40), ("ROUTE", 40), ("RETURN", 50),
    ]  # fmt: skip


def test_a_replica_returns_with_an_empty_cache():
    """A replica returns with an empty cache, and the view of the router is empty as well."""
    router = Longest()
    requests = [shared(0), shared(1, 100), shared(2, 200)]
    fail = ["replica=0,at=150ns,for=10ns"]
    run = serve_cluster(requests, 1, router=router, view="exact", failures=fail)
    assert [hits for [(_, [(_, hits, _)])] in router.saw.values()] == [0, 12, 0]
    assert run.result.requests["hit_tokens"] == [0, 12, 0]


def test_requests_wait_while_all_replicas_are_down():
    """While all replicas are down requests wait; then they are routed in order of arrival."""
    fail = ["replica=0,at=0,for=50ns", "replica=1,at=10ns"]
    run = serve_cluster([ask(0, 20), ask(1, 30)], failures=fail, router=RandomRouter())
    assert [(line["t"], line["request"], line["replica"]) for line in run.of("ROUTE")] == [
        (50, 0, 0), (50, 1, 0),
    ]  # fmt: skip
    assert run.result.requests["arrival_s"] == [20e-9, 30e-9]


def test_requests_are_rejected_if_no_replica_returns():
    """If no replica returns, running and arriving requests are rejected.

    Each has a row, and a rejected request has missed its SLO.
    """
    requests = [ask(0, 0, output=9, slo=SLO(deadline_ns=10**9)), ask(1, 30)]
    run = serve_cluster(requests, 1, failures=["replica=0,at=20ns"])
    assert run.result.requests["reason"] == ["all replicas have failed"] * 2
    assert run.result.requests["replica"] == [-1, -1]
    assert run.result.requests["met_slo"] == [False, None]
    assert [line["request"] for line in run.of("REJECT")] == [0, 1]


def test_the_turn_after_a_refused_request_arrives_after_its_think_time():
    """The next request of a session arrives its think time after the router refused one."""
    session = {"session": "s"}
    requests = [ask(0, 5, **session), ask(1, 6, after=0, think_time=7, **session)]
    router = Answers(lambda request, replicas, _: replicas[0] if request.id else None)
    run = serve_cluster(requests, router=router)
    assert [line["t"] for line in run.of("REQUEST")] == [5, 12]
    assert run.result.requests["reason"] == ["the router refused it", None]


def test_the_turn_after_a_rejected_request_is_not_late():
    """The next request of a session arrives as soon as one is rejected, even during a step."""
    session = {"session": "s"}
    requests = [
        ask(0, 0, output=3), ask(1, 5, prompt=99, **session), ask(2, 6, after=1, **session)
    ]  # fmt: skip
    router = Answers(lambda request, replicas, _: replicas[-(request.id == 2)])
    run = serve_cluster(requests, router=router, blocks=9, failures=["replica=1,at=7ns"])
    assert [line["t"] for line in run.of("ROUTE")][:3] == [0, 5, 5]
    assert run.result.retried == 1


def test_a_replica_that_fails_while_verifying_drafts_leaks_no_blocks():
    """A replica that fails while it verifies drafts leaks none of the drafts' blocks.

    `serve_cluster` checks the integrity of its caches.
    """
    drafter = partial(Acceptance, tokens=4, probability=0.9)
    failures = ["replica=0,at=25ns,for=5ns"]
    run = serve_cluster([ask(0, output=30)], router=to(0), drafter=drafter, failures=failures)
    assert len(run.result.lives[0]) == 2


# Faulty routers.


def test_a_router_that_raises_is_reported_with_its_name():
    """The error about a router that raises names the router, its method and the exception."""

    def fails(*_):
        msg = "no idea"
        raise ValueError(msg)

    with pytest.raises(PolicyError, match=r"router plugin 'answers'.*route.*no idea"):
        serve_cluster([ask(0)], router=Answers(fails))


@pytest.mark.parametrize(
    ("cost", "why"),
    [
        (nan, "answered cost.. of request 0 with nan: give a number"),
        (None, r"answered cost.. of request 0 with \[None.*: is a `return` missing"),
        ("cheap", r"answered cost.. of request 0 with \['cheap'.*: give numbers"),
    ],
)
def test_router_costs_that_are_no_numbers_are_refused(cost, why):
    """A cost that is not a number raises PolicyError; NaN would make the order arbitrary."""

    class Costs(Router):
        """A router with the same wrong cost for every replica."""

        name: ClassVar[str] = "costs"

        def cost(self, request, replica):
            """Return the wrong cost."""
            return cost

    with pytest.raises(PolicyError, match=why):
        serve_cluster([ask(0)], router=Costs())


@pytest.mark.parametrize("answer", [0, "replica 0", object(), Replica(0, 9, BLOCK, 1, up=True)])
def test_invalid_answers_of_a_router_are_refused(answer):
    """A router that returns neither a given replica nor None raises PolicyError."""
    with pytest.raises(PolicyError, match="none of the replicas that it was given"):
        serve_cluster([ask(0)], router=Answers(lambda *_: answer))


@pytest.mark.parametrize("planner", [None, "load:start=2,least=2"])
def test_a_scheduler_that_runs_no_job_is_refused(planner):
    """A scheduler that lets no job run raises PolicyError with the number of its replica.

    So it does beside a planner, whose decisions alone would never end.
    """
    planner = planner and parse_planner(planner)
    with pytest.raises(PolicyError, match="of replica 1 leaves 1 requests waiting"):
        serve_cluster([ask(0)], router=to(1), scheduler=Closed, planner=planner)


# Order, usage and hints.


def test_events_at_one_time_have_a_fixed_order():
    """At one time failures come first, then returns, then routing, then the ends of steps."""
    # At 100 ns replica 0 ends its tenth step, replica 1 fails, and replica 2 returns.
    requests = [ask(0, 0, output=10), ask(1, 100)]
    fail = ["replica=2,at=50ns,for=50ns", "replica=1,at=100ns,for=9ns"]
    seen = []

    def first(request, replicas, _):
        seen.append((request.id, [(replica.number, replica.requests) for replica in replicas]))
        return replicas[0]

    run = serve_cluster(requests, 3, router=Answers(first), failures=fail)
    assert seen == [(0, [(0, 0), (1, 0), (2, 0)]), (1, [(0, 1), (2, 0)])]
    at_100 = [line["event"] for line in run.lines if line["t"] == 100]
    assert at_100[:4] == ["FAIL", "RETURN", "REQUEST", "ROUTE"]
    assert at_100.index("FINISH") > at_100.index("ROUTE")


def test_usage_in_a_jump_counts_from_each_step():
    """Blocks allocated in the middle of a jump over many steps count from their step on."""
    used = []

    def first(_, replicas, now):
        used.append((now, round(replicas[0].usage * 10)))
        return replicas[min(now, 1)]

    # No event touches replica 0: 4 tokens, one more every 10 ns, in ten blocks of 4.
    requests = [ask(0, 0, 4, 30), *(ask(at, at) for at in (5, 15, 45, 55, 95))]
    serve_cluster(requests, router=Answers(first), blocks=10)
    assert used == [(0, 0), (5, 1), (15, 2), (45, 2), (55, 3), (95, 4)]


def test_prefetch_hints_have_no_effect_in_a_cluster():
    """Prefetch hints have no effect in a cluster, as a request is routed when it arrives."""
    requests = [shared(0), shared(1, 100)]
    hinted = [
        attrs.evolve(request, hints=attrs.evolve(request.hints, prefetch=50))
        for request in requests
    ]
    tiers = ("host:memory=6400",)
    run = serve_cluster(hinted, 1, tiers=tiers)
    assert not run.of("PREFETCH")
    plain = serve_cluster(requests, 1, tiers=tiers)
    assert [line for line in run.lines if line["event"] != "REQUEST"] == [
        line for line in plain.lines if line["event"] != "REQUEST"
    ]


# Views in text.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("index", "index"),
        ("index:ttl=120s", "index"),
        ("index:ttl=none,blocks=1M", "index:ttl=none,blocks=1000000"),
        ("index:ttl=500ms", "index:ttl=0.5"),
        ("index:ttl=10000000.000000001", "index:ttl=10000000.000000001"),
        ("events", "events:delay=0"),
        ("events:delay=50ms", "events:delay=0.05"),
        ("exact", "exact"),
    ],
)
def test_the_text_of_a_view_reads_back(text, shown):
    """The text that a view writes is read as the same view."""
    assert str(parse_view(text)) == shown
    assert str(parse_view(shown)) == shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("exakt", r"'exakt' is no view \(did you mean 'exact'\?\); there are: index, events"),
        ("index,exact", "'index,exact' is no view"),
        ("exact:delay=1", "view 'exact' has no option 'delay'; its options: none"),
        ("events:dealy=1", r"no option 'dealy' \(did you mean 'delay'\?\)"),
        ("events:delay=-1", "option 'delay' of view 'events': time '-1'"),
        ("index:ttl=0", "option 'ttl' of view 'index': '0': give a time above 0, such as"),
        ("index:blocks=0", "option 'blocks' of view 'index'"),
        ("index:blocks=few", "option 'blocks' of view 'index': expected a whole number"),
        ("index:ttl", "is no option"),
    ],
)
def test_malformed_views_are_refused(text, why):
    """A malformed view is refused with the reason and, where there are some, the choices."""
    with pytest.raises(InputError, match=why):
        parse_view(text)


def test_the_ttl_of_an_index_entry_restarts_with_each_request():
    """The TTL of an index entry counts from the last request that was sent with its key."""
    index = SentIndex(ttl=100)
    index.sent(shared(0), 0, 0)
    index.sent(shared(1, count=2), 0, 60)
    assert index.find(shared(2), 99) == {0: 16}
    assert index.find(shared(3), 100) == {0: 8}
    assert index.find(shared(4), 160) == {}
    assert len(index) == 0


def test_an_index_has_one_entry_for_a_repeated_prompt():
    """One prompt sent a thousand times is one entry for each of its keys, and one record."""
    index = SentIndex(ttl=None)
    for number in range(1000):
        index.sent(shared(number), 0, number)
    assert len(index) == 4
    assert len(index._sent) == 1


def test_a_prompt_in_the_index_takes_the_memory_of_what_is_new_in_it():
    """The first keys of prompts are kept once, though the keys of each are other objects."""
    index = SentIndex(ttl=None)
    tracemalloc.start()
    try:
        for number in range(50):
            parts = [*range(2_000), 10_000 + number]
            keys = [part.to_bytes(16, "big") for part in parts]
            request = Request(id=number, prompt_tokens=4 * len(keys), keys=keys, key_tokens=4)
            index.sent(request, 0, number)
            del keys, request
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == 2_050
    assert taken < 1 << 20


def test_no_events_are_kept_for_a_router_that_ignores_its_view():
    """A view keeps no events of the caches for a router that does not use it."""
    view = ExactView()
    serve_cluster([shared(0)], router=RandomRouter(), view=view)
    assert not view._caches


def test_the_load_is_unknown_where_no_request_finishes():
    """A cluster that rejects all requests has no offered load, as one server has none."""
    result = serve_cluster([ask(each, 10 * each, 100) for each in range(3)], blocks=10).result
    assert len(result.log.reasons) == 3
    assert result.offered_load is None


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_the_load_of_replicas_counts_each_request(replicas):
    """Equal requests are the load of one server, divided, even if each has a server alone."""
    requests = [ask(each, 10 * each, 100, 3) for each in range(8)]
    one, several = (
        serve_cluster(requests, n, max_seqs=1).result.offered_load for n in (1, replicas)
    )
    assert several == pytest.approx(one / replicas)


@attrs.define(eq=False)
class Dropping(Longest):
    """A router that fails once it has routed a request."""

    name: ClassVar[str] = "dropping"

    def on_routed(self, request, replica, now):
        """Raise an error."""
        raise ZeroDivisionError


def test_a_request_that_its_router_drops_is_not_in_the_index():
    """A prompt is in the index of what was sent only where its request was."""
    view, request = SentIndex(ttl=None), shared(0)
    dispatcher = Dispatcher(Dropping(), [Replica(0, 100, BLOCK, 8)], view)
    dispatcher.joined(dispatcher.replicas[0], 0)
    with pytest.raises(PolicyError, match="on_routed"):
        dispatcher.route(request, 0)
    assert view.find(request, 0) == {}
