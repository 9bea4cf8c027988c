"""`--prometheus` and `--residency`: where metrics go, and what is refused."""

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
    """Return a function that runs the command line: exit code, stdout, stderr."""

    def command(*arguments):
        code = frame.run([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    return command


@pytest.fixture
def loop(tmp_path):
    """Return a file in which ten prompts of 3 blocks come round six times."""
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
    """Return the names of the metrics in a text that Prometheus' parser reads."""
    return {family.name for family in text_string_to_metric_families(text)}


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_beside_the_document(verb, run, tmp_path):
    """Stdout has one JSON document, the file what it says in Prometheus' words."""
    file = tmp_path / "run.prom"
    code, out, err = run(*VERBS[verb], "--json", "--prometheus", file)
    assert (code, err, json.loads(out)["schema"]) == (0, "", 1)
    found = families(file.read_text())
    assert {"kvcore_prefix_cache_hit_blocks", "kvcore_kv_block_lifetime_seconds"} <= found
    assert [path.name for path in tmp_path.iterdir()] == ["run.prom"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_dash_prints_the_metrics_and_nothing_else(verb, run):
    """They can be piped."""
    code, out, err = run(*VERBS[verb], "--prometheus", "-")
    assert (code, err) == (0, "")
    assert all(
        line.startswith(("# HELP kvcore_", "# TYPE", "kvcore_")) for line in out.splitlines()
    )
    assert "kvcore_kv_block_lifetime_seconds" in families(out)


@pytest.mark.parametrize("verb", VERBS)
def test_one_document_at_a_time_goes_to_stdout(verb, run):
    """JSON and metrics cannot both."""
    code, out, err = run(*VERBS[verb], "--json", "--prometheus", "-")
    assert (code, out) == (2, "")
    assert "--json and --prometheus -" in err


@pytest.mark.parametrize("verb", VERBS)
def test_equal_runs_have_equal_metrics(verb, run):
    """No wall time is among them."""
    assert run(*VERBS[verb], "--prometheus", "-") == run(*VERBS[verb], "--prometheus", "-")


def test_a_file_that_another_option_writes_is_refused(run, tmp_path):
    """Before anything runs; no file is left."""
    file = tmp_path / "same"
    code, out, err = run(*VERBS["simulate"], "--trace", file, "--prometheus", file)
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert "--trace and --prometheus name the same file" in err


def test_a_folder_that_is_not_there_is_refused_before_the_run(run, tmp_path):
    """The error names the file."""
    code, out, err = run(*VERBS["compare"], "--prometheus", tmp_path / "no" / "file")
    assert (code, out) == (2, "")
    assert "no/file" in err


def test_without_the_package_nothing_runs(run, tmp_path, monkeypatch):
    """Exit code 3, and what to install."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    code, out, err = run(*VERBS["simulate"], "--prometheus", tmp_path / "run.prom")
    assert (code, out, list(tmp_path.iterdir())) == (3, "", [])
    assert "pip install 'kvcore[prometheus]'" in err


def test_contiguous_memory_has_metrics_too(run):
    """Of the run before paging, in which no block rests."""
    code, out, _ = run(*VERBS["simulate"], "--allocation", "contiguous", "--prometheus", "-")
    assert code == 0
    assert "kvcore_time_to_first_token_seconds" in families(out)
    assert "kvcore_kv_block_lifetime_seconds" not in families(out)


def test_residency_of_a_comparison(run, loop):
    """A second table, and a sentence for what thrashes; the JSON has it by row and tier."""
    command = ("compare", loop, "--eviction", "lru,mru", "--blocks", "20", "--residency")
    code, out, err = run(*command)
    assert (code, err) == (0, "")
    told = " ".join(out.split())
    assert "age at eviction" in told
    assert "lru, 20 blocks: THRASHING (gpu): 100% of the 160 blocks evicted" in told
    assert "mru, 20 blocks" not in told
    rows = json.loads(run(*command, "--json")[1])["rows"]
    assert [row["residency"]["gpu"]["thrashing"] for row in rows] == [True, False]


def test_a_simulation_says_that_it_thrashes(run, loop):
    """Below the table of blocks at rest; one that does not says nothing."""
    command = ("simulate", loop, "--block-size", "512", "--blocks")
    told = " ".join(run(*command, "20")[1].split())
    assert "THRASHING (gpu)" in told
    assert "--blocks 40" in told
    assert "THRASHING" not in run(*command, "40")[1]
