"""Recordings of KV events: their lines, damaged and unfinished files, and the check."""

import orjson
import pytest
from helpers.kv_events import DYNAMO, TRTLLM, batch, record, removed, stored

from kvcore import InputError, TraceError
from kvcore.errors import StorageError
from kvcore.files import AtomicFile
from kvcore.untrusted import MOST_VALUES
from kvcore_events.block_tracker import check_recording
from kvcore_events.formats import decode
from kvcore_events.recording import (
    Lost,
    RecordingReader,
    RecordingWriter,
    Restarted,
    Skipped,
    is_recording,
)

RUN = [batch(stored(1, 2), ts=1.0), batch(removed(2), ts=2.0), batch(stored(3), ts=3.0)]


def items(path):
    """Return the items of a recording, and its reader."""
    reader = RecordingReader(path)
    return list(reader), reader


def test_lines_are_measured_one_by_one(tmp_path):
    """A line with many values does not count towards the limit of later lines."""
    path = record(tmp_path / "r.jsonl", batch(removed(*range(MOST_VALUES - 50))), *RUN * 9)
    found, reader = items(path)
    assert (len(found), reader.complete) == (28, True)


def test_gaps_restarts_and_garbage_are_recorded(tmp_path):
    """Gaps, restarts and invalid messages are recorded and read in their places."""
    with RecordingWriter(tmp_path / "r.jsonl") as recording:
        recording.batch(RUN[0], 0, 1)
        recording.gap(1, 3, 1, "not kept any more")
        recording.restart(1)
        recording.invalid_message("two frames", 1)
    found, _ = items(tmp_path / "r.jsonl")
    assert found[1:] == [
        Lost(publisher=1, first=1, count=3, why="not kept any more"),
        Restarted(publisher=1),
        Skipped(publisher=1, why="two frames"),
    ]


def test_files_of_json_events_are_recordings(tmp_path):
    """JSON lines of TensorRT-LLM and Dynamo are recordings without a header or an end."""
    for payload in (TRTLLM, DYNAMO):
        path = tmp_path / "events.jsonl"
        path.write_bytes(payload + b"\n" + payload)
        found, reader = items(path)
        assert is_recording(path)
        assert reader.complete
        assert [item.batch for item in found] == [decode(payload)] * 2


@pytest.mark.parametrize(
    ("suffix", "torn", "end"),
    [
        ("", b'{"n":2,"ki', "inside line 3"),
        (".gz", b"", "after line 2, without END"),
        (".zst", b"", "after line 2, without END"),
    ],
)
def test_a_killed_recording_is_readable(tmp_path, suffix, torn, end):
    """A recording of a killed process is read up to its last flush, and is incomplete."""
    path, copy = (tmp_path / f"{name}.jsonl{suffix}" for name in ("r", "copy"))
    recording = RecordingWriter(path)
    recording.batch(RUN[0], 0)
    recording.flush()
    recording.batch(RUN[1], 1)
    recording._sink.hexdigest()
    copy.write_bytes(path.with_name(f"{path.name}.part").read_bytes() + torn)
    recording.discard()
    found, reader = items(copy)
    assert [item.batch for item in found] == RUN[:1]
    assert not reader.complete
    assert reader.cut_reason == f"the file ends {end}"
    assert not list(tmp_path.glob("r.jsonl*"))


