"""Tests of `kvcore sweep --executor ray`: its table is that of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from secrets import token_hex

import pytest
from helpers.commands import running
from helpers.sweeps import SMALL, command, install_mortal, run, wait_for

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.slow

HEAD = """
import ray
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
input()
"""
"""A program that prints the address of its Ray cluster and runs until stdin ends."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Start a Ray cluster that has the policy `mortal`; yield its address and environment.

    Only processes with its token can connect to it, and they can connect to no other cluster.
    """
    env = install_mortal(tmp_path_factory.mktemp("cluster") / "site")
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)}
    with running([sys.executable, "-c", HEAD], env=env, stdin=subprocess.PIPE) as head:
        address = head.stdout.readline().strip()
        if not address:
            pytest.skip(f"no Ray cluster starts here: {head.communicate()[1][-300:]}")
        yield address, env
        head.communicate("\n")


@pytest.fixture
def sweep(cluster, tmp_path):
    """Return a function that sweeps a TOML text on the cluster or in one process.

    It returns the table.
    """
    address, env = cluster

    def invoke(toml, out, executor=f"ray:{address}"):
        (tmp_path / "sweep.toml").write_text(toml)
        where = ("--executor", executor) if executor else ("--jobs", "1")
        done = run("sweep.toml", *where, "--out", out, cwd=tmp_path, env=env)
        # Ray may write lines of its own about dead workers at any time.
        errors = [line for line in done.stderr.splitlines() if "(raylet)" not in line]
        assert (done.returncode, errors) == (0, [])
        return (tmp_path / out).read_bytes()

    return invoke


def test_a_cluster_gives_the_table_of_one_process(sweep, tmp_path):
    """A cluster gives the table of one process, also for a workload at a relative path."""
    rows = [
        {
            "timestamp": time,
            "input_length": 900,
            "output_length": 3,
            "hash_ids": [time % 3, 10 + time % 3],
        }
        for time in range(9)
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    toml = SMALL.replace('["zipf', '["mine.jsonl", "zipf').replace("[160", "[2, 160")
    assert sweep(toml, "ray.csv") == sweep(toml, "here.csv", None)


def test_routers_are_swept_on_a_cluster(sweep):
    """A sweep of routers and fleets gives the same table on a cluster as in one process."""
    toml = """workload = "zipf:requests=60,prefixes=4"
replicas = [2, [{blocks = 90}, {count = 2, device = "h200"}]]
router = ["round-robin", "least-requests"]
fail = "replica=1,at=0.1,for=0.1"
"""
    assert sweep(toml, "ray.csv") == sweep(toml, "here.csv", None)


def test_the_cell_of_a_killed_worker_is_run_again_on_a_cluster(sweep, tmp_path):
    """The cell of a killed worker is run again, and the table is the same as without kills."""
    toml = SMALL.replace('"lru"', f'"mortal:seen={tmp_path}/seen"')
    killed = sweep(toml, "killed.csv")
    assert (tmp_path / "seen").exists(), "a worker was killed"
    assert killed == sweep(toml, "whole.csv", None)
    assert b"SIGKILL" not in killed


def test_a_killed_sweep_on_a_cluster_gives_the_same_table(cluster, sweep, tmp_path):
    """A sweep on a cluster that is killed and resumed gives the table of one process."""
    address, env = cluster
    toml = SMALL.replace("requests=60", "requests=2000").replace("requests=40", "requests=900")
    (tmp_path / "sweep.toml").write_text(toml)
    arguments = ("sweep.toml", "--executor", f"ray:{address}", "--out", "killed.csv")
    process = subprocess.Popen(command(*arguments), cwd=tmp_path, env=env)
    wait_for(2, tmp_path / "killed.csv.journal", process)
    process.kill()
    process.wait()
    assert sweep(toml, "killed.csv") == sweep(toml, "whole.csv", None)
