"""The built-in routers: their formulas, and the traffic on which they fail."""

from __future__ import annotations

from collections import Counter
from math import ceil
from random import Random
from typing import ClassVar

import attrs
import pytest
from helpers.clusters import serve_cluster
from helpers.requests import keyed
from helpers.serving import BLOCK, ask

from kvcore import SLO, LatencyModel, Plugins, PolicyError, Replica, Router
from kvcore_cluster.dispatcher import Dispatcher
from kvcore_cluster.views import parse_view

NAMES = Plugins().names("router")
SIZE = 16


def build(spec):
    """Return the router of the spec `spec`."""
    return Plugins().build("router", spec)


def seen(*replicas, usage=None):
    """Return replicas with these counts; `hit` is the cached part of the prompt in tokens."""
    hits = [replica.pop("hit", 0) for replica in replicas]
    made = [
        Replica(index, 1000, SIZE, 64, up=True, **each) for index, each in enumerate(replicas)
    ]
    for replica, replica.hit_tokens in zip(made, hits, strict=True):
        share = 0.0 if usage is None else usage[replica.number]
        replica.connect(lambda share=share: share, lambda tokens, _: tokens / 1000)
    return made


def joined(router, replicas):
    """Return the router `router` after `replicas` have joined."""
    router = build(router) if isinstance(router, str) else router
    router.bind()
    for replica in replicas:
        router.on_joined(replica, 0)
    return router


def choose(spec, replicas, request=None):
    """Return the number of the replica that a request, by default of 160 tokens, goes to."""
    request = prompt(0, 10) if request is None else request
    return joined(spec, replicas).route(request, replicas, 0).number


def prompt(name, blocks, **fields):
    """Return a request with a number of blocks, or with a list of keys."""
    keys = [(name, index) for index in range(blocks)] if isinstance(blocks, int) else blocks
    fields = {"arrival": 0, "output_tokens": 8} | fields
    return keyed(name, keys, SIZE, **fields)


class Served:
    """A router that dispatches requests to `count` replicas."""

    def __init__(self, router, count=2):
        self.replicas = seen(*({} for _ in range(count)))
        for replica in self.replicas:
            replica.up = False
        router = build(router) if isinstance(router, str) else router
        self.dispatcher = Dispatcher(router, self.replicas, parse_view("index"))
        for replica in self.replicas:
            self.dispatcher.joined(replica, 0)

    def send(self, request):
        """Route a request, and return its replica."""
        return self.dispatcher.route(request, request.arrival)

    def serve(self, request):
        """Route a request, end it before the next one, and return its replica."""
        replica = self.send(request)
        self.dispatcher.first_token(request, replica, request.arrival)
        self.dispatcher.ended(request, replica, request.arrival + 10**8)
        return replica

    @property
    def routed(self):
        """The number of requests of each replica, in descending order."""
        return sorted((replica.routed for replica in self.replicas), reverse=True)


