"""Tests of `kvcore record` as a process, on an engine that loses batches and restarts."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from helpers.commands import run_here, running
from helpers.engine_wire import Engine

from kvcore_events.formats import encode
from kvcore_events.model import BlockRemoved, BlockStored, EventBatch
from kvcore_events.recording import (
    Lost,
    Received,
    RecordingReader,
    RecordingWriter,
    Skipped,
)
from kvcore_lab.comparison import compare_policies
from kvcore_plugins.workload import Zipf

PATIENCE = 60


def stored(number):
    """Return the payload of a batch in which two blocks are stored and one is removed."""
    events = (
        BlockStored(hashes=(2 * number, 2 * number + 1), tokens=tuple(range(8)), block_size=4),
        BlockRemoved(hashes=(2 * number,)),
    )
    return encode(EventBatch(float(number), events, 0))


@pytest.fixture
def engine():
    """Yield an engine that publishes at free ports."""
    with Engine() as engine:
        yield engine


@contextmanager
def recording(engine, out, *options, replay=True):
    """Yield a `kvcore record` process that is subscribed to the engine."""
    command = [sys.executable, "-m", "kvcore", "record", "--zmq", engine.address]
    if replay:
        command += ["--replay", engine.replay]
    with running([*command, "-o", out, *options]) as process:
        engine.wait()
        try:
            yield process
        finally:
            process.kill()


def read(out):
    """Return the items of a recording, and whether it is complete."""
    reader = RecordingReader(out)
    return list(reader), reader.complete


def test_dropped_batches_are_requested_and_counted_once(engine, tmp_path):
    """Batches before the subscription, dropped and live ones are recorded as one stream.

    The report counts each of them once.
    """
    out = tmp_path / "live.jsonl.gz"
    engine.publish(stored(0), sent=False)
    with recording(engine, out, "--batches", "5", "--json") as process:
        engine.publish(stored(1))
        engine.publish(stored(2), sent=False)
        engine.publish(stored(3))
        engine.publish(stored(4))
        printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    report = json.loads(printed)
    assert report["schema"] == 1
    assert (report["batches"], report["stored"], report["removed"]) == (5, 10, 5)
    assert (report["gaps"], report["missing"], report["restarts"]) == (0, 0, 0)
    items, complete = read(out)
    assert complete
    assert [(item.seq, item.batch.ts) for item in items] == [(n, float(n)) for n in range(5)]


def test_gaps_and_garbage_are_reported_and_recorded(engine, tmp_path):
    """Lost batches, invalid messages and undecodable batches are in the file and on stderr."""
    out = tmp_path / "live.jsonl"
    engine.publish(stored(0), sent=False)
    with recording(engine, out, "--batches", "1", replay=False) as process:
        engine.pub.send_multipart([b"only"])
        engine.publish(b"\xc1")
        engine.publish(stored(2))
        _, errors = process.communicate(timeout=PATIENCE)
    items, complete = read(out)
    assert complete
    skipped, gap, unread, received = items
    assert isinstance(skipped, Skipped)
    assert (gap.first, gap.count) == (0, 1)
    assert (unread.first, unread.count) == (1, 1)
    assert isinstance(received, Received)
    assert "a message was skipped: expected 3 frames" in errors
    assert "batch 0 is lost: there is no replay address" in errors
    assert "batch 1 is lost: it cannot be read: payload:" in errors


@pytest.mark.usefixtures("unmeasured_processes")
def test_ctrl_c_ends_with_a_complete_file(engine, tmp_path):
    """Ctrl-C ends the recording with a complete file of all messages and exit code 0."""
    out = tmp_path / "live.jsonl.zst"
    with recording(engine, out) as process:
        engine.publish(stored(0))
        engine.pub.send_multipart([b"heard"])
        while "skipped" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")
    assert "batches" in printed
    items, complete = read(out)
    assert complete
    assert [type(item) for item in items] == [Received, Skipped]


def test_sigterm_in_a_flood_leaves_no_hole(engine, tmp_path):
    """After SIGTERM each large batch that was received is in the file, or counted in a gap."""
    out = tmp_path / "live.jsonl"
    large = BlockStored(hashes=(1,), tokens=tuple(range(300_000)), block_size=300_000)
    payload = encode(EventBatch(1.0, (large,)))
    with recording(engine, out, replay=False) as process:
        assert "listening" in process.stderr.readline()
        for _ in range(8):
            engine.publish(payload)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    items, complete = read(out)
    assert complete
    expected = 0
    for item in items:
        assert (item.first if isinstance(item, Lost) else item.seq) == expected
        expected += item.count if isinstance(item, Lost) else 1
    assert expected


def test_a_full_disk_leaves_the_written_part(engine, tmp_path):
    """When the file cannot grow, its `.part` stays and stderr names its number of batches."""
    out = tmp_path / "live.jsonl"
    with recording(engine, out, replay=False) as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
        for index in range(400):
            engine.publish(stored(index))
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3
    assert [path.name for path in tmp_path.iterdir()] == ["live.jsonl.part"]
    items, complete = read(f"{out}.part")
    assert [item.seq for item in items] == list(range(len(items)))
    assert items
    assert not complete
    assert f"{len(items)} batches: 'kvcore replay {out}.part' shows them" in errors
    shown = run_here("replay", f"{out}.part")
    assert (shown.returncode, "incomplete" in shown.stderr) == (1, True)
    assert f"batches {len(items)}" in " ".join(shown.stdout.split())


KILLED = """
import os, signal, sys
from kvcore_events.recording import record
from kvcore_events.recording import RecordingWriter
from kvcore_events.subscriber import Server, Subscriber

