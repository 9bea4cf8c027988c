"""The report of a cluster: sentences and tables."""

from __future__ import annotations

import pytest

from kvcore.config import RunConfig
from kvcore_cluster.config import ClusterParts
from kvcore_cluster.report import ClusterReport
from kvcore_cluster.simulate import simulate_cluster

SMALL = "zipf:requests=100,prefixes=4,prefix_tokens=64,suffix_tokens=32,output_tokens=8,rate=50"


UNLIKE = {"device": "h200", "blocks": 20}


@pytest.fixture
def reported():
    """Return a function that simulates a cluster and returns its report."""

    def report(**options):
        given = {"workload": SMALL, "tensor_parallel": 1, **options}
        parts = ClusterParts(RunConfig(**given))
        result = simulate_cluster(parts.workload, **parts.cluster())
        document = parts.document(result)
        return ClusterReport(document, document["config"])

    return report


def test_few_replicas_have_a_row_each(reported):
    """Up to 16 replicas have a row each with the requests that they served."""
    rows = reported(replicas=16).replicas
    assert [row[0] for row in rows] == [str(index) for index in range(16)]
    assert {row[2] for row in rows} == {"6", "7"}


def test_many_replicas_are_reported_in_groups(reported):
    """More replicas are reported in eight groups, which together include all."""
    report = reported(replicas=20)
    names = [row[0] for row in report.replicas]
    assert names == ["3 busiest", *["next 3"] * 3, *["next 2"] * 3, "2 least busy"]
    assert "means of a group" in report.reading
    busy = [float(row[3].rstrip("%")) for row in report.replicas]
    assert busy == sorted(busy, reverse=True)


@pytest.mark.parametrize("bound", ["0", "1.5"])
def test_a_replica_with_nearly_all_requests_is_told(reported, bound):
    """Of prompts with one beginning a bound on load keeps one replica from getting all."""
    shared = "zipf:requests=100,prefixes=1,prefix_tokens=640,suffix_tokens=32,output_tokens=8"
    report = reported(
        workload=f"{shared},rate=200",
        replicas=2,
        router=f"prefix-affinity:bound={bound}",
        view="index",
    )
    told = "Replica 0 got 100 of 100 requests: prefix-affinity follows" in report.reading
    assert told == (bound == "0")


def test_the_headline_names_different_devices(reported):
    """The headline names the different devices and pools, and the total memory."""
    report = reported(replicas=[{"count": 2, "blocks": 10}, UNLIKE])
    assert (
        "3 replicas, 2 of 1 x h100 and 1 of 1 x h200, routed by round-robin" in report.headline
    )
    assert "Pools: 2 x 10 and 1 x 20 blocks of 16 tokens, 640 tokens in all" in report.headline


def test_pools_of_groups_are_those_of_one_server(reported):
    """Blocks that any cache group may take are not told in tokens, as for one server."""
    headline = reported(replicas=3, model="gemma-3-12b", blocks=40).headline
    assert "Pool of each of 3 replicas: 40 blocks" in headline
    assert "of which any goes to any cache group: 5 x 8 layers, a window of 1024" in headline
    assert "tokens in all" not in headline


def test_pools_of_layers_have_their_slots_by_replica(reported):
    """Each kind of replica has a sentence with its own slots of windows."""
    alike = {"count": 2, "blocks": 400}
    headline = reported(
        replicas=[alike, {"blocks": 200}], model="gemma-3-12b", like="sglang"
    ).headline
    assert "Pools of each of 2 replicas: 400 blocks" in headline
    assert "320 window slots" in headline
    assert "Pools of 1 replica: 200 blocks" in headline
    assert "160 window slots" in headline


def test_a_failure_is_reported_with_its_replica(reported):
    """A failure is reported with its replica and the number of restarted requests."""
    report = reported(replicas=2, fail="replica=1,at=0.5,for=0.5")
    assert report.reading.startswith("Failed, 1 time in all: replica 1.")
    assert [row[-1] for row in report.replicas] == ["0", "1"]
    assert report.setup.endswith("view index; fail replica=1,at=0.5,for=0.5.")


def test_failures_of_several_replicas_are_in_the_plural(reported):
    """Several replicas that failed are named, up to eight of them."""
    one = reported(replicas=9, fail="replica=1,at=0.5,for=0.5")
    rows = [{**row, "failures": 2} for row in one.summary["replicas"]]
    report = one._replace(summary={**one.summary, "replicas": rows})
    assert report.reading.startswith("Failed, 18 times in all: replicas 0, 1, ")
    assert ", 6, 7 and others. Their K/V was lost" in report.reading


def test_failures_of_a_group_are_summed(reported):
    """The row of a group has the sum of failures, and the sentence says so."""
    report = reported(replicas=20, fail="replica=1,at=0.5,for=0.5")
    assert sum(int(row[-1]) for row in report.replicas) == 1
    assert "means of a group, and the sum of its failures." in report.reading


def test_a_planner_has_no_column_of_failures(reported):
    """Beside a planner no replica fails: the table has no column that is 0 for all."""
    table, _ = reported(replicas=2, autoscale="load")._details()
    assert table.headers[-1] == "evicted"
    assert {len(row) for row in table.rows} == {len(table.headers)}
    table, _ = reported(replicas=2)._details()
    assert table.headers[-1] == "failed"


def test_the_setup_names_replicas_and_pools_of_phases(reported):
    """The pools of replicas are no single pool, and a split is an option like others."""
    setup = reported(blocks=40, disaggregate="prefill=1,decode=2").setup
    assert "; 3 replicas, the first with 40 blocks of 16 tokens;" in setup
    assert "; disaggregate prefill=1, decode=2, mixed=0, " in setup


def test_a_planner_is_named_where_it_starts_no_replica(reported):
    """In the setup and the configuration, and in the warning that the cluster is saturated."""
    report = reported(replicas=4, autoscale="load", rate_scale=100)
    assert report.config["autoscale"]["options"]["interval"] == 180
    assert "; autoscale load:least=1, most=0, start=0, interval=180.0, " in report.setup
    assert "started and stopped no replica; in the mean 1 of 4 replicas" in report.reading
    assert "the 1 of 4 replicas of 1 x h100 that the planner has up in the mean can do" in (
        report.warning
    )
