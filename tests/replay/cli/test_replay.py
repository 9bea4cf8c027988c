"""Tests of `kvcore replay` of a trace: its report, its errors and its exit codes."""

import json
import subprocess
import sys
from functools import partial

import pytest
from helpers.commands import run_here
from helpers.traces import lines, record, serve

PROGRAM = "from kvcore_cli.main import main; main()"

run = partial(run_here, "replay")


@pytest.fixture
def trace(tmp_path):
    """Return the path of a recorded trace of 49 lines."""
    return record(tmp_path / "trace.jsonl")


def test_json_is_alone_on_stdout(trace):
    """As a process, `replay --json` prints one document with exactly the documented fields."""
    command = [sys.executable, "-c", PROGRAM, "replay", trace, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(report) == [
        *("schema", "command", "file", "complete", "lines", "events", "pool"),
        *("requests", "finished", "rejected", "preemptions", "evictions"),
        *("hit", "tiers", "header"),
    ]
    assert (report["schema"], report["file"], report["lines"]) == (1, str(trace), 49)
    assert report["header"] == lines(trace)[0]
    assert report["pool"] == {"free": 3, "cached": 5, "private": 0, "spans": 2}
    assert report["evictions"]["blocks"] == 6
    assert len(report["evictions"]["digest"]) == 64


def test_the_report_is_a_table_and_the_setup(trace):
    """Without `--json` the report is a table, and the setup of the run below it."""
    done = run(trace)
    table, _, setup = done.stdout.partition("\n\n")
    rows = dict(line.rsplit(maxsplit=1) for line in table.splitlines()[2:])
    assert " ".join(setup.split()).startswith(
        "Setup: kvcore 0.1.0 without a clock; 8 blocks of"
    )
    assert "eviction lru; prefix radix" in " ".join(setup.split())
    assert done.returncode == 0
    assert (rows["lines"], rows["blocks cached"], rows["  EVICT"]) == ("49", "5", "5")
    assert rows["hit ratio by block"] == "29.4%"


def test_preemptions_have_a_row_for_each_kind(tmp_path):
    """The table has a row for each kind of preemption, and none if there were none."""
    done = run(serve(tmp_path / "served.jsonl"))
    assert done.returncode == 0
    assert [line.split() for line in done.stdout.splitlines() if "preempted" in line] == [
        ["preempted", "by", "pause", "1"],
        ["preempted", "by", "recompute", "1"],
    ]
    assert "preempted" not in run(record(tmp_path / "untimed.jsonl")).stdout


def test_an_incomplete_file_exits_1_after_its_report(trace):
    """The readable part of a cut file is reported, and the error states where it is cut."""
    trace.write_bytes(trace.read_bytes()[:-100])
    done = run(trace, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["complete"], report["lines"]) == (1, False, 48)
    message = f"kvcore: error: {trace}: incomplete: the file ends inside line 49\n"
    assert done.stderr == message