def test_an_exception_before_any_batch_leaves_no_file(tmp_path):
    """A recording without batches whose block raises leaves no file."""
    with pytest.raises(RuntimeError), RecordingWriter(tmp_path / "r.jsonl"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_a_closed_recording_refuses_batches(tmp_path):
    """A batch after the end of a recording is refused, and no piece begins there."""
    with RecordingWriter(tmp_path / "r.jsonl", rotate_seconds=0) as recording:
        recording.batch(RUN[0])
    recording.rotate()
    with pytest.raises(InputError, match="BATCH after the end"):
        recording.batch(RUN[0])
    assert [path.name for path in tmp_path.iterdir()] == ["r-000001.jsonl"]


def damage(line, **fields):
    """Return a function that changes fields of a line of a recording."""

    def change(lines):
        lines[line] = orjson.dumps(orjson.loads(lines[line]) | fields)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damage(0, schema=2), r":1: schema 2; this version reads schema 1"),
        (damage(0, kind="HEADER"), r":1: no recording of KV events"),
        (damage(0, format="x"), r":1: format 'x' is not known; there are: msgpack"),
        (damage(1, n=7), r":2: this line has n = 7; 1 stand before it"),
        (damage(1, kind="X"), r":2: unknown kind of line 'X'; there are: BATCH"),
        (damage(1, more=1), r":2: BATCH: object contains unknown field `more`"),
        (damage(1, seq=-1), r":2: BATCH.seq: expected `int` >= 0"),
        (damage(1, value=[1]), r":2: batch must be \[ts, events, dp_rank\]"),
        (damage(1, value=[1, {"$x": 1}]), r":2: the name '\$x' is none"),
        (damage(1, value=[2.0, []]), r":5: END has digest"),
        (damage(4, lines={}), r":5: END has lines {}"),
        (lambda lines: lines.append(lines[1]), r":6: a line follows END"),
        (lambda lines: lines.insert(1, b"{"), r":2: not JSON"),
        (lambda lines: lines.insert(0, b"hello"), r":1: no recording of KV events.*not JSON"),
    ],
)
def test_damage_is_reported_with_its_line(tmp_path, change, reason):
    """A damaged line raises TraceError with its file, line and reason."""
    path = record(tmp_path / "r.jsonl", *RUN)
    lines = path.read_bytes().splitlines()
    change(lines)
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(TraceError, match=reason):
        items(path)


def test_other_files_are_no_recordings(tmp_path):
    """A missing file, a trace and a workload are not recordings."""
    assert not is_recording(tmp_path / "missing")
    path = tmp_path / "x.jsonl"
    for text in (
        "",
        "hello\n",
        '{"event":"HEADER","schema":1}\n',
        '{"timestamp":1}\n',
        "[1]\n",
    ):
        path.write_text(text)
        assert not is_recording(path)
    with pytest.raises(InputError, match=r"cannot read the recording .*missing"):
        items(tmp_path / "missing")


def test_check_reports_resident_blocks(tmp_path):
    """The report has the numbers of stored, removed and resident blocks.

    Its text says that hits leave no events.
    """
    report = check_recording(record(tmp_path / "r.jsonl", *RUN))
    assert report.resident == {"-": 2}
    assert report.blocks["stored"] == 3
    assert report.blocks["removed"] == 1
    assert report.events == {"BlockStored": 2, "BlockRemoved": 1}
    assert "a request that found its blocks leaves no event" in report.tells
    assert orjson.loads(orjson.dumps(report.as_dict()))["schema"] == 1


def test_check_reports_gaps_restarts_and_anomalies(tmp_path):
    """The report has gaps, restarts, invalid messages and anomalies, and its text as well."""
    with RecordingWriter(tmp_path / "r.jsonl") as recording:
        recording.batch(batch(stored(2, parent=1), removed(7)), 3)
        recording.gap(4, 2)
        recording.invalid_message("two frames")
        recording.restart()
        recording.batch(batch(stored(1)), 0)
    report = check_recording(tmp_path / "r.jsonl")
    assert report.gaps == [{"publisher": None, "first": 4, "count": 2}]
    assert (report.missing, report.garbage, report.restarts) == (2, 1, 1)
    assert report.anomalies["unknown_parent"] == report.anomalies["never_stored"] == 1
    assert "3 batches are missing or unreadable" in report.tells
    assert "stored before it begins" in report.tells
    assert report.blocks["forgotten"] == 1


def test_an_empty_file_is_an_incomplete_recording(tmp_path):
    """An empty file is an incomplete recording without batches."""
    (tmp_path / "r.jsonl").write_bytes(b"")
    report = check_recording(tmp_path / "r.jsonl")
    assert (report.complete, report.cut_reason, report.batches) == (
        False,
        "the file is empty",
        0,
    )


def test_a_recording_on_a_disk_full_from_the_start_names_no_file_that_is_gone(
    tmp_path, monkeypatch
):
    """Nothing is kept, and the error of the disk is told as it is."""

    def write(*_):
        msg = "cannot write the recording: No space left on device"
        raise StorageError(msg)

    monkeypatch.setattr(AtomicFile, "write", write)
    with pytest.raises(StorageError, match=r"No space left on device$"):
        record(tmp_path / "day.jsonl", batch(stored(1)))
    assert not list(tmp_path.iterdir())