class TestFormulas:
    """Each router decides small cases as calculated by hand."""

    @pytest.mark.parametrize("name", ["random", "power-of-two", "prefix-affinity", "dynamo"])
    def test_draws_depend_on_request_and_seed_only(self, name):
        """A draw depends on the request and the seed, not on requests routed before."""
        replicas = seen({}, {}, {}, {})

        def drawn(spec, order):
            router = joined(spec, replicas)
            return {n: router.route(prompt(n, 1), replicas, 0).number for n in order}

        forth = drawn(name, range(50))
        assert forth == drawn(name, range(49, -1, -1))
        assert forth != drawn(f"{name}:seed=1", range(50))

    def test_power_of_two_takes_the_better_of_two(self):
        """`power-of-two` takes the less loaded of a random pair.

        So the most loaded replica of n gets nothing, and the k-th most loaded wins k - 1 pairs.
        """
        replicas = seen(*({"requests": n} for n in range(4)))
        router, count = build("power-of-two"), Counter()
        for n in range(6000):
            count[router.route(prompt(n, 1), replicas, 0).number] += 1
        for index, pairs in enumerate((3, 2, 1, 0)):
            assert count[index] == pytest.approx(6000 * pairs / 6, abs=200)
        assert choose("power-of-two", seen({})) == 0

    def test_prefix_affinity_takes_the_least_loaded_of_the_best(self):
        """The least loaded of the replicas within the tolerance of the best match wins.

        For 160 tokens a tenth is 16: a match of 128 is within it of 144, one of 112 is not.
        """
        counts = [{"hit": 144, "requests": 5}, {"hit": 128, "requests": 3}, {"hit": 112}]
        assert choose("prefix-affinity:bound=0", seen(*map(dict, counts))) == 1
        assert choose("prefix-affinity:tolerance=0,bound=0", seen(*map(dict, counts))) == 0
        assert choose("prefix-affinity:tolerance=1", seen(*map(dict, counts))) == 2

    def test_prefix_affinity_is_bounded_by_the_load(self):
        """A replica with 1.5 times the mean in flight is left out, however much it hits.

        With 9 in flight on three, and this one, that is ceil(1.5 * 10 / 3) = 5 requests.
        """
        counts = [{"hit": 144, "requests": 5}, {"hit": 64, "requests": 3}, {"requests": 1}]
        assert choose("prefix-affinity", seen(*map(dict, counts))) == 1
        assert choose("prefix-affinity:bound=0", seen(*map(dict, counts))) == 0

    def test_dynamo_cost_is_blocks_to_prefill_and_in_flight(self):
        """The cost is the blocks to prefill plus those in flight.

        Waiting 10, the prompt's 10 less 6 that hit, and 20 in flight are 34; the other replica
        costs 10 + 25.
        """
        replicas = seen(
            {"hit": 96, "waiting_tokens": 160, "prompt_blocks": 20, "requests": 3},
            {"prompt_blocks": 25},
        )
        costs = [build("dynamo").cost(prompt(0, 10), replica) for replica in replicas]
        assert costs == [34, 35]
        assert choose("dynamo", replicas) == 0
        # Ten more blocks wait there than at the other replica, so that its hits count half.
        assert choose("dynamo:delta=1", replicas) == 1
        assert choose("dynamo:load_weight=1", replicas) == 1
        assert choose("dynamo:hit_weight=0.5", replicas) == 1

    def test_llm_d_score_is_a_weighted_sum(self):
        """The score is the weighted sum of queue, free cache and match.

        The first replica has 2·0 + 2·0.5 + 3·1 = 4, the other 2·1 + 2·0.1 + 3·0 = 2.2; equal
        queues score 1.
        """
        loaded = [{"waiting": 4, "hit": 160}, {}]
        assert choose("llm-d", seen(*map(dict, loaded), usage=[0.5, 0.9])) == 0
        assert choose("llm-d:prefix=1", seen(*map(dict, loaded), usage=[0.5, 0.9])) == 1
        assert choose("llm-d", seen({}, {}, usage=[0.5, 0.4])) == 1

    @pytest.mark.parametrize(
        ("loads", "chosen"), [((64, 0), 0), ((65, 0), 1), ((200, 134), 0), ((210, 130), 1)]
    )
    def test_sglang_ignores_a_match_at_uneven_loads(self, loads, chosen):
        """A match is ignored if loads differ by more than 64 and by more than 1.5 times.

        200 requests are 1.49 times 134.
        """
        first, second = loads
        assert choose(
            "sglang", seen({"requests": first, "hit": 160}, {"requests": second})
        ) == (chosen)

    def test_loadaware_score_is_the_match_less_excess_requests(self):
        """The score is the match less the weighted excess of requests over the mean.

        It is 1 - (4 - 2) / 2 = 0 against 0 - (0 - 2) / 2 = 1; with a weight of 0.4 it is 0.6
        against 0.4.
        """
        counts = [{"requests": 4, "hit": 160}, {}]
        assert choose("loadaware", seen(*map(dict, counts))) == 1
        assert choose("loadaware:weight=0.4", seen(*map(dict, counts))) == 0

    def test_lmetric_cost_is_tokens_times_requests(self):
        """The cost is the tokens to prefill times the requests in flight with this one.

        (100 + 32) · 3 is 396, 160 · 2 is 320 and 160 · 3 is 480.
        """
        counts = {"waiting_tokens": 100, "requests": 2, "hit": 128}
        assert choose("lmetric", seen(dict(counts), {"requests": 1})) == 1
        assert choose("lmetric", seen(dict(counts), {"requests": 2})) == 0

    def test_mooncake_adds_the_queue_to_the_prefill(self):
        """The cost is the prefill time of waiting and missing tokens, at 1 ms per token.

        160 waiting tokens and 16 missing ones are more than 160 elsewhere.
        """
        served = Served("mooncake")
        first = prompt("a", 10)
        assert served.send(first).number == 0
        assert served.send(prompt("b", [*first.keys[:9], "b"])).number == 1
        served.dispatcher.first_token(first, served.replicas[0], 1)
        assert served.send(prompt("c", [*first.keys[:9], "c"])).number == 0

    def test_mooncake_refuses_a_request_that_will_miss_its_slo(self):
        """With `reject=true` a request that will miss its TTFT is refused.

        The only replica has 160 ms of waiting prefill, and the request takes as long again.
        """
        for limit, refused in ((330, False), (310, True)):
            served = Served("mooncake:reject=true", 1)
            served.send(prompt("a", 10))
            late = prompt("b", 10, slo=SLO(ttft_ns=limit * 10**6))
            assert (served.send(late) is None) is refused
        assert Served("mooncake:reject=true", 1).send(prompt("a", 10)) is not None

    def test_preble_follows_a_match_of_half_the_prompt(self):
        """A match of at least half the prompt is followed; otherwise the least work counts."""
        busy = {"requests": 1}
        assert choose("preble", seen({**busy, "hit": 80}, {})) == 0
        assert choose("preble", seen({**busy, "hit": 64}, {})) == 1

    def test_preble_leaves_a_replica_with_too_much_work(self):
        """A match with more than 1.5 times the work of another replica is not followed.

        This is so only after 50 requests for each replica.
        """
        counts = [{"requests": 4, "hit": 160, "routed": 60}, {"requests": 2, "routed": 39}]
        assert choose("preble", seen(*map(dict, counts))) == 0
        counts[1]["routed"] = 40
        assert choose("preble", seen(*map(dict, counts))) == 1
        counts[1]["requests"] = 3
        assert choose("preble", seen(*map(dict, counts))) == 0


