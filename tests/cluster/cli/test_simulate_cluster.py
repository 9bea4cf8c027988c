"""Tests of `kvcore simulate --replicas`: what it runs, prints and writes, and its errors."""

from __future__ import annotations

import json
from functools import partial

import orjson
import pytest
from helpers.commands import stdout_of

import kvcore
from kvcore_cli import main as frame

SMALL = "zipf:requests=60,prefixes=4,prefix_tokens=64,suffix_tokens=32,output_tokens=8,rate=50"
UNLIKE = """
router = "least-requests"
tensor_parallel = 1

[[replicas]]
count = 2
device = "h200"
blocks = 100

[[replicas]]
max-seqs = 8
blocks = 50
"""

run = partial(stdout_of, "simulate", SMALL)


def report(*arguments):
    """Run `kvcore simulate --json` and return the document, with 0 as its wall time."""
    return {**json.loads(run(*arguments, "--json")), "wall_s": 0}


def test_replicas_share_the_requests():
    """Each request is served by one replica, and round robin divides them evenly."""
    summary = report("--replicas", 4)
    assert [replica["requests"] for replica in summary["replicas"]] == [15] * 4
    assert summary["completed"] == 60
    assert summary["imbalance"]["requests"] == {"most": 1, "variation": 0}


ADDED = ("command", "config", "rates", "cost", "savings")


def test_python_has_the_results_of_the_command():
    """`simulate_cluster` has the results of the command, which adds options and cost."""
    result = kvcore.simulate_cluster(SMALL, replicas=3, router="least-requests", blocks=200)
    summary = report("--replicas", 3, "--router", "least-requests", "--blocks", 200)
    added = {name: summary.pop(name) for name in ADDED}
    assert all(added.values())
    assert result.summary() | {"wall_s": 0} == summary


def test_one_replica_is_one_server():
    """One replica with a router has the document of one server without the options."""
    routed, alone = report("--replicas", 1, "--router", "least-requests"), report()
    assert routed | {"command": alone["command"]} == alone


def test_replicas_may_have_options_of_their_own(tmp_path):
    """Tables in a file give replicas options of their own; the keys above hold for all."""
    path = tmp_path / "fleet.toml"
    path.write_text(UNLIKE)
    summary = report("--config", path)
    assert [replica["blocks"] for replica in summary["replicas"]] == [100, 100, 50]
    groups = summary["config"]["replicas"]
    assert [(group["count"], group["device"]) for group in groups] == [(2, "h200"), (1, "h100")]
    config = summary["config"]
    assert (config["device"], config["plugins"]["latency"]["options"]["device"]) == (
        "h200",
        "h200",
    )
    assert len(report("--config", path, "--replicas", 2)["replicas"]) == 2


def test_the_report_has_a_row_for_each_replica():
    """The report has a row for each replica, their imbalance and their failures."""
    failed = "--fail", "replica=1,at=0.1,for=0.5", "--fail", "replica=1,at=0.9"
    printed = run("--replicas", 3, "--tensor-parallel", 1, *failed)
    lines = printed.splitlines()
    assert "3 replicas of 1 x h100, routed by round-robin," in " ".join(lines)
    assert [line.split()[0] for line in lines if line[:2] in ("0 ", "1 ", "2 ")] == list("012")
    assert "requests a replica" in printed
    assert "Failed, 2 times in all: replica 1." in printed


def test_files_of_a_cluster_are_written(tmp_path):
    """`--out` and `--prometheus` write summary, requests, trace and metrics by replica."""
    out = tmp_path / "out"
    run("--replicas", 2, "--out", out, "--prometheus", tmp_path / "metrics")
    summary = orjson.loads((out / "summary.json").read_bytes())
    rows = [orjson.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    for replica in summary["replicas"]:
        served = [row for row in rows if row["replica"] == replica["replica"]]
        assert len(served) == replica["requests"] == 30
    assert (out / "trace.jsonl.gz").exists()
    metrics = (tmp_path / "metrics").read_text()
    assert 'kvcore_replica_requests_total{replica="1",router="round-robin"' in metrics


def test_an_adequate_number_of_replicas_is_proposed(capsys):
    """For a saturated cluster the report proposes a number of replicas that is enough."""
    busy = "zipf:requests=2000,prefix_tokens=2048,suffix_tokens=2048,output_tokens=200,rate=40"
    options = ["--tensor-parallel", "1", "--replicas", "2"]
    assert frame.run(["simulate", busy, *options]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("SATURATED: zipf asks for")
    assert "It would hold with --replicas " in printed
    number = printed.partition("hold with --replicas ")[2].partition(":")[0]
    assert not kvcore.simulate_cluster(
        busy, replicas=int(number), tensor_parallel=1
    ).saturation.saturated


@pytest.mark.parametrize("replicas", [["--replicas", "2"], []])
def test_no_number_of_replicas_is_proposed_for_split_phases(capsys, replicas):
    """No number of replicas is proposed for a saturated run with `--disaggregate`."""
    busy = "zipf:requests=300,prefix_tokens=2048,suffix_tokens=2048,output_tokens=200,rate=400"
    options = ["--tensor-parallel", "1", *replicas, "--disaggregate", "prefill=1,decode=1"]
    assert frame.run(["simulate", busy, *options]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("SATURATED: zipf asks for")
    assert "is searched for" not in printed
    assert "No number of replicas was found" not in printed


def test_reuse_includes_the_tiers_of_all_replicas():
    """The reuse ratio counts hits and loaded tokens of all replicas."""
    summary = report("--replicas", 2, "--blocks", 12, "--tier", "host:memory=1GiB,load=always")
    ratio = summary["reuse_ratio"]["token"]
    assert ratio > summary["hit"]["ratio"]["token"]
    hits = summary["hit"]["hit_tokens"] + summary["loaded_tokens"]
    assert ratio == hits / summary["hit"]["lookup_tokens"]


def test_the_load_is_divided_by_the_number_of_replicas():
    """The offered load is divided by the number of replicas."""
    load = {n: report("--replicas", n)["offered_load"] for n in (1, 2, 4)}
    assert load[2] == pytest.approx(load[1] / 2, rel=0.2)
    assert load[4] == pytest.approx(load[1] / 4, rel=0.2)


def test_starts_and_stops_of_a_planner_are_reported():
    """The report states how often the planner decided to start or stop a replica."""
    planner = "load:interval=0.2,start_up=0.1"
    options = "--replicas", 3, "--slo", "ttft=0.001", "--autoscale", planner
    assert report(*options)["changes"]
    assert "The planner decided on" in " ".join(run(*options).split())


def test_json_has_the_options_of_the_cluster():
    """`config` in JSON has the view, failures, planner and split phases that were asked for."""
    planned = report("--replicas", 3, "--slo", "ttft=1", "--autoscale", "load:interval=9")
    autoscale = planned["config"]["autoscale"]
    assert (autoscale["name"], autoscale["options"]["interval"]) == ("load", 9)
    split = report("--disaggregate", "prefill=1,decode=1", "--view", "exact")["config"]
    assert split["disaggregate"].startswith("prefill=1,decode=1")
    assert (split["view"], split["fail"]) == ("exact", [])
    assert "autoscale" not in split


def test_one_server_refuses_replicas():
    """`simulate` in Python raises InputError for `replicas`, and names `simulate_cluster`."""
    with pytest.raises(kvcore.InputError, match=r"replicas: .* kvcore.simulate_cluster"):
        kvcore.simulate(SMALL, replicas=2)
