"""Tests of `--prometheus` and `--residency`: where metrics are written, and their errors."""

from __future__ import annotations

import json
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcore.cli import main as frame

SMALL = "zipf:requests=60,prefixes=6,prefix_tokens=64,suffix_tokens=32,output_tokens=8"
VERBS = {
    "simulate": ["simulate", SMALL, "--blocks", "40"],
    "compare": ["compare", SMALL, "--eviction", "lru,optimum", "--blocks", "8,20"],
}


@pytest.fixture
def run(capsys):
    """Return a function that runs kvcore: exit code, stdout and stderr."""

    def command(*arguments):
        code = frame.run([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    return command


@pytest.fixture
def loop(tmp_path):
    """Return a file of requests in which ten prompts of 3 blocks are repeated six times."""
    rows = (
        {
            "timestamp": 1000 * number,
            "input_length": 1536,
            "output_length": 1,
            "hash_ids": [number % 10 * 10 + place for place in range(3)],
        }
        for number in range(60)
    )
    file = tmp_path / "loop.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def families(text):
    """Return the names of the metrics that Prometheus' parser finds in a text."""
    return {family.name for family in text_string_to_metric_families(text)}


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_of_metrics_is_written_beside_the_document(verb, run, tmp_path):
    """`--prometheus FILE` writes metrics to the file, and `--json` its document to stdout."""
    file = tmp_path / "run.prom"
    code, out, err = run(*VERBS[verb], "--json", "--prometheus", file)
    assert (code, err, json.loads(out)["schema"]) == (0, "", 1)
    found = families(file.read_text())
    assert {"kvcore_prefix_cache_hit_blocks", "kvcore_kv_block_lifetime_seconds"} <= found
    assert [path.name for path in tmp_path.iterdir()] == ["run.prom"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_dash_prints_the_metrics_and_nothing_else(verb, run):
    """`--prometheus -` prints the metrics on stdout, and nothing else."""
    code, out, err = run(*VERBS[verb], "--prometheus", "-")
    assert (code, err) == (0, "")
    assert all(
        line.startswith(("# HELP kvcore_", "# TYPE", "kvcore_")) for line in out.splitlines()
    )
    assert "kvcore_kv_block_lifetime_seconds" in families(out)


@pytest.mark.parametrize("verb", VERBS)
def test_json_and_metrics_cannot_both_go_to_stdout(verb, run):
    """`--json` and `--prometheus -` together are an error."""
    code, out, err = run(*VERBS[verb], "--json", "--prometheus", "-")
    assert (code, out) == (2, "")
    assert "--json and --prometheus - both print a document" in err


@pytest.mark.parametrize("verb", VERBS)
def test_equal_runs_have_equal_metrics(verb, run):
    """Equal runs print equal metrics, since no wall time is among them."""
    assert run(*VERBS[verb], "--prometheus", "-") == run(*VERBS[verb], "--prometheus", "-")


def test_a_file_that_another_option_writes_is_refused(run, tmp_path):
    """The same file for `--trace` and `--prometheus` is an error before the run."""
    file = tmp_path / "same"
    code, out, err = run(*VERBS["simulate"], "--trace", file, "--prometheus", file)
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert "--trace and --prometheus name the same file" in err


def test_a_missing_folder_is_refused_before_the_run(run, tmp_path):
    """A file in a missing folder is an error that names the file."""
    code, out, err = run(*VERBS["compare"], "--prometheus", tmp_path / "no" / "file")
    assert (code, out) == (2, "")
    assert f"cannot write {tmp_path}/no/file: No such file or directory" in err


def test_without_the_package_nothing_runs(run, tmp_path, monkeypatch):
    """Without prometheus_client the exit code is 3, with what to install and no file."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    code, out, err = run(*VERBS["simulate"], "--prometheus", tmp_path / "run.prom")
    assert (code, out, list(tmp_path.iterdir())) == (3, "", [])
    assert "pip install 'kvcore[prometheus]'" in err


def test_contiguous_memory_has_metrics(run):
    """A run with contiguous allocation has metrics of latencies and none of block lifetimes."""
    code, out, _ = run(*VERBS["simulate"], "--allocation", "contiguous", "--prometheus", "-")
    assert code == 0
    assert "kvcore_time_to_first_token_seconds" in families(out)
    assert "kvcore_kv_block_lifetime_seconds" not in families(out)


def test_a_comparison_prints_residency_and_thrashing(run, loop):
    """`compare --residency` prints ages at eviction and a warning for rows that thrash.

    The JSON document has them by row and tier.
    """
    command = ("compare", loop, "--eviction", "lru,mru", "--blocks", "20", "--residency")
    code, out, err = run(*command)
    assert (code, err) == (0, "")
    printed = " ".join(out.split())
    assert "age at eviction" in printed
    assert "lru, 20 blocks: THRASHING (gpu): 100% of the 160 blocks evicted" in printed
    assert "mru, 20 blocks" not in printed
    rows = json.loads(run(*command, "--json")[1])["rows"]
    assert [row["residency"]["gpu"]["thrashing"] for row in rows] == [True, False]


def test_a_simulation_that_thrashes_prints_a_warning(run, loop):
    """`simulate` prints a warning and a larger pool size if the pool thrashes."""
    command = ("simulate", loop, "--block-size", "512", "--blocks")
    printed = " ".join(run(*command, "20")[1].split())
    assert "THRASHING (gpu)" in printed
    assert "--blocks 40" in printed
    assert "THRASHING" not in run(*command, "40")[1]