class TestSessions:
    """Consistent hashing of sessions with bounded loads."""

    def test_a_session_stays_at_its_replica(self):
        """Requests of one session, or else tenant, or else first key, go to one replica."""
        for replicas, name in (
            (1, lambda n: {"session": "s", "tenant": f"{n}", "keys": [n]}),
            (1, lambda n: {"tenant": "t", "keys": [n]}),
            (1, lambda n: {"keys": ["same", n]}),
            (8, lambda n: {"session": f"{n}", "tenant": "t", "keys": ["same"]}),
            (8, lambda n: {"tenant": f"{n}", "keys": ["same"]}),
            (8, lambda n: {"keys": [n, "same"]}),
        ):
            served, homes = Served("session", 8), set()
            for n in range(100):
                fields = name(n)
                request = prompt(n, fields.pop("keys"), arrival=n, **fields)
                homes.add(served.serve(request).number)
            assert len(homes) == replicas

    def test_a_replica_that_leaves_moves_its_own_sessions_alone(self):
        """Only the sessions of a replica that leaves move, and they return with it."""
        served = Served("session", 8)

        def homes():
            return {
                name: served.serve(prompt(name, 1, session=name)).number for name in range(200)
            }

        before = homes()
        gone = served.replicas[3]
        served.dispatcher.left(gone, 1)
        during = homes()
        moved = {name for name in before if during[name] != before[name]}
        assert moved == {name for name, home in before.items() if home == 3}
        served.dispatcher.joined(gone, 2)
        assert homes() == before

    @pytest.mark.parametrize("bound", [1.1, 1.25, 2.0])
    def test_no_replica_has_more_than_the_bound(self, bound):
        """No replica has more than `bound` times the mean of requests in flight."""
        served = Served(f"session:bound={bound}", 5)
        for n in range(200):
            served.send(prompt(n, 1, session="s"))
            most = max(replica.requests for replica in served.replicas)
            assert most <= ceil(bound * (n + 1) / 5)


