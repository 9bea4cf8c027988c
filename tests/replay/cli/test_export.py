"""Tests of `kvcore export`: its exit code, stdout, stderr and file."""

import json
from types import SimpleNamespace

import pytest
from helpers.rows import write_rows
from helpers.traces import BLOCK, ask, lines, record, seal, write

from kvcore_cli.main import run
from kvcore_events.block_tracker import check_recording
from kvcore_plugins.workload import Mooncake
from kvcore_replay.check.trace import check_trace
from kvcore_replay.cli import export as exporting
from kvcore_replay.export import ExportSize


@pytest.fixture
def trace(tmp_path):
    """Return the path of a recorded trace."""
    return record(tmp_path / "t.jsonl")


def export(capfd, *arguments):
    """Run `kvcore export`, and return its exit code, stdout and stderr."""
    code = run(["export", *map(str, arguments)])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_the_size_is_estimated_before_the_export(tmp_path, capfd, monkeypatch, ending):
    """The notice counts the token ids of the blocks that are exported.

    The file is smaller than the estimated size, by a factor of at most 8.
    """
    monkeypatch.setattr(exporting, "ANNOUNCED", 0)
    trace, out = tmp_path / "t.jsonl", tmp_path / f"events.{ending}"
    done = ["compare", "zipf:requests=200,prefixes=40", "--eviction", "lru", "--blocks", "300"]
    assert run([*done, "--trace", str(trace)]) == 0
    capfd.readouterr()
    code, _, err = export(capfd, trace, "--to", "vllm", "--out", out)
    size = ExportSize.from_trace(trace)
    assert code == 0
    assert f" {size.tokens:,} stand-ins for the token ids of {size.blocks:,} blocks" in err
    estimate = size.bytes(compressed=ending.endswith("gz"))
    assert estimate / 8 < out.stat().st_size < estimate


def test_a_disk_without_room_is_refused_unless_forced(trace, tmp_path, capfd, monkeypatch):
    """An export that does not fit on its disk is not begun, unless `--force` is given."""
    monkeypatch.setattr(exporting, "disk_usage", lambda _: SimpleNamespace(free=10))
    out = tmp_path / "events.jsonl"
    arguments = trace, "--to", "vllm", "--out", out
    code, printed, err = export(capfd, *arguments)
    assert (code, printed, out.exists()) == (3, "", False)
    assert "stand-ins" in err
    assert "its disk has 10 B free: name a file that ends in .gz" in err
    assert export(capfd, *arguments, "--force")[0] == 0
    assert out.exists()


def test_router_events_are_lines(trace, tmp_path, capfd):
    """`--to dynamo` writes events that are numbered from 0 and pass `check_recording`."""
    out = tmp_path / "events.jsonl"
    assert export(capfd, trace, "--to", "dynamo", "--out", out)[0] == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["event"]["event_id"] for row in rows] == list(range(len(rows)))
    assert check_recording(out).resident == {"device": check_trace(trace).pool["cached"]}


def test_an_export_without_events_says_why(tmp_path, capfd):
    """`--to dynamo` of a run that stored no block writes an empty file, and says so."""
    trace, out = write(tmp_path / "t.jsonl"), tmp_path / "events.jsonl"
    code, printed, err = export(capfd, trace, "--to", "dynamo", "--out", out)
    assert (code, out.read_bytes()) == (0, b"")
    assert "0 events" in printed
    assert "is empty: no block was stored in the run of" in err


@pytest.mark.parametrize("kind", ["vllm", "dynamo"])
def test_a_replica_that_is_no_number_is_refused(trace, tmp_path, capfd, kind):
    """`--replica first` is refused in a line, and no file is left."""
    out = tmp_path / "events.jsonl"
    code, _, err = export(capfd, trace, "--to", kind, "--out", out, "--replica", "first")
    assert (code, out.exists()) == (2, False)
    assert "'first' is no replica: give its number" in err


def test_lines_that_do_not_fit_are_an_error_with_their_place(trace, tmp_path, capfd):
    """A hit of another sequence leaves a block without a parent: its line is named."""
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    next(line for line in events if line.get("request") == "same" and "span" in line)["seq"] = 0
    changed = seal(tmp_path / "u.jsonl", events)
    code, _, error = export(capfd, changed, "--to", "vllm", "--out", tmp_path / "e.out")
    assert code == 1
    assert "u.jsonl:17: COMMIT: sequence 2 has 1 blocks, and none at 2" in error


def test_requests_come_back_as_mooncake(tmp_path, capfd):
    """`--to mooncake` writes the rows that the requests of a trace came from, from 0 on."""
    rows = [
        {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 6, "input_length": 512, "output_length": 0, "hash_ids": [1]},
    ]
    source, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    write_rows(source, *rows)
    done = ["compare", str(source), "--eviction", "lru", "--blocks", "9"]
    assert run([*done, "--accounting", "tokens", "--trace", str(tmp_path / "t.jsonl")]) == 0
    capfd.readouterr()
    code, printed, err = export(
        capfd, tmp_path / "t.jsonl", "--to", "mooncake", "--out", out, "--json"
    )
    assert (code, err) == (0, "")
    assert json.loads(printed) == {
        "schema": 1,
        "command": ["kvcore", "export", str(tmp_path / "t.jsonl"), "--to", "mooncake"],
        "format": "mooncake",
        "out": str(out),
        "requests": 2,
        "key_tokens": 512,
        "left_out": {},
    }
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows
    assert list(Mooncake(out)) == list(Mooncake(source))


def test_losses_of_mooncakes_format_are_reported(tmp_path, capfd):
    """Key sizes, fields and times that Mooncake's format cannot hold are named on stderr."""
    trace = write(tmp_path / "t.jsonl", ask("a", "ab", tenant="x"), ask("b", "ac"))
    code, _, err = export(capfd, trace, "--to", "mooncake", "--out", tmp_path / "o")
    assert code == 0
    assert f"a key is {BLOCK} tokens, which the format cannot say" in err
    assert "left out: 'tenant' of 1 request" in err
    assert "rounded down to milliseconds: the times of 1 request" in err
    assert f"mooncake:path=FILE,key_tokens={BLOCK}" in err
    assert [len(each.keys) for each in Mooncake(tmp_path / "o", key_tokens=BLOCK)] == [2, 2]


def test_keys_of_several_sizes_are_refused(tmp_path, capfd):
    """Keys of two sizes are an error for `--to mooncake`, and no file is left."""
    trace = write(tmp_path / "t.jsonl", ask("a", "ab"), ask("b", "ac"))
    events = lines(trace)
    events[2]["key_tokens"] = 2 * BLOCK
    out = tmp_path / "o"
    code, _, err = export(capfd, seal(trace, events), "--to", "mooncake", "--out", out)
    assert code == 1
    assert "t.jsonl:3: keys of 8 tokens, before of 4: Mooncake's format has one size" in err
    assert not out.exists()
