"""Tests of `kvcore whatif`, which runs a trace again."""

import json

import pytest
from helpers.commands import run_here as run

from kvcore import read_events

WORKLOAD = "zipf:requests=120,prefixes=12,rate=2000,prefix_tokens=320,suffix_tokens=64"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a trace of `compare` and one of `simulate`."""
    folder = tmp_path_factory.mktemp("traces")
    compared = ["compare", WORKLOAD, "--eviction", "lru", "--blocks", 150, "--trace", "u.jsonl"]
    assert run(*compared, cwd=folder).returncode == 0
    simulated = ["simulate", WORKLOAD, "--blocks", 300, "--trace", "m.jsonl.gz", "--seed", 3]
    assert run(*simulated, cwd=folder).returncode == 0
    return folder


def test_the_table_has_both_runs_and_the_changed_options(folder):
    """The table has both runs, the changed options, and the requests that gained most hits."""
    done = run("whatif", "m.jsonl.gz", "--eviction", "lfu", "--blocks", 400, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "zipf: 120 requests of m.jsonl.gz." in lines
    assert "blocks: 400 instead of 300" in lines
    assert "eviction: lfu:half_life=300.0,unit=s instead of lru" in lines
    names = {line.split("  ")[0] for line in lines}
    assert {"hit ratio by block", "TTFT, mean", "goodput, requests/s", "rejected"} <= names
    assert "gained hits" in names


def test_replay_still_asks_what_if_with_a_notice(folder):
    """`replay` with an option of `whatif` prints what that prints, and a notice on stderr."""
    options = ("m.jsonl.gz", "--eviction=lfu")
    former, present = (run(verb, *options, cwd=folder) for verb in ("replay", "whatif"))
    assert (former.returncode, former.stdout) == (0, present.stdout)
    assert former.stderr == (
        "kvcore: to run a trace again with other options is `kvcore whatif` now; use that\n"
    )


@pytest.mark.parametrize("recorded", ["rate=20", "rate=2000"])
def test_either_run_that_is_saturated_is_marked(tmp_path, recorded):
    """The report begins with each run whose queue grows; its times are marked, in JSON too."""
    workload = WORKLOAD.replace("rate=2000", recorded).replace("=120", "=400")
    trace = ("--blocks", 900, "--no-search", "--trace", "t.jsonl", "--device", "a10")
    run("simulate", workload, *trace, cwd=tmp_path)
    asked = ("t.jsonl", "--rate-scale", 1 if recorded == "rate=2000" else 100)
    done = run("whatif", *asked, cwd=tmp_path)
    document = json.loads(run("whatif", *asked, "--json", cwd=tmp_path).stdout)
    both = recorded == "rate=2000"
    was, now = (document[name]["saturation"] for name in ("recorded", "rerun"))
    assert (was["saturated"], now["saturated"]) == (both, True)
    first, *_ = done.stdout.splitlines()
    name = "recorded" if both else "what if"
    assert first.startswith(f"SATURATED, {name}: zipf asks for at least ")
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("TTFT, mean"))
    assert row.count("*") == 1 + both


def test_retention_is_added_and_removed(folder, tmp_path):
    """`--retention` adds a policy to a run, and `none` removes it; the output names both."""
    exported = ("--export", str(tmp_path / "b.jsonl"))
    done = run("whatif", "m.jsonl.gz", "--retention", "knorm:budget=64", *exported, cwd=folder)
    assert "retention: knorm:budget=64" in done.stdout
    assert " instead of none" in done.stdout
    assert "tokens forgotten" in done.stdout
    done = run("whatif", "b.jsonl", "--retention", "none", cwd=tmp_path)
    assert "retention: none instead of knorm:budget=64" in done.stdout


def test_json_is_alone_on_stdout(folder):
    """`--json` prints one document of both runs, their configurations and changed requests."""
    done = run("whatif", "m.jsonl.gz", "--scheduler", "srpt", "--json", cwd=folder)
    document = json.loads(done.stdout)
    assert (done.returncode, done.stderr, document["schema"]) == (0, "", 1)
    assert list(document) == [
        *("schema", "command", "file", "kvcore", "workload", "timed"),
        *("recorded", "rerun", "changes"),
    ]
    recorded, rerun = document["recorded"], document["rerun"]
    assert recorded["config"]["scheduler"]["name"] == "fcfs"
    assert rerun["config"]["scheduler"]["name"] == "srpt"
    assert recorded.keys() == rerun.keys()
    for change in document["changes"]:
        assert change.keys() == {"id", "prompt", "recorded", "rerun"}
        assert change["recorded"] != change["rerun"]


def test_the_recorded_figures_are_those_of_the_simulation(folder):
    """The figures of a trace, and of its trace run again, are those of the simulation."""
    options = ["--blocks", 300, "--json"]
    simulated = json.loads(run("simulate", WORKLOAD, "--seed", 3, *options).stdout)
    again = json.loads(run("whatif", "m.jsonl.gz", *options, cwd=folder).stdout)
    for name in ("ttft_s", "e2e_s", "hit", "goodput", "evicted_blocks", "preemptions"):
        assert again["recorded"][name] == again["rerun"][name] == simulated[name]
    assert again["changes"] == []


def test_options_of_simulate_change_the_header(folder, tmp_path):
    """Options of batching, the rate and the SLO change the header of the exported trace."""
    new = tmp_path / "new.jsonl"
    caps = ["--max-tokens", 512, "--max-seqs", 4, "--steps", "prefill-first", "--no-chunked"]
    more = ["--watermark", 0.2, "--rate-scale", 2, "--slo", "ttft=1"]
    done = run("whatif", folder / "m.jsonl.gz", *caps, *more, "--export", new)
    assert done.returncode == 0
    header = next(iter(read_events(new))).as_dict()
    assert header["batching"] == {
        "max_tokens": 512,
        "max_seqs": 4,
        "chunked": False,
        "steps": "prefill-first",
        "watermark": 0.2,
    }
    assert (header["rate_scale"], header["slo"]) == (2.0, {"ttft": 10**9})


@pytest.mark.parametrize("verb", ["compare", "simulate"])
def test_a_trace_as_a_workload_has_the_recorded_results(folder, verb):
    """The workload `trace:FILE` has the requests and the results of the recorded one."""
    options = ["--eviction", "lru", "--blocks", 300, "--json"]
    named, direct = (
        json.loads(run(verb, workload, *options, cwd=folder).stdout)
        for workload in ("trace:m.jsonl.gz", f"{WORKLOAD},seed=3")
    )
    if verb == "compare":
        assert named["workload"]["digest"] == direct["workload"]["digest"]
        assert named["rows"][0]["hit_blocks"] == direct["rows"][0]["hit_blocks"]
    else:
        assert named["hit"] == direct["hit"]
        assert named["e2e_s"] == direct["e2e_s"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--scheduler", "fcfs"], 2, "was recorded without a clock: it has no scheduler"),
        (["--max-seqs", "3"], 2, "was recorded without a clock: it has no max_seqs"),
        (["--export", "no/where.jsonl"], 2, "cannot write the trace no/where.jsonl"),
    ],
)
def test_invalid_options_are_refused(folder, options, code, message):
    """An invalid option is an error with exit code 2, an empty stdout and no file."""
    before = sorted(path.name for path in folder.iterdir())
    done = run("whatif", "u.jsonl", *options, cwd=folder)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == before