def stream():
    """Return six turns of five sessions with a common beginning; each turn is longer."""
    return [
        prompt(
            f"{turn}/{name}",
            [("system", n) for n in range(8)] + [(name, n) for n in range(12 * (turn + 1))],
            arrival=turn * 10**9,
            session=name,
        )
        for turn in range(6)
        for name in ("a", "b", "c", "d", "e")
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_request_without_an_answer_tries_each_replica_once(name):
    """A request that no replica answers is routed to each replica once."""
    dispatcher = Served(name, 3).dispatcher
    for index in range(20):
        tried = set()
        for _ in range(3):
            replica = dispatcher.route(prompt(index, 4), 0, tried)
            tried.add(replica.number)
            dispatcher.ended(prompt(index, 4), replica, 0)
        assert tried == {0, 1, 2}


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"round-robin"}))
def test_every_router_differs_from_round_robin(name):
    """Each other router differs from `round-robin` on growing sessions over 3 replicas."""

    def routed(spec):
        served = Served(spec, 3)
        return [
            (served.send if index % 2 else served.serve)(each).number
            for index, each in enumerate(stream())
        ]

    assert routed(name) != routed("round-robin")


@attrs.define(slots=False, eq=False)
class InFlight(Router):
    """A router whose cost is the missing blocks plus the blocks in flight."""

    name: ClassVar[str] = "in-flight"

    def cost(self, request, replica):
        """Return the sum of missing blocks and blocks in flight."""
        missing = request.prompt_tokens - replica.hit_tokens
        return missing / replica.block_size + replica.prompt_blocks


def paced(router, shared):
    """Return how many of 448 requests each of 2 replicas gets, most first.

    There are 56 sessions of 8 turns, one request at a time. All prompts begin with `shared`
    common blocks, and grow by 20 blocks a turn.
    """
    served = Served(router)
    for serial in range(448):
        turn, session = divmod(serial, 56)
        keys = [("system", n) for n in range(shared)]
        keys += [(session, n) for n in range(20 * (turn + 1))]
        served.serve(prompt(serial, keys, arrival=serial * 10**9, session=f"{session}"))
    return served.routed


class TestRegressions:
    """Known weaknesses: paced sessions and shared prefixes may overload one replica."""

    @pytest.mark.parametrize(
        "router",
        [
            InFlight,
            "dynamo",
            "dynamo:load_weight=1",
            "llm-d",
            "loadaware",
            "lmetric",
            "mooncake",
        ],
    )
    def test_paced_sessions_all_go_to_one_replica(self, router):
        """Routers that follow any match send all paced sessions to one replica.

        Nothing is in flight when the next turn comes, so the common blocks decide.
        """
        assert paced(router() if router is InFlight else router, 2) == [448, 0]

    @pytest.mark.parametrize(
        "router",
        [
            "round-robin",
            "least-requests",
            "random",
            "power-of-two",
            "session",
            "sglang",
            "preble",
        ],
    )
    def test_paced_sessions_are_spread(self, router):
        """Routers that ignore short matches, or count past requests, spread paced sessions."""
        most, fewest = paced(router, 2)
        assert most + fewest == 448
        assert most < 300

    @pytest.mark.parametrize(
        ("router", "used"),
        [
            ("prefix-affinity:bound=0,tolerance=0", 1),
            ("llm-d", 1),
            ("prefix-affinity:tolerance=1", 8),
            ("prefix-affinity:tolerance=0", 6),
            ("prefix-affinity:bound=1.25", 7),
            ("dynamo", 8),
            ("sglang", 8),
            ("loadaware", 8),
            ("lmetric", 8),
            ("mooncake", 8),
            ("session", 8),
        ],
    )
    def test_equal_prompts_go_to_one_replica_by_overlap_alone(self, router, used):
        """400 equal prompts in flight all go to one of eight replicas by overlap alone.

        Other routers use six to eight.
        """
        served = Served(router, 8)
        for serial in range(400):
            served.send(prompt(serial, [("same", n) for n in range(40)], session=f"{serial}"))
        assert sum(1 for count in served.routed if count) == used

    def test_a_tolerance_of_0_loses_the_tail_of_tpot(self):
        """Without tolerance, a short shared prefix makes one of four replicas serve all.

        With a tolerance of a tenth of the prompt, of which the prefix is a twentieth, the p99
        of TPOT is about that of `round-robin`.
        """
        requests = _poisson(shared=1, own=19, gap=60_000)
        exact, near, around = (
            _p99_tpot(_serve(requests, router))
            for router in (
                "prefix-affinity:bound=0,tolerance=0",
                "prefix-affinity",
                "round-robin",
            )
        )
        assert exact > 10 * around
        assert near == pytest.approx(around, rel=0.1)

    def test_following_a_prefix_improves_ttft_at_low_rates_only(self):
        """Following a long shared prefix improves the mean TTFT at low rates only.

        At ten times the rate, a router that spills has fewer hits but a lower mean TTFT and p99
        of TPOT.
        """
        sticks, spills = "sglang", "sglang:absolute=4"
        around = "round-robin"
        rare = _poisson(shared=40, own=2, gap=400_000)
        assert _ttft(_serve(rare, sticks)) < _ttft(_serve(rare, around))
        dense = _poisson(shared=40, own=2, gap=40_000)
        stuck, spilt = _serve(dense, sticks), _serve(dense, spills)
        assert sum(stuck.log.hit) > sum(spilt.log.hit)
        assert _ttft(stuck) > 1.5 * _ttft(spilt)
        assert _p99_tpot(stuck) > 2 * _p99_tpot(spilt)


