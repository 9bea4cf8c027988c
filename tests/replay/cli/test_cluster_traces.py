"""Tests of verbs on the trace of a cluster: those that sum it up, those that show a replica."""

from __future__ import annotations

import json

import pytest
from helpers.clusters import record_cluster
from helpers.commands import run_here as run
from helpers.commands import stdout_of as ran

from kvcore import read_events


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a trace of three replicas, one of which fails and recovers."""
    folder = tmp_path_factory.mktemp("cluster")
    record_cluster(folder / "c.jsonl", router="least-requests")
    return folder


def test_replay_has_a_row_for_each_replica(folder):
    """`replay` prints sums, then a row for each replica, then the setup with the failure.

    With `--at` the JSON document has which replicas are up.
    """
    out = ran("replay", "c.jsonl", cwd=folder)
    rows = [line.split() for line in out.splitlines()]
    assert ["FAIL", "1"] in rows
    counts = [row for row in rows if row and row[0] in ("0", "1", "2")]
    assert len(counts) == 3
    assert sum(int(row[2]) for row in counts) == 30
    assert "3 replicas, the first with 20 blocks of 16 tokens" in " ".join(out.split())
    assert "fail replica=1,at=0.3,for=0.1" in " ".join(out.split())
    document = json.loads(ran("replay", "c.jsonl", "--at", "0.35", "--json", cwd=folder))
    assert [part["up"] for part in document["replicas"]] == [True, False, True]


def test_more_than_sixteen_replicas_have_no_table(tmp_path):
    """For more than sixteen replicas `replay` has no table of them and refers to `--json`."""
    record_cluster(tmp_path / "many.jsonl", replicas=17, fail=())
    lines = ran("replay", "many.jsonl", cwd=tmp_path).splitlines()
    assert "--json has each of the 17 replicas." in lines
    assert not [line for line in lines if line.split()[:1] in (["0"], ["16"])]


def test_whatif_with_another_router_prints_the_changed_options(folder, tmp_path):
    """`whatif --router` names each option that differs, and exports the new trace."""
    again = tmp_path / "again.jsonl"
    asked = ("--router", "round-robin", "--replicas", 4, "--fail", "none", "--export", again)
    lines = ran("whatif", "c.jsonl", *asked, cwd=folder).splitlines()
    assert "router: round-robin instead of least-requests" in lines
    assert "replicas: 4 instead of 3" in lines
    assert "fail: none instead of replica=1,at=0.3,for=0.1" in lines
    header, *_ = read_events(again)
    assert header.replicas[0].count == 4
    assert header.routing == {"view": "exact", "fail": []}


def test_whatif_adds_and_removes_a_planner(folder, tmp_path):
    """`whatif --autoscale` adds a planner to a run, and `--autoscale none` removes it."""
    one = tmp_path / "one.jsonl"
    planned = ("--fail", "none", "--autoscale", "load:interval=0.2,start_up=0.1")
    ran("whatif", "c.jsonl", *planned, "--export", one, cwd=folder)
    header = next(iter(read_events(one)))
    assert header.routing["autoscale"]["name"] == "load"
    printed = " ".join(ran("whatif", one, "--autoscale", "none", cwd=folder).split())
    assert " autoscale: none instead of load:" in printed


def test_explain_sums_all_replicas_and_finds_a_request(folder):
    """`explain` counts misses that another replica held, and finds a request in any replica.

    With `--replica` the summary has no such misses.
    """
    out = ran("explain", "c.jsonl", "--summary", cwd=folder)
    assert "30 requests in 3 replicas of 20 blocks" in " ".join(out.split())
    assert "elsewhere" in out
    for request in range(0, 30, 7):
        assert "of replica" in " ".join(ran("explain", "c.jsonl", request, cwd=folder).split())
    document = json.loads(ran("explain", "c.jsonl", "3", "--json", cwd=folder))
    assert document["replica"] in (0, 1, 2)
    alone = ran("explain", "c.jsonl", "--summary", "--replica", "1:2", cwd=folder)
    assert "elsewhere" not in alone


@pytest.mark.parametrize(
    "command",
    [
        ("watch", "c.jsonl", "--every", "1"),
        ("view", "c.jsonl", "-o", "OUT.html"),
        ("report", "c.jsonl", "-o", "OUT.html"),
        ("plot", "c.jsonl", "--kind", "occupancy", "-o", "OUT.svg"),
        ("plot", "c.jsonl", "--kind", "ages", "-o", "OUT.svg"),
        ("export", "c.jsonl", "--to", "vllm", "--out", "OUT.jsonl"),
        ("export", "c.jsonl", "--to", "dynamo", "--out", "OUT.jsonl"),
    ],
    ids=lambda command: " ".join(command[:4]),
)
def test_verbs_for_one_server_require_a_replica(folder, tmp_path, command):
    """A verb that shows one server requires `--replica` for the trace of a cluster.

    Without it the error names the possible replicas and no file is written.
    """
    words = [word.replace("OUT", str(tmp_path / "out")) for word in command]
    done = run(*words, cwd=folder)
    assert done.returncode == 2
    assert "is the trace of 3 replicas: say which one, replica 0 to 2" in done.stderr
    assert not list(tmp_path.iterdir())
    for replica in ("0", "1:2"):
        assert run(*words, "--replica", replica, cwd=folder).returncode == 0


def test_requests_of_all_replicas_are_a_workload(folder, tmp_path):
    """`export --to mooncake` and `curve` read the requests of all replicas of a cluster.

    `export --to mooncake` refuses `--replica`.
    """
    out = tmp_path / "requests.jsonl"
    run("export", "c.jsonl", "--to", "mooncake", "--out", out, cwd=folder)
    assert len(out.read_text().splitlines()) == 30
    assert "30 requests" in ran("curve", "trace:c.jsonl", cwd=folder)
    done = run(
        "export", "c.jsonl", "--to", "mooncake", "--out", out, "--replica", 0, cwd=folder
    )
    assert done.returncode == 2
    assert "leave --replica out" in done.stderr


def test_replica_is_refused_for_one_server(tmp_path):
    """`--replica` is an error for the trace of one server and for a workload."""
    ran("simulate", "zipf:requests=5", "--blocks", 200, "--trace", "one.jsonl", cwd=tmp_path)
    for command in (("explain", "one.jsonl", "--summary"), ("watch", "one.jsonl")):
        done = run(*command, "--replica", "0", cwd=tmp_path)
        assert done.returncode == 2
        assert "is the trace of one server: leave replica out" in done.stderr
    done = run("explain", "mooncake", "3", "--blocks", 9, "--replica", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "leave --replica out" in done.stderr


def test_plot_and_report_read_the_folder_of_a_cluster(tmp_path):
    """`plot` draws latencies of a cluster's folder; `report` needs its trace and a replica."""
    given = ("--replicas", 2, "--blocks", 200, "--out", "found")
    ran("simulate", "zipf:requests=5", *given, cwd=tmp_path)
    ran("plot", "found", "--kind", "latency", "-o", "l.svg", cwd=tmp_path)
    done = run("report", "found", "-o", "page.html", cwd=tmp_path)
    assert done.returncode == 2
    assert "give the trace in it" in done.stderr
    page = ("report", "found/trace.jsonl.gz", "--replica", 1, "-o", "page.html")
    assert run(*page, cwd=tmp_path).returncode == 0


def test_explain_of_a_replica_that_decodes_says_so(tmp_path):
    """Its requests were admitted first where they were prefilled, and wait for nothing."""
    words = "zipf:requests=20,prefixes=2,prefix_tokens=64,suffix_tokens=32,output_tokens=8"
    split = ("--disaggregate", "prefill=1,decode=1", "--blocks", "90", "--trace", "d.jsonl")
    ran("simulate", words, *split, cwd=tmp_path)
    told = " ".join(
        ran("explain", "d.jsonl", "--summary", "--replica", "1", cwd=tmp_path).split()
    )
    assert "20 decoded here, and prefilled on another replica. Of 0 prompt tokens" in told
    document = json.loads(
        ran("explain", "d.jsonl", "--summary", "--replica", "1", "--json", cwd=tmp_path)
    )
    assert (document["requests"]["decoded"], document["requests"]["waiting"]) == (20, 0)
    one = " ".join(ran("explain", "d.jsonl", "3", "--replica", "1", cwd=tmp_path).split())
    assert "Another replica prefilled it, and has its hits and misses." in one