def kill(tally):
    if tally.batches == 2000:
        os.kill(os.getpid(), signal.SIGKILL)

address, replay, out = sys.argv[1:]
with Subscriber(Server(address=address, replay=replay)) as it, RecordingWriter(out) as writer:
    record(it, writer, progress=kill)
"""


def test_a_killed_recording_is_readable(engine, tmp_path):
    """SIGKILL leaves a file that is readable up to the cut, also after the next run."""
    out = tmp_path / "live.jsonl"
    for index in range(2000):
        engine.publish(stored(index), sent=False)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, engine.address, engine.replay, out],
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["live.jsonl.part"]  # noqa: PTH208 - names are enough
    with RecordingWriter(out):
        pass
    items, complete = read(tmp_path / "live.jsonl.part-1")
    assert not complete
    assert [item.seq for item in items] == list(range(len(items)))
    assert len(items) > 1000


@pytest.mark.parametrize("older", [None, "precious"])
@pytest.mark.parametrize("options", [[], ["--rotate", "1h", "--rotate", "1GiB"]])
def test_a_silent_publisher_is_reported(tmp_path, older, options):
    """If no batch arrives, no file is written or replaced, and the exit code is 4."""
    out = tmp_path / "none.jsonl"
    if older is not None:
        out.write_text(older)
    address = f"ipc://{tmp_path}/s"
    done = run_here("record", "--zmq", address, "--for", "0.01", "-o", out, "--json", *options)
    assert done.returncode == 4
    report = json.loads(done.stdout)
    assert (report["batches"], report["pieces"]) == (0, 0)
    then = "nothing is written" if older is None else f"{out} stays as it was"
    assert f"no batch came from {address}: {then}" in done.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == [older] * (older is not None)


def test_numbers_beyond_64_bits_are_reported(engine, tmp_path):
    """Missing batches beyond 64 bits are added up by `record` and by `replay`."""
    out = tmp_path / "live.jsonl"
    with recording(engine, out, "--batches", "5", "--json", replay=False) as process:
        for number in (2**63 - 1, 0, 2**63 - 1, 0, 2**63 - 1):
            engine.next = number
            engine.publish(stored(number % 7))
        printed, _ = process.communicate(timeout=PATIENCE)
    missing = 3 * (2**63 - 1) - 2
    assert json.loads(printed)["missing"] == missing
    assert json.loads(run_here("replay", out, "--json").stdout)["missing"] == missing


def test_a_published_export_is_recorded_as_the_written_one(tmp_path):
    """The batches that `export --zmq` publishes are those that `export --out` writes."""
    trace, there, here = (tmp_path / name for name in ("t.jsonl", "there.jsonl", "here.jsonl"))
    compare_policies(Zipf(requests=60, prefixes=20), "lru", 300, trace=trace)
    export = [sys.executable, "-m", "kvcore", "export", trace, "--to", "vllm"]
    done = subprocess.run([*export, "--out", there, "--json"], capture_output=True, check=True)
    batches = json.loads(done.stdout)["batches"]
    with running([*export, "--zmq", "tcp://127.0.0.1:*"]) as publishing:
        address = re.search(r"at (\S+),", publishing.stderr.readline())[1]
        record = [sys.executable, "-m", "kvcore", "record", "--zmq", address, "-o", here]
        subprocess.run([*record, "--batches", str(batches)], check=True, timeout=PATIENCE)
        publishing.communicate(timeout=PATIENCE)
    assert publishing.returncode == 0
    assert [(item.seq, item.batch) for item in read(here)[0]] == [
        (item.seq, item.batch) for item in read(there)[0]
    ]
