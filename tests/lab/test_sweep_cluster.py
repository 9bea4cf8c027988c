"""Sweeps over routers and numbers of replicas."""

from __future__ import annotations

import pytest

import kvcore
from kvcore.config import RunConfig
from kvcore_lab.report.sweep import SweepReport
from kvcore_lab.sweep import Grid, Journal, Plan, sweep
from kvcore_lab.sweep.cells import CellRun, WorkloadCache
from kvcore_lab.sweep.executors import ThisProcess

ZIPF = "zipf:requests=60,prefixes=4,rate=50"
ROUTERS = ["round-robin", "least-requests"]


@pytest.fixture
def swept(tmp_path):
    """Return a function that sweeps a grid in this process."""

    def run(executor=None, **axes):
        with Journal(tmp_path / "journal") as journal:
            return sweep(
                Plan.from_grid(Grid(**axes)), journal, executor=executor or ThisProcess()
            )

    return run


def digest(**fields):
    """Return the digest of a cell with these fields."""
    config = RunConfig(**{"workload": ZIPF, "blocks": 90, "replicas": 2, **fields})
    return CellRun(config, WorkloadCache()).digest


def test_a_cell_with_replicas_has_the_results_of_a_cluster(swept):
    """A cell with several replicas has the results of `simulate_cluster`.

    Rows come in the order of the grid, and a cell with one replica has the results of
    `simulate`.
    """
    rows = swept(workload=ZIPF, blocks=200, replicas=[1, 3], router=ROUTERS).rows
    order = [(row["replicas"], row["router"]) for row in rows]
    assert order == [(n, router) for n in (1, 3) for router in ROUTERS]
    for row in rows[2:]:
        result = kvcore.simulate_cluster(ZIPF, blocks=200, replicas=3, router=row["router"])
        summary = result.summary()
        assert row["ttft_s_p99"] == result.ttft.p99
        assert row["reuse_ratio_token"] == result.hit_ratio.token
        assert row["imbalance_busy"] == summary["imbalance"]["busy"]["most"]
    assert rows[0]["imbalance_requests"] is None
    assert rows[0]["ttft_s_mean"] == kvcore.simulate(ZIPF, blocks=200).ttft.mean


def test_a_list_of_unlike_replicas_is_one_value_of_an_axis(swept):
    """A list of tables of unlike replicas is one value of the axis `replicas`.

    The table of results shows it as text.
    """
    fleet = [{"count": 2, "blocks": 400}, {"blocks": 300, "device": "h200"}]
    rows = swept(workload=ZIPF, replicas=[fleet, 2], fail="replica=1,at=0.5").rows
    assert [row["replicas"] for row in rows] == [
        "2 x blocks=400 + 1 x blocks=300,device=h200",
        2,
    ]
    for row in rows:
        assert row["fail"] == "replica=1,at=0.5"
        assert row["retried"] > 0
        assert row["completed"] == 60


@pytest.mark.parametrize(
    "fields",
    [
        {"replicas": 3},
        {"replicas": [{"count": 2, "max_seqs": 9}]},
        {"router": "least-requests"},
        {"view": "exact"},
        {"fail": "replica=1,at=3"},
        {"eviction": "fifo"},
    ],
)
def test_each_option_of_a_cluster_changes_the_digest_of_a_cell(fields):
    """Each option of a cluster changes the digest of a cell.

    Two replicas have the same digest as a number and as a table.
    """
    assert digest(**fields) != digest()
    assert digest(replicas=[{"count": 2}]) == digest()


def test_the_report_has_the_best_router_for_each_number_of_replicas(swept):
    """The report has a row for each number of replicas, with the best router."""
    axes = {"replicas": [2, 3], "router": ROUTERS, "slo": "ttft=0.3"}
    found = swept(workload=ZIPF, blocks=400, **axes)
    report = SweepReport(found)
    best = {}
    for row in found.rows:
        at = str(row["replicas"])
        best[at] = max(best.get(at, (0, "")), (row["goodput"], row["router"]))
    assert report.table.headers[:2] == ["replicas", "most goodput"]
    assert [row[:2] for row in report.table.rows] == [[at, best[at][1]] for at in ("2", "3")]
    assert "the best by router" in report.reading
