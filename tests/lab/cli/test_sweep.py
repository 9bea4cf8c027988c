"""Tests of `kvcore sweep`: what it prints and writes, and its resumption after a kill."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from helpers.sweeps import SMALL, command, finished, install_mortal, run, wait_for

from kvcore.config import RunConfig
from kvcore.config.options import option_named
from kvcore_cli import main as frame
from kvcore_lab.sweep.grid import axes_of

pytestmark = pytest.mark.slow

LONG = """mode = "compare"
workload = "zipf:requests=4000"
eviction = ["lru", "lfu", "fifo", "slru"]
blocks = [1000, 3000, 5859]
jobs = 2
"""
"""A sweep of 12 cells that runs long enough to be killed in between."""


@pytest.fixture
def sweep(tmp_path, capsys, monkeypatch):
    """Return a function that sweeps a TOML text in this process: code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def invoke(toml, *flags):
        (tmp_path / "sweep.toml").write_text(toml)
        code = frame.run(["sweep", "sweep.toml", *map(str, flags)])
        return code, *capsys.readouterr()

    return invoke


@pytest.fixture
def refusal(sweep, tmp_path):
    """Return a function that runs a failing sweep and returns stderr.

    It requires that no file is added.
    """

    def invoke(toml, *flags, code=2):
        found, out, err = sweep(toml, *flags)
        assert (found, out) == (code, "")
        assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]
        return err

    return invoke


