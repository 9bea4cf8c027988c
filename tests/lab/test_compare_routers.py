"""Comparisons of routers, with one another and with one cache of all their memory."""

from __future__ import annotations

import json
import subprocess
import sys

import attrs
import pytest
from helpers.requests import keyed, prefixes

import kvcore
from kvcore import InputError, PluginError, Router
from kvcore.workloads import RequestList
from kvcore_lab.comparison import compare_policies
from kvcore_lab.report.routers import OPTIMUM, SHARED, RoutersReport
from kvcore_lab.router_comparison import compare_routers
from kvcore_lab.sweep import Processes
from kvcore_plugins.eviction import LRU

ZIPF = (
    "zipf:requests=120,prefixes=12,prefix_tokens=512,suffix_tokens=16,output_tokens=4,rate=20"
)
ROUTERS = "round-robin,least-requests"
OWN = "memory=80GB,bandwidth=2TB,flops=900T"


class First(Router):
    """A router that sends all requests to the first replica."""

    name = "first"

    def cost(self, request, replica):
        """Return the number of the replica."""
        del request
        return replica.number


class Broken(Router):
    """A router that raises at the first request."""

    name = "broken"

    def cost(self, request, replica):
        """Raise ValueError."""
        raise ValueError


@pytest.fixture(scope="module")
def comparison():
    """Return the comparison of two routers on two clusters that all tests share."""
    return compare_routers(ZIPF, ROUTERS, [2, 3], blocks=100)


def test_a_row_has_the_numbers_of_a_simulation(comparison):
    """A row has the numbers of `simulate_cluster`, in the order asked for."""
    order = [(row.replicas, row.router) for row in comparison.rows]
    assert order == [(n, router) for n in (2, 3) for router in ROUTERS.split(",")]
    for row in comparison.rows:
        options = {"replicas": row.replicas, "router": row.router, "blocks": 100}
        result = kvcore.simulate_cluster(ZIPF, **options)
        assert row.hit_ratio == result.hit_ratio.token
        assert (row.ttft_mean_s, row.ttft_p99_s) == (result.ttft.mean, result.ttft.p99)
        assert row.goodput == result.goodput
        assert row.imbalance_busy == result.summary()["imbalance"]["busy"]["most"]


def test_one_cache_has_the_memory_of_all_replicas(comparison):
    """The one cache hits what a serial replay in a pool of its size hits."""
    for shared, replicas in zip(comparison.shared, (2, 3), strict=True):
        assert (shared.replicas, shared.blocks) == (replicas, 100 * replicas)
        replayed = compare_policies(
            ZIPF, "lru", 100 * replicas, block_size=16, accounting="tokens"
        )
        assert shared.hit_ratio == replayed.rows[0].hit_ratio["token"]


def test_shares_are_of_the_optimum_of_one_cache(comparison):
    """A share is of the optimum of the one cache, which hits at least what LRU does there."""
    most = {shared.replicas: shared.optimum for shared in comparison.shared}
    for shared in comparison.shared:
        assert shared.optimum >= shared.hit_ratio > 0
    for row in comparison.rows:
        assert row.share_of_optimum == row.hit_ratio / most[row.replicas]


def test_no_router_beats_one_cache_that_evicts_nothing():
    """Answers that the next turn quotes count in the one cache as in the replicas.

    With room for everything, one cache by LRU hits what its optimum hits, and so does a router
    that sends all turns to one replica.
    """
    turns = [
        keyed(
            turn,
            "abcdefgh"[: 2 * turn + 1],
            16,
            session="chat",
            after=turn - 1 if turn else None,
            output_tokens=17,
            output_keys="abcdefgh"[2 * turn + 1],
        )
        for turn in range(4)
    ]
    found = compare_routers(RequestList(turns), [First], 2, blocks=100, block_size=16)
    (shared,), (row,) = found.shared, found.rows
    assert row.hit_ratio == shared.hit_ratio == shared.optimum == (2 + 4 + 6) / (1 + 3 + 5 + 7)


def test_one_cache_gets_requests_of_one_time_in_their_order():
    """Two chats begin at one time, the one that ends last first: the other finds no block.

    Of its own block it computes the last token; the first one would hit it.
    """
    turns = [
        keyed("long", "ab", 16, session="a", output_tokens=99),
        keyed("short", "a", 16, session="b", output_tokens=1),
        keyed("again", "z", 16, session="b", after="short", output_tokens=1),
    ]
    (shared,) = compare_routers(RequestList(turns), [First], 2, blocks=100).shared
    assert shared.hit_ratio == shared.optimum == 0


