"""Tests of `kvcore replay` of a recording of KV events."""

import json
import os
from functools import partial

import pytest
from helpers.commands import as_process, run_here
from helpers.kv_events import DYNAMO, batch, record, removed, stored
from helpers.traces import record as record_trace

from kvcore_events.recording import RecordingWriter

run = partial(run_here, "replay")


@pytest.fixture
def recording(tmp_path):
    """Return the path of a complete recording: four blocks are stored and one is removed."""
    return record(
        tmp_path / "events.jsonl.gz",
        batch(stored(1, 2, 3, medium="GPU"), ts=1.0),
        batch(removed(3, medium="GPU"), stored(9, medium="CPU"), ts=2.0),
        engine="vllm 0.33",
    )


def test_the_table_counts_events_and_blocks(recording):
    """The table counts events and blocks, and the note below it states what events omit."""
    done = run(recording)
    table, _, remarks = done.stdout.partition("\n\n")
    rows = dict(line.rsplit(maxsplit=1) for line in table.splitlines()[2:])
    assert (done.returncode, done.stderr) == (0, "")
    assert (rows["batches"], rows["  BlockStored"], rows["blocks stored"]) == ("2", "2", "4")
    assert (rows["resident on GPU"], rows["resident on CPU"]) == ("2", "1")
    assert "a request that found its blocks leaves no event" in " ".join(remarks.split())


def test_json_is_alone_on_stdout(recording):
    """`--json` prints the report of `check_recording`, and nothing else."""
    done = run(recording, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (report["schema"], report["file"], report["complete"]) == (1, str(recording), True)
    assert (report["engine"], report["format"]) == ("vllm 0.33", "msgpack")
    assert report["resident"] == {"GPU": 2, "CPU": 1}


def test_gaps_restarts_and_garbage_have_rows(tmp_path):
    """Gaps, restarts, garbage and impossible events have rows of their own."""
    path = tmp_path / "events.jsonl"
    with RecordingWriter(path) as writer:
        writer.batch(batch(removed(7)), 0, 0)
        writer.gap(1, 2, 0)
        writer.invalid_message("two frames", 0)
        writer.restart(0)
        writer.gap(3, 1)
    rows = [" ".join(line.split()) for line in run(path).stdout.splitlines()]
    assert "missing from 0 batches 1 to 2" in rows
    assert "missing batches 3 to 3" in rows
    assert "restarts 1" in rows
    assert "garbage 1" in rows
    assert "removals of blocks that were not there 1" in rows
    assert "batch 0, event 0 block 7" in rows


@pytest.mark.parametrize(
    "options",
    [["--at", "1"], ["--eviction", "lfu"], ["--blocks", "9"], ["--export", "new.jsonl"]],
    ids=lambda options: options[0],
)
def test_options_that_run_requests_again_are_refused(recording, tmp_path, options):
    """An option that runs requests again is an error for a recording.

    The error names the workload to use instead, and no file is begun.
    """
    done = run(recording, *options, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "is a recording of KV events: it is checked and shown, without options" in done.stderr
    )
    assert f"kv-events:path={recording},lookups=full" in done.stderr
    assert os.listdir(tmp_path) == [recording.name]  # noqa: PTH208 - names are enough


def test_an_incomplete_recording_exits_1_after_its_report(tmp_path):
    """The readable part of a cut recording is reported, and the error states the cut."""
    path = record(tmp_path / "events.jsonl", batch(stored(1)), batch(stored(2)))
    path.write_bytes(path.read_bytes()[:-10])
    done = run(path, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["complete"], report["batches"]) == (1, False, 2)
    message = f"kvcore: error: {path}: incomplete: the file ends inside line 4\n"
    assert done.stderr == message


def test_a_file_of_router_events_is_checked(tmp_path):
    """A file of Dynamo's router events is checked, even if its first line is very long."""
    path = tmp_path / "router.jsonl"
    path.write_bytes(DYNAMO.replace(b'"device"', b'"' + b"d" * 100_000 + b'"'))
    report = json.loads(run(path, "--json").stdout)
    assert (report["format"], report["batches"]) == ("dynamo", 1)


def test_a_trace_in_a_pipe_is_read_from_its_start(tmp_path):
    """A trace in a pipe is read from its start, after the check for a recording."""
    trace = record_trace(tmp_path / "trace.jsonl")
    done = as_process("replay", "/dev/stdin", "--json", input=trace.read_text())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"]