def test_json_is_alone_on_stdout(tmp_path):
    """As a process, `--json` prints one document, which is the same from a finished journal."""
    (tmp_path / "sweep.toml").write_text(SMALL)
    documents = []
    for _ in range(2):
        done = run("sweep.toml", "--json", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        documents.append(done.stdout)
    assert documents[0] == documents[1]
    document = json.loads(documents[0])
    assert [document[key] for key in ("schema", "mode", "cells", "failed")] == [
        *(1, "compare", 12, 0)
    ]
    assert (tmp_path / "sweep-results" / "results.json").read_text() == documents[0]


def test_the_best_policies_are_printed(sweep):
    """The table has a row for each workload and pool size; the last line names the file."""
    code, out, _ = sweep(SMALL, "--out", "all.csv")
    assert code == 0
    first, *lines = out.splitlines()
    assert first.startswith("12 cells (2 x workload, 2 x blocks, 3 x eviction), replayed")
    rows = [line.split() for line in lines if line.startswith("zipf")]
    assert [row[1] for row in rows] == ["160", "400", "160", "400"]
    assert lines[-1] == "All rows: all.csv."


def test_defaults_of_a_cell_are_those_of_simulate():
    """The defaults of a cell are the defaults of `kvcore simulate`."""
    given = frame.loaded_verb("simulate").make_context("simulate", []).params
    for name in set(axes_of("simulate")) - {"workload"}:
        # An option that may be repeated has the value None if it is not given.
        assert getattr(RunConfig(), name) == (
            given[name] or () if option_named(name).multiple else given[name]
        )
    assert given["workload"] is given["tier"] is None


def test_plugins_may_be_tables(sweep):
    """A policy may be a TOML table of its name and options, and so may the optimum."""
    toml = """mode = "compare"
workload = "zipf:requests=9"
blocks = 9
[[eviction]]
name = "lfu"
half_life = 3
[[eviction]]
name = "optimum"
bypass = true
"""
    _, out, err = sweep(toml, "--json")
    assert err == ""
    rows = json.loads(out)["rows"]
    assert [row["eviction"] for row in rows] == ["lfu:half_life=3", "optimum:bypass=true"]


def test_paths_are_relative_to_the_file(tmp_path, capsys):
    """The path of a workload is relative to the file, and the results are written beside it."""
    row = {"timestamp": 0, "input_length": 50, "output_length": 3, "hash_ids": [1]}
    (tmp_path / "m.jsonl").write_text(json.dumps(row))
    (tmp_path / "s-3.1.toml").write_text('mode = "compare"\nworkload = "m.jsonl"\nblocks = 9\n')
    assert frame.run(["sweep", str(tmp_path / "s-3.1.toml"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["rows"]
    assert found["requests"] == 1
    assert (tmp_path / "s-3.1-results" / "results.csv").exists()


def test_a_simulated_sweep_has_times(sweep):
    """A sweep of simulations has a row for each cell, with latencies and goodput."""
    toml = """workload = "zipf:requests=30,prefixes=3"
scheduler = ["fcfs", "srpt"]
device = ["a100-80g", "h100"]
memory = ["8GiB", "16GiB"]
slo = ["ttft=1,tpot=0.05", "none"]
"""
    code, out, _ = sweep(toml, "--json", "--jobs", 2)
    rows = json.loads(out)["rows"]
    assert (code, len(rows)) == (0, 16)
    assert all(row["completed"] == 30 for row in rows)
    assert {row["slo"] for row in rows if row["goodput"] is None} == {"none"}
    assert rows[0]["ttft_s_mean"] > rows[8]["ttft_s_mean"], "an H100 is faster"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of results of a long sweep that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "whole.toml").write_text(LONG)
    done = run("whole.toml", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "whole-results"


def test_a_killed_sweep_gives_the_same_table(tmp_path, whole):
    """A sweep that is killed and resumed, twice, gives the table of an uninterrupted one.

    No finished cell is run again.
    """
    (tmp_path / "whole.toml").write_text(LONG)
    results = tmp_path / "whole-results"
    journal = results / "journal.jsonl"
    deaths = 0
    for enough in (3, 11):
        process = subprocess.Popen(
            command("whole.toml"), cwd=tmp_path, stdout=subprocess.DEVNULL
        )
        wait_for(enough, journal, process)
        process.kill()
        deaths += process.wait() == -signal.SIGKILL
    assert deaths, "each sweep was faster than its killer"
    done = run("whole.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("results.csv", "results.json"):
        assert (results / name).read_bytes() == (whole / name).read_bytes()
    cells = [
        line.split('"')[3] for line in journal.read_text().splitlines() if '"cell"' in line
    ]
    assert len(cells) == len(set(cells)) == 12


def test_the_cell_of_a_damaged_journal_line_is_run_again(sweep, tmp_path):
    """The cell of a damaged journal line is run again, with a notice and the same table."""
    two = """mode = "compare"
workload = "zipf:requests=9"
eviction = ["lru", "lfu"]
blocks = 50
jobs = 1
"""
    journal = tmp_path / "all.csv.journal"
    sweep(two, "--out", "all.csv")
    table = (tmp_path / "all.csv").read_bytes()
    lines = journal.read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace('"hit_blocks":', '"hit_blocks":1')
    journal.write_text("".join(lines))
    code, _, err = sweep(two, "--out", "all.csv")
    assert (code, (tmp_path / "all.csv").read_bytes()) == (0, table)
    assert err == (
        "kvcore: all.csv.journal:2: does not match its digest: its cell is run again, "
        "unless a later line has it\n"
    )
    assert finished(journal) == 3


@pytest.mark.usefixtures("unmeasured_processes")
def test_ctrl_c_keeps_finished_cells(tmp_path):
    """Ctrl-C exits with code 130, two messages and no traceback, and leaves no process."""
    (tmp_path / "s.toml").write_text(LONG)
    journal = tmp_path / "s-results" / "journal.jsonl"
    process = subprocess.Popen(
        command("s.toml"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(1, journal, process)
    process.send_signal(signal.SIGINT)
    # stderr is closed when the last process that inherited it ends.
    _, err = process.communicate()
    assert process.returncode == 130
    assert err.splitlines() == [
        "kvcore: what is finished is in s-results/journal.jsonl; run it again to go on",
        "kvcore: interrupted",
    ]


def test_the_cell_of_a_killed_worker_is_run_again(tmp_path):
    """The cell of a killed worker is run again, and the table is the same as without kills."""
    env = install_mortal(tmp_path / "site")
    toml = SMALL.replace('"lru"', f'"mortal:seen={tmp_path}/seen"')
    for name in ("killed", "whole"):
        (tmp_path / f"{name}.toml").write_text(toml)
        done = run(f"{name}.toml", "--out", f"{name}.csv", cwd=tmp_path, env=env)
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "seen").exists()
    assert (tmp_path / "killed.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_a_cell_that_kills_its_worker_fails_alone(tmp_path):
    """A cell that kills its worker three times fails with the reason, and the others finish.

    The exit code is 1.
    """
    env = install_mortal(tmp_path / "site")
    toml = SMALL.replace('"lru"', '"mortal"').replace("[160, 400]", "160")
    (tmp_path / "s.toml").write_text(toml)
    done = run("s.toml", "--json", cwd=tmp_path, env=env)
    assert done.returncode == 1
    document = json.loads(done.stdout)
    failed = [row for row in document["rows"] if row["error"] is not None]
    assert (document["cells"], document["failed"], len(failed)) == (6, 2, 2)
    assert {row["eviction"] for row in failed} == {"mortal"}
    assert "its worker died 3 times, at last by SIGKILL" in failed[0]["error"]
    first, *_, last = done.stderr.splitlines()
    assert "failed: workload zipf:requests=60,prefixes=4, eviction mortal: " in first
    assert last == "kvcore: the same command tries the failed cells again"


def test_a_sweep_of_which_all_cells_fail_says_why(sweep, tmp_path):
    """Without an axis that was given, the table has no columns: it is left out."""
    row = {"timestamp": 0, "input_length": "long", "output_length": 3, "hash_ids": [1]}
    (tmp_path / "cut.jsonl").write_text(json.dumps(row))
    code, out, err = sweep(f'workload = "mooncake:path={tmp_path}/cut.jsonl"\n')
    assert code == 1
    assert out.startswith("1 cell, simulated. 1 cell failed.\n\nSetup: ")
    assert "failed: " in err
    assert "input_length" in err


def test_a_second_sweep_on_a_running_journal_is_refused(tmp_path):
    """A second sweep on the journal of a running one is an error that names the process."""
    (tmp_path / "s.toml").write_text(LONG)
    journal = tmp_path / "s-results" / "journal.jsonl"
    process = subprocess.Popen(command("s.toml"), cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for(1, journal, process)
    process.send_signal(signal.SIGSTOP)
    try:
        done = run("s.toml", cwd=tmp_path)
    finally:
        process.kill()
        process.wait()
    assert (done.returncode, done.stdout) == (2, "")
    assert f"process {process.pid} is using it" in done.stderr


@pytest.mark.parametrize(
    ("toml", "reason"),
    [
        ("bloks = 3", "sweep.toml: there is no option 'bloks' (did you mean 'blocks'?)"),
        ("trace = 'a.jsonl'", "sweep.toml: there is no option 'trace'"),
        ("mode = 'compar'", "sweep.toml: mode: 'compar' is not one of"),
        ("mode = ['compare', 'simulate']", "sweep.toml: mode: 2 values were given"),
        ("jobs = [1, 2]", "sweep.toml: jobs: 2 values were given where one is needed"),
        ("mode = 'compare'", "sweep.toml: blocks: a sweep in mode 'compare' needs pools"),
        ("blocks = []", "sweep.toml: blocks: the list is empty"),
        (
            "blocks = [10, 'many']",
            "sweep.toml: blocks: expected a whole number, such as 8192, 8k or 1e5, not 'many'",
        ),
        ("blocks = 3\nmemory = '1GiB'", "both say how large the pool is"),
        ("block_size = [16, 48]", "sweep.toml: block_size: workload mooncake: block size 48"),
        ("eviction = ['lru', 'lfu:half=3']", "sweep.toml: eviction: eviction plugin 'lfu' has"),
        ("eviction = ['lru', 'optimum']", "sweep.toml: eviction: no eviction plugin is named"),
        ("mode = 'compare'\nscheduler = 'srpt'", "sweep.toml: scheduler: there is no such"),
        ("model = ['llama-3.1-8b', 'llama']", "sweep.toml: model: unknown model 'llama'"),
        ("workload = ['zipf', 'sweep.toml']", "sweep.toml: workload: sweep.toml: no known"),
        ("slo = ['ttft=3', 'tft=4']", "sweep.toml: slo: an SLO has no 'tft'"),
        ("executor = 'rai'", "executor 'rai' is not known; there are: local, ray, ray:"),
        ("jobs = 0", "jobs=0: give at least 1"),
        ("blocks = [", "sweep.toml: is not TOML: "),
    ],
)
def test_invalid_keys_and_values_are_refused_before_the_run(refusal, toml, reason):
    """The error for an invalid key or value names the file and the key; nothing is written."""
    error = refusal(toml)
    assert error.startswith("kvcore: error: sweep.toml: ")
    assert reason in error


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("table.txt", "a file that ends in .csv, .json, .parquet"),
        ("", "empty path"),
        ("nowhere/table.csv", "nowhere/table.csv.journal: cannot be written"),
        ("sweep.toml/results", "cannot be made a directory: Not a directory"),
    ],
)
def test_invalid_output_folders_are_refused(refusal, out, reason):
    """An invalid `--out` is an error before anything runs."""
    assert reason in refusal(SMALL, "--out", out)


def test_without_a_cluster_the_error_has_the_command_to_start_one(tmp_path):
    """Without a Ray cluster the exit code is 3, and the error has the command to start one."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    (tmp_path / "s.toml").write_text(SMALL)
    done = run("s.toml", "--executor", "ray:127.0.0.1:1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert "there is no Ray cluster at 127.0.0.1:1" in done.stderr
    assert "ray start --head" in done.stderr