@pytest.mark.parametrize(("think_time", "hits"), [(0, 8 / 20), (10**10, 0)])
def test_one_cache_gets_turns_as_they_came_under_the_clock(think_time, hits):
    """Turns of two chats that interleave in a run do so in the one cache and its optimum.

    The cache has room for one chat. If a turn follows at once it finds its chat there; after
    10 seconds the other chat, which came meanwhile, has taken its place.
    """
    turns = [
        keyed(
            f"{chat}{turn}",
            prefixes(chat * 5),
            16,
            arrival=5 * 10**9 * (chat == "b"),
            session=chat,
            after=f"{chat}0" if turn else None,
            think_time=think_time * turn,
            output_tokens=1,
        )
        for chat in "ab"
        for turn in range(2)
    ]
    found = compare_routers(RequestList(turns), [First], 1, blocks=5, block_size=16)
    (shared,) = found.shared
    assert (shared.hit_ratio, shared.optimum) == (hits, hits)


@pytest.mark.parametrize(
    ("blocks", "hits"),
    [
        (6, 3),  # all blocks stay; the last token of a prompt is computed
        (5, 3),
        (2, 0),  # the second prompt fills the cache
        (3, 1),
    ],
)
def test_the_optimum_of_three_prompts_equals_one_found_by_hand(blocks, hits, tmp_path):
    """The optimum of three small prompts equals the one found by hand."""
    path = tmp_path / "requests.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 512 * len(keys), "output_length": 1, "hash_ids": keys}
        for keys in ([1, 2, 3, 4], [5, 6], [1, 2, 3, 4])
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = compare_routers(path, "round-robin", 1, blocks=blocks, block_size=512)
    (shared,) = found.shared
    assert shared.optimum == pytest.approx(hits / 10)


def test_no_optimum_where_belady_is_no_bound():
    """There is no optimum with a retention policy or without a prefix cache."""
    for options in ({"retention": "window:tokens=64"}, {"prefix": "none"}):
        found = compare_routers(ZIPF, "round-robin", 2, blocks=100, **options)
        assert (found.shared[0].optimum, found.rows[0].share_of_optimum) == (None, None)
        assert "Belady" not in RoutersReport(found).reading


def test_different_replicas_form_one_cluster():
    """Different replicas form one cluster, and the one cache has the memory of all."""
    fleet = [{"count": 2, "blocks": 50}, {"blocks": 90, "device": "h200"}]
    found = compare_routers(ZIPF, "round-robin", fleet)
    assert [row.replicas for row in found.rows] == ["2 x blocks=50 + 1 x blocks=90,device=h200"]
    assert found.shared[0].blocks == 190


def test_replicas_with_an_instance_of_a_policy_are_compared():
    """An instance in a table of replicas serves each router as a new one, and has its name.

    A table alone is a cluster, as for `simulate_cluster`.
    """
    fleet = [{"count": 2, "blocks": 50, "eviction": LRU()}]
    found = compare_routers(ZIPF, ["round-robin", "random"], fleet)
    assert {row.replicas for row in found.rows} == {"2 x blocks=50,eviction=lru"}
    named = {"count": 2, "blocks": 50, "eviction": "lru"}
    assert found.rows == compare_routers(ZIPF, ["round-robin", "random"], named).rows


def test_a_router_class_is_compared():
    """A router class can be compared like a named router."""
    found = compare_routers(ZIPF, [First, "round-robin"], 3, blocks=100)
    assert compare_routers(ZIPF, First, 3, blocks=100).rows == found.rows[:1]
    assert found.rows[0].imbalance_requests == 3
    assert found.rows[0].router == "first"


def test_other_processes_give_the_same_comparison(comparison):
    """Simulations in other processes give the same comparison."""
    assert (
        compare_routers(ZIPF, ROUTERS, [2, 3], blocks=100, executor=Processes(2)) == comparison
    )


def test_a_router_that_raises_is_reported():
    """The error about a router that raises has its name and the exception."""
    with pytest.raises(PluginError, match=r"with router broken failed: .*ValueError"):
        compare_routers(ZIPF, [Broken], 2, blocks=100)


def test_no_routers_and_no_replicas_are_refused():
    """An empty list of routers and 0 replicas are refused."""
    with pytest.raises(InputError, match="router: the list is empty"):
        compare_routers(ZIPF, [], 2)
    with pytest.raises(InputError, match="replicas: 0 is out of range"):
        compare_routers(ZIPF, ROUTERS, 0)
    with pytest.raises(InputError, match="give routers"):
        compare_routers(ZIPF, router="random")


def test_the_report_has_the_best_router_first(comparison):
    """For each cluster the report lists routers by goodput, then the one cache."""
    report = RoutersReport(comparison)
    assert report.table.headers[:2] == ["replicas", "router"]
    names = [row[1] for row in report.table.rows]
    assert len(names) == 8
    for first, replicas in ((0, 2), (4, 3)):
        rows = [row for row in comparison.rows if row.replicas == replicas]
        goodput = {row.router: row.goodput for row in rows}
        assert names[first : first + 2] == sorted(goodput, key=goodput.get, reverse=True)
        assert names[first + 2 : first + 4] == [SHARED, OPTIMUM]
    assert "on 2 or 3 replicas of 4 x h100 with " in report.headline