@attrs.define(slots=False, eq=False)
class Laden(LatencyModel):
    """A latency model in which a step takes 5 us, and 1 us more for each token."""

    name: ClassVar[str] = "laden"

    def pieces(self, work):
        """Return one flat piece."""
        return [(5_000_000 + 1_000_000 * (work.prefill + work.decode), 0)]


def _poisson(*, shared, own, gap):
    """Return 300 requests, some `gap` ns apart, with `shared` keys in common."""
    dice, at, made = Random(0), 0, []
    for serial in range(300):
        at += int(dice.expovariate(1) * gap)
        keys = [("system", n) for n in range(shared)] + [(serial, n) for n in range(own)]
        made.append(ask(serial, at, BLOCK * len(keys), 20, keys=keys))
    return made


def _serve(requests, router):
    """Serve `requests` with four replicas, and return the result."""
    return serve_cluster(
        requests,
        4,
        router=build(router),
        latency=Laden,
        blocks=4000,
        trace=False,
        max_seqs=64,
    ).result


def _p99_tpot(result):
    log = result.log
    gaps = zip(log.first_token, log.finish, log.output, strict=True)
    return sorted((end - first) / (output - 1) for first, end, output in gaps)[296]


def _ttft(result):
    log = result.log
    pairs = zip(log.arrival, log.first_token, strict=True)
    return sum(first - came for came, first in pairs) / len(log.arrival)


def test_a_router_that_decides_nothing_says_so():
    """A router without `cost` and `route` is reported with the methods that it needs."""

    class Empty(Router):
        name = "empty"

    with pytest.raises(PolicyError, match=r"neither cost\(\) nor route\(\) is defined"):
        serve_cluster([ask(0, prompt=16, output=1)], 2, router=Empty(), blocks=100)


@pytest.mark.parametrize(
    ("method", "wanted"),
    [("route", r"route\(request, replicas, now\)"), ("cost", r"cost\(request, replica\)")],
)
def test_a_router_with_other_parameters_is_told_the_right_ones(method, wanted):
    """A method with a parameter too few is reported with its parameters and the right ones."""
    members = {"__doc__": "A router.", "name": "short", method: lambda _, __: None}
    short = type("Short", (Router,), members)
    found = rf"has the method {method}\(__\); it is called as {wanted}"
    with pytest.raises(PolicyError, match=found):
        serve_cluster([ask(0, prompt=16, output=1)], 2, router=short(), blocks=100)
