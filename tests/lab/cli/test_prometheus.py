"""Tests of `--prometheus` and `--residency`: where metrics are written, and their errors."""

from __future__ import annotations

import json
import sys

import pytest
from helpers.commands import error_of, json_of, stdout_of
from helpers.rows import write_rows
from prometheus_client.parser import text_string_to_metric_families

SMALL = "zipf:requests=60,prefixes=6,prefix_tokens=64,suffix_tokens=32,output_tokens=8"
VERBS = {
    "simulate": ["simulate", SMALL, "--blocks", "40"],
    "compare": ["compare", SMALL, "--eviction", "lru,optimum", "--blocks", "8,20"],
}


@pytest.fixture
def loop(tmp_path):
    """Return a file of requests in which ten prompts of 3 blocks are repeated six times."""
    rows = (
        {
            "timestamp": 1000 * index,
            "input_length": 1536,
            "output_length": 1,
            "hash_ids": [index % 10 * 10 + place for place in range(3)],
        }
        for index in range(60)
    )
    file = tmp_path / "loop.jsonl"
    return write_rows(file, *rows)


def families(text):
    """Return the names of the metrics that Prometheus' parser finds in a text."""
    return {family.name for family in text_string_to_metric_families(text)}


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_of_metrics_is_written_beside_the_document(verb, tmp_path):
    """`--prometheus FILE` writes metrics to the file, and `--json` its document to stdout."""
    file = tmp_path / "run.prom"
    out = stdout_of(*VERBS[verb], "--json", "--prometheus", file)
    assert json.loads(out)["schema"] == 1
    found = families(file.read_text())
    assert {"kvcore_prefix_cache_hit_blocks", "kvcore_kv_block_lifetime_seconds"} <= found
    assert [path.name for path in tmp_path.iterdir()] == ["run.prom"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_dash_prints_the_metrics_and_nothing_else(verb):
    """`--prometheus -` prints the metrics on stdout, and nothing else."""
    out = stdout_of(*VERBS[verb], "--prometheus", "-")
    assert all(
        line.startswith(("# HELP kvcore_", "# TYPE", "kvcore_")) for line in out.splitlines()
    )
    assert "kvcore_kv_block_lifetime_seconds" in families(out)


def test_without_the_package_nothing_runs(tmp_path, monkeypatch):
    """Without prometheus_client the exit code is 3, with what to install and no file."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    err = error_of(*VERBS["simulate"], "--prometheus", tmp_path / "run.prom", code=3)
    assert not list(tmp_path.iterdir())
    assert "pip install 'kvcore[prometheus]'" in err


def test_a_comparison_prints_residency_and_thrashing(loop):
    """`compare --residency` prints ages at eviction and a warning for rows that thrash.

    The JSON document has them by row and tier.
    """
    command = ("compare", loop, "--eviction", "lru,mru", "--blocks", "20", "--residency")
    printed = " ".join(stdout_of(*command).split())
    assert "age at eviction" in printed
    assert "lru, 20 blocks: THRASHING (gpu): 100% of the 160 blocks evicted" in printed
    assert "mru, 20 blocks" not in printed
    rows = json_of(*command)["rows"]
    assert [row["residency"]["gpu"]["thrashing"] for row in rows] == [True, False]


def test_a_simulation_that_thrashes_prints_a_warning(loop):
    """`simulate` prints a warning and a larger pool size if the pool thrashes."""
    command = ("simulate", loop, "--block-size", "512", "--blocks")
    printed = " ".join(stdout_of(*command, "20").split())
    assert "THRASHING (gpu)" in printed
    assert "--blocks 40" in printed
    assert "THRASHING" not in stdout_of(*command, "40")
