"""Tests of `--drafter` in `run`, `simulate`, `replay` and sweeps, and of `--acceptance`."""

import json

import orjson
import pytest
from helpers.commands import run_here as run

DRAFTS = "acceptance:tokens=3,probability=0.8"
SMALL = "zipf:requests=20,prefixes=3,prefix_tokens=64,suffix_tokens=32,output_tokens=48"


def decisions(path):
    """Return the lines of a trace between its header and END."""
    return path.read_bytes().splitlines()[1:-1]


def test_simulate_reports_the_drafter_and_its_results(tmp_path):
    """The table, the JSON document and the trace's header have the drafter or its results."""
    words = ("simulate", SMALL, "--drafter", DRAFTS)
    shown = run(*words, cwd=tmp_path).stdout
    assert "accepted," in shown
    assert "times as fast as without" in shown
    document = json.loads(run(*words, "--json", "--trace", "t.jsonl", cwd=tmp_path).stdout)
    assert document["drafts"]["tokens_per_step"] > 2
    assert document["config"]["plugins"]["drafter"]["name"] == "acceptance"
    header = orjson.loads((tmp_path / "t.jsonl").read_bytes().splitlines()[0])
    assert header["plugins"]["drafter"]["options"]["tokens"] == 3
    assert header["plugins"]["drafter"]["options"]["probability"] == 0.8


def test_a_drafter_is_set_in_toml_and_removed_by_a_flag(tmp_path):
    """TOML names a drafter as a table or as text, and `--drafter none` overrides it."""
    (tmp_path / "a.toml").write_text(f'workload = "{SMALL}"\ndrafter = "{DRAFTS}"\n')
    table = (
        f'workload = "{SMALL}"\n[drafter]\nname = "acceptance"\ntokens = 3\nprobability = 0.8\n'
    )
    (tmp_path / "b.toml").write_text(table)
    found = [
        json.loads(run("simulate", "--config", name, "--json", cwd=tmp_path).stdout)["drafts"]
        for name in ("a.toml", "b.toml")
    ]
    assert found[0] == found[1]
    plain = run("simulate", "--config", "a.toml", "--drafter", "none", "--json", cwd=tmp_path)
    assert "drafts" not in json.loads(plain.stdout)


def test_a_simulation_with_a_runs_drafts_has_equal_decisions(tmp_path):
    """A simulation with the drafts that a run accepted takes the same decisions."""
    pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
    shared = ("--latency", "linear", "--seed", "3", "--max-seqs", "6", "--blocks", "90")
    computed = (
        "--acceptance",
        "a.jsonl",
        "--limit",
        "0",
        "--shrink",
        "1",
        "--trace",
        "r.jsonl",
    )
    done = run("run", SMALL, *computed, "--drafter", "prompt-lookup", *shared, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    drafter = ("--drafter", "acceptance:file=a.jsonl")
    done = run("simulate", SMALL, *drafter, *shared, "--trace", "s.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert decisions(tmp_path / "r.jsonl") == decisions(tmp_path / "s.jsonl")
    assert b"rollback" in (tmp_path / "s.jsonl").read_bytes()


def test_a_file_of_drafts_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    """`--acceptance` in a folder that there is not fails before anything is computed."""
    pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
    words = ("--drafter", "prompt-lookup", "--acceptance", "nowhere/a.jsonl")
    done = run("run", SMALL, *words, "--blocks", str(2**31 - 1), cwd=tmp_path)
    assert (done.returncode, "cannot write nowhere/a.jsonl" in done.stderr) == (2, True)


def test_replay_adds_and_removes_drafts(tmp_path):
    """`replay` runs a trace with drafts again to the same lines.

    `--drafter` removes the drafts of a trace, or adds them to one without.
    """
    words = ("simulate", SMALL, "--drafter", DRAFTS, "--trace", "t.jsonl")
    assert run(*words, cwd=tmp_path).returncode == 0
    done = run("whatif", "t.jsonl", "--export", "again.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert decisions(tmp_path / "t.jsonl") == decisions(tmp_path / "again.jsonl")
    plain = ("simulate", SMALL, "--trace", "plain.jsonl")
    assert run(*plain, cwd=tmp_path).returncode == 0
    without = ("whatif", "t.jsonl", "--drafter", "none", "--export", "without.jsonl")
    done = run(*without, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert decisions(tmp_path / "plain.jsonl") == decisions(tmp_path / "without.jsonl")
    more = ("whatif", "plain.jsonl", "--drafter", DRAFTS, "--export", "with.jsonl")
    assert run(*more, cwd=tmp_path).returncode == 0
    assert decisions(tmp_path / "t.jsonl") == decisions(tmp_path / "with.jsonl")


def test_a_drafter_is_an_axis_of_a_sweep(tmp_path):
    """A drafter is an axis of a sweep, and accepted drafts reduce the time per output token."""
    (tmp_path / "s.toml").write_text(
        f'workload = "{SMALL}"\nblocks = 500\ndrafter = ["none", "{DRAFTS}"]\n'
    )
    done = run("sweep", "s.toml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["drafter"] for row in rows] == [None, DRAFTS]
    assert rows[1]["tpot_s_mean"] < rows[0]["tpot_s_mean"] / 2