def test_among_equal_goodput_the_least_ttft_is_first(comparison):
    """Goodput that is equal as shown is a tie: the mean TTFT decides, and the best is named."""
    goodput, ttft = {"round-robin": 2.004, "least-requests": 2.003}, iter([3, 2, 1, 2])
    rows = [
        attrs.evolve(row, goodput=goodput[row.router], ttft_mean_s=next(ttft))
        for row in comparison.rows
    ]
    report = RoutersReport(attrs.evolve(comparison, rows=rows))
    order = [row[:2] for row in report.table.rows if row[1] in goodput]
    assert order == [
        ["2", "least-requests"],
        ["2", "round-robin"],
        ["3", "round-robin"],
        ["3", "least-requests"],
    ]
    assert report.reading.startswith(
        "Best: least-requests with 2 replicas; round-robin with 3 replicas (by goodput"
    )


def test_routers_within_one_percent_are_best_together(comparison):
    """A percent of goodput and of TTFT is noise; with three replicas one is 2 % faster."""
    goodput, ttft = iter([3, 2.98, 3, 3]), iter([0.0283, 0.0281, 3.06, 3])
    rows = [
        attrs.evolve(row, goodput=next(goodput), ttft_mean_s=next(ttft))
        for row in comparison.rows
    ]
    reading = RoutersReport(attrs.evolve(comparison, rows=rows)).reading
    assert reading.startswith(
        "Best: least-requests and round-robin with 2 replicas; least-requests with 3 replicas "
        "(by goodput, then by mean TTFT; within 1 % is alike)."
    )


def test_a_router_that_crowds_one_replica_is_named(comparison):
    """Of three replicas one has 2.5 times the mean of all: ten times that of the others."""
    uneven = {"round-robin": 2.4, "least-requests": 2.5}
    rows = [attrs.evolve(row, imbalance_requests=uneven[row.router]) for row in comparison.rows]
    reading = RoutersReport(attrs.evolve(comparison, rows=rows[2:])).reading
    assert "Crowded: with least-requests one replica got" in reading
    assert "Crowded" not in RoutersReport(comparison).reading


def test_one_router_is_not_the_best(comparison):
    """A report on a single router names no best one."""
    rows = [row for row in comparison.rows if row.router == "round-robin"]
    assert "Best" not in RoutersReport(attrs.evolve(comparison, rows=rows)).reading


def test_a_frame_has_the_rows(comparison):
    """`to_frame()` has the rows of the comparison."""
    pytest.importorskip("polars")
    frame = comparison.to_frame()
    assert frame["hit_ratio"].to_list() == [row.hit_ratio for row in comparison.rows]


SCRIPT = """
import sys
from pathlib import Path
from kvcore_lab.router_comparison import compare_routers
from kvcore_lab.sweep.executors import executor_for
from kvcore_plugins.workload import Chat

chats, log, jobs = map(Path, sys.argv[1:])
read = Chat.__iter__

def counted(chat):
    with log.open("a") as file:
        file.write("read\\n")
    return read(chat)

Chat.__iter__ = counted
executor = executor_for(None, int(str(jobs)))
compare_routers(str(chats), ["round-robin", "random"], replicas=[2, 3], executor=executor)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forks on Linux alone")
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_workload_is_read_once_for_all_routers(jobs, tmp_path):
    """The requests of a log are held, so that its texts are read for one simulation alone.

    In a process without other threads, which may be forked.
    """
    chats, log = tmp_path / "chats.jsonl", tmp_path / "reads"
    rows = (
        {"prompt": f"{n % 3} " * 99, "completion": "yes", "timestamp": n} for n in range(30)
    )
    chats.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    command = [sys.executable, "-c", SCRIPT, str(chats), str(log), str(jobs)]
    subprocess.run(command, check=True)
    assert log.read_text().count("read") == 1


def test_requests_that_generate_nothing_have_a_cost_a_day_alone():
    """Where no token is generated, the report has no cost of a million of them."""
    requests = [keyed(n, [n], 64, arrival=n * 10**8) for n in range(9)]
    found = compare_routers(RequestList(requests), ROUTERS, 2)
    reading = RoutersReport(found).reading
    assert "a day" in reading
    assert "million" not in reading


def test_the_prices_are_those_of_the_devices_of_all_clusters():
    """Each device with a price is named, whichever cluster comes last."""
    clusters = [[{"device": name}] for name in ("h100", "h200", OWN)]
    price = {"h100": 2.0, "h200": 3.0}
    found = compare_routers(ZIPF, "random", clusters, gpu_price=price)
    assert found.gpu_prices == "h100 at $2.00 an hour, given; h200 at $3.00 an hour, given"


def test_clusters_that_are_no_numbers_are_named_below_a_chart():
    """The axis of a chart has the texts of different replicas, where it had their places."""
    fleets = [[{"count": 2, "blocks": 50}], [{"blocks": 90}, {"blocks": 50}]]
    chart = RoutersReport(compare_routers(ZIPF, "round-robin", fleets)).chart()
    places = [place for place, _ in chart.panels[0].lines["round-robin"]]
    assert [*map(chart.axis_text, places)] == ["2 x blocks=50", "1 x blocks=90 + 1 x blocks=50"]
