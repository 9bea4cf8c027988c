"""Writing traces: requests, files, buffers, and runs that fail or are killed."""

import io
import json
import subprocess
import sys
from array import array
from contextlib import suppress
from pathlib import Path

import attrs
import pytest
from helpers.traces import CACHE, ask, drive, lines, record, write

from kvcore import SLO, InputError, KVCache, KvcoreError, Request, Trace, read_events
from kvcore.errors import StorageError
from kvcore.files import AtomicFile
from kvcore.request import Retention
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix
from kvcore_plugins.traces.live import LiveTrace

KINDS = ["trace.jsonl", "trace.jsonl.gz", "trace.jsonl.zst"]


def requests(path):
    """Return the REQUEST lines of a trace, without the fields of every line."""
    return [
        {name: value for name, value in line.items() if name not in {"n", "t", "event"}}
        for line in lines(path)
        if line["event"] == "REQUEST"
    ]


def test_a_request_is_written_whole(tmp_path):
    """Every field of a request that is not at its default is in its line."""
    special = {
        "salt": "",
        "tenant": "t",
        "priority": -1,
        "predicted": 0,
        "session": "s",
        "after": 0,
        "think": 9,
    }
    special |= {"output_keys": [5], "output": 4}
    hints = (Retention(0, None, 50), Retention(4, 8, 90, 7))
    names = {
        "output": "output_tokens",
        "predicted": "predicted_output_tokens",
        "think": "think_time",
    }
    fields = {names.get(name, name): value for name, value in special.items()}
    path = write(tmp_path / "trace.jsonl", ask(1, "ab", retention=hints, **fields))
    (request,) = requests(path)
    assert {name: request[name] for name in special} == special
    assert request["retention"] == [[0, None, 50, None], [4, 8, 90, 7]]


def test_the_times_of_an_slo_are_written_in_ns(tmp_path):
    """The given times of an SLO are written in ns; an SLO without times is written as {}."""
    asked = [SLO(deadline_ns=3, ttft_ns=5), SLO(), None]
    path = write(
        tmp_path / "trace.jsonl", *(ask(n, "a", slo=slo) for n, slo in enumerate(asked))
    )
    slos = [request.get("slo") for request in requests(path)]
    assert slos == [{"ttft": 5, "deadline": 3}, {}, None]


def test_keys_are_written_as_ints_or_hex(tmp_path):
    """Keys of 16 bytes are written in hex; ints and hex digits are not changed."""
    keys = [2**63 - 1, bytes(range(16)), "ab" * 16, 0]
    path = write(
        tmp_path / "trace.jsonl", Request(id=1, prompt_tokens=16, keys=keys, key_tokens=4)
    )
    assert requests(path)[0]["keys"] == [2**63 - 1, bytes(range(16)).hex(), "ab" * 16, 0]


@pytest.mark.parametrize("key", [-1, 2**63, "no hex", b"short", 1.5, None, (1, 2)])
def test_other_keys_are_refused(tmp_path, key):
    """A key that a trace cannot hold raises InputError with request, key and place."""
    path = tmp_path / "trace.jsonl"
    with pytest.raises(InputError, match=r"request 'r' has the block key .* \(place 1\)"):
        write(path, Request(id="r", prompt_tokens=8, keys=[1, key], key_tokens=4))
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_json_cannot_hold_is_refused(tmp_path):
    """A value that JSON cannot hold raises InputError that names the request."""
    with pytest.raises(InputError, match=r"request 1000.* cannot be written to a trace"):
        write(tmp_path / "trace.jsonl", attrs.evolve(ask(1, "a"), id=10**30))
    with pytest.raises(InputError, match=r"request 2 cannot be written to a trace"):
        write(tmp_path / "trace.jsonl", ask(2, "a", tenant="\udc80"))
    with pytest.raises(
        InputError, match=r"request 3 .*: Type is not JSON serializable: object"
    ):
        write(tmp_path / "trace.jsonl", ask(3, "a", tenant=object()))


@pytest.mark.parametrize(
    ("field", "value"),
    [("id", None), ("id", 1.5), ("id", (1, 2)), ("salt", 3), ("tenant", 4), ("priority", 0.5)],
)
def test_a_field_of_a_wrong_type_is_refused(tmp_path, field, value):
    """A field of a wrong type raises InputError, and no file is left."""
    request = attrs.evolve(ask(1, "a"), **{field: value})
    where = rf"cannot be written to a trace: REQUEST field '{field}' must be"
    with pytest.raises(InputError, match=where):
        write(tmp_path / "trace.jsonl", request)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blocks", [3, 2_000])
def test_an_array_changed_after_the_call_does_not_change_its_line(tmp_path, blocks):
    """An array changed after the call does not change its line, though lines are buffered."""
    with Trace(tmp_path / "trace.jsonl") as trace:
        trace.begin(**CACHE)
        ids = array("i", range(blocks))
        for now in range(1_000):
            trace.alloc(now, seq=1, first=0, runs=ids)
            ids.append(ids.pop(0))
    written = [line["runs"] for line in lines(tmp_path / "trace.jsonl")[1:-1]]
    assert [runs[0][0] for runs in written] == [now % blocks for now in range(1_000)]
    assert {sum(count for _, count in runs) for runs in written} == {blocks}


def test_a_flush_writes_the_last_line(tmp_path):
    """After `flush` the file has every line written before."""
    with Trace(tmp_path / "trace.jsonl") as trace:
        trace.begin(**CACHE)
        for now in range(3):
            trace.free(now, seq=now, runs=array("i"), reason="close")
            trace.flush()
            trace._sink.hexdigest()  # waits for the thread that writes
            assert lines(tmp_path / "trace.jsonl.part")[-1]["seq"] == now


def test_who_listens_gets_each_line_at_once(tmp_path):
    """`on_lines` gets every line of the file, whole, before the next thing happens."""
    path, heard = tmp_path / "trace.jsonl", []
    with Trace(path, on_lines=heard.append) as trace:
        cache = KVCache(8, 4, trace=trace)
        cache.close(cache.open(ask(1, "ab")))
        assert json.loads(heard[-1])["event"] == "FREE"
    assert b"".join(heard) == path.read_bytes()


def test_end_has_the_numbers_of_lines_and_events(tmp_path):
    """END has the numbers of lines and events before it, and the time of the last line."""
    path = write(tmp_path / "trace.jsonl", ask(1, "a"), ask(2, "b"))
    end = lines(path)[-1]
    assert (end["lines"], end["events"], end["t"]) == (3, {"HEADER": 1, "REQUEST": 2}, 1)


@pytest.mark.parametrize("name", KINDS[1:])
def test_files_are_compressed_by_their_name(tmp_path, name):
    """A trace whose name ends in .gz or .zst is compressed, and has the same lines."""
    assert lines(record(tmp_path / name)) == lines(record(tmp_path / "trace.jsonl"))
    assert (tmp_path / name).stat().st_size < (tmp_path / "trace.jsonl").stat().st_size / 2


def test_a_file_object_is_not_closed():
    """A trace can be written to a binary file object, which is not closed."""
    file = io.BytesIO()
    with Trace(file) as trace:
        drive(KVCache(8, 4, eviction=LRU(), prefix=Radix(), trace=trace))
    assert not file.closed
    assert file.getvalue().endswith(b'"}\n')


def test_a_trace_longer_than_the_buffer_is_written_whole(tmp_path):
    """A trace longer than the write buffer is written in whole and in order."""
    path = tmp_path / "trace.jsonl.gz"
    with Trace(path) as trace:
        trace.begin(**CACHE)
        for now in range(20_000):
            trace.free(now, seq=now, runs=[(1, 2)] * 10, reason="close")
    assert [line.get("seq") for line in lines(path)[1:-1]] == list(range(20_000))


def test_a_trace_is_a_part_file_until_close(tmp_path):
    """Until `close` the trace is `<path>.part`, and an older file at the path remains."""
    path = tmp_path / "trace.jsonl"
    path.write_text("before")
    with Trace(path) as trace:
        trace.begin(**CACHE)
        assert path.read_text() == "before"
        assert (tmp_path / "trace.jsonl.part").exists()
    assert len(lines(path)) == 2
    assert list(tmp_path.iterdir()) == [path]


def _fail_after_the_header(trace):
    trace.begin(**CACHE)
    raise LookupError


@pytest.mark.parametrize("name", KINDS)
def test_a_failed_run_leaves_no_file(tmp_path, name):
    """If a run fails no file is left, and the exception is the run's own."""
    with pytest.raises(LookupError), Trace(tmp_path / name) as trace:
        _fail_after_the_header(trace)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_killed_process_leaves_a_part_file(tmp_path, name):
    """A killed process leaves `<path>.part` with every line before the last `flush`."""
    script = f"""
import os
from kvcore import Trace
trace = Trace({str(tmp_path / name)!r})
trace.begin(**{CACHE!r})
for now in range(50_000):
    trace.free(now, seq=now, runs=[], reason="close")
trace.flush()
os._exit(9)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == 9
    assert len(list(read_events(tmp_path / f"{name}.part"))) == 50_001
    assert not (tmp_path / name).exists()


def test_a_trace_open_at_exit_lacks_only_end(tmp_path):
    """A trace that is open when Python exits lacks only END, and remains `.part`."""
    script = f"""
from kvcore import Trace
trace = Trace({str(tmp_path / "trace.jsonl")!r})
trace.begin(**{CACHE!r})
for now in range(30_000):
    trace.free(now, seq=now, runs=[], reason="close")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    reader = read_events(tmp_path / "trace.jsonl.part")
    assert len(list(reader)) == 30_001
    assert reader.cut_reason == "the file ends after line 30001, without END"
    assert done.stderr == b""


def test_a_trace_without_a_cache_leaves_no_file(tmp_path):
    """Closing a trace that no cache has begun raises InputError and leaves no file."""
    with pytest.raises(InputError, match=r"is empty: no KVCache was made with it"):
        Trace(tmp_path / "trace.jsonl").close()
    assert list(tmp_path.iterdir()) == []


def test_a_second_close_changes_nothing(tmp_path):
    """A second `close`, and a `discard` after it, change nothing."""
    path = write(tmp_path / "trace.jsonl")
    trace = Trace(path)
    trace.begin(**CACHE)
    trace.close()
    before = path.read_bytes()
    trace.close()
    trace.discard()
    assert path.read_bytes() == before


def test_a_second_cache_cannot_write_to_the_same_trace(tmp_path):
    """A second cache cannot write to the same trace."""
    with Trace(tmp_path / "trace.jsonl") as trace:
        trace.begin(**CACHE)
        with pytest.raises(InputError, match=r"every cache needs a Trace of its own"):
            trace.begin(**CACHE)


@pytest.mark.parametrize("end", [Trace.close, Trace.discard], ids=lambda end: end.__name__)
def test_a_trace_that_has_ended_cannot_be_begun(tmp_path, end):
    """A closed trace takes neither a cache nor a description: nothing would be written."""
    trace = Trace(tmp_path / "trace.jsonl")
    with suppress(InputError):  # that the trace is empty
        end(trace)
    with pytest.raises(InputError, match=r"is not new: every cache needs a Trace"):
        trace.begin(**CACHE)
    with pytest.raises(InputError, match=r"is closed, or its header is written"):
        trace.describe(seed=1)


def test_a_line_before_header_or_after_end_is_refused(tmp_path):
    """A line before HEADER or after END raises InputError."""
    trace = Trace(tmp_path / "trace.jsonl")
    with pytest.raises(InputError, match=r"FREE before the header"):
        trace.free(0, seq=1, runs=[], reason="close")
    trace.begin(**CACHE)
    trace.close()
    with pytest.raises(InputError, match=r"FREE after the end"):
        trace.free(0, seq=1, runs=[], reason="close")


def test_a_path_that_cannot_be_opened_is_refused_at_once(tmp_path):
    """A missing directory, a directory and an invalid name are refused by `Trace` itself."""
    for path in (tmp_path / "no" / "trace", tmp_path, "a\0b"):
        with pytest.raises(InputError, match=r"cannot write the trace"):
            Trace(path)


def full(name):
    """Write a trace longer than the write buffer to a full disk."""
    with Trace(name) as trace:
        trace.begin(**CACHE)
        for now in range(40_000):
            trace.free(now, seq=now, runs=[], reason="close")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["/dev/full", "full.gz", "full.zst"])
def test_a_full_disk_raises_storage_error(name, tmp_path, monkeypatch):
    """A full disk raises StorageError with exit code 3, also when a thread compresses."""
    if name != "/dev/full":
        monkeypatch.chdir(tmp_path)
        Path(name).symlink_to("/dev/full")
    with pytest.raises(
        StorageError, match=r"cannot write the trace .*: No space left"
    ) as caught:
        full(name)
    assert caught.value.exit_code == 3


def test_close_raises_the_error_of_the_last_write():
    """`close` raises the error of the last write, and can be called again."""

    class Failing(io.BytesIO):
        def write(self, _):
            raise OSError(28, "No space left on device")

    trace = Trace(Failing())
    trace.begin(**CACHE)
    with pytest.raises(KvcoreError, match=r"No space left on device"):
        trace.close()
    trace.close()


def test_importing_the_trace_imports_no_slow_package():
    """Importing `kvcore.trace` imports no package that is slow and not always needed."""
    script = "import kvcore.trace, sys, json; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert not {"structlog", "zstandard", "rich", "click", "numpy"} & set(
        json.loads(done.stdout)
    )


def fill_disk_after(monkeypatch, most):
    """Let every write fail that would make a file longer than `most` bytes."""
    written = {}
    real = AtomicFile.write

    def write(self, data):
        if written.get(self, 0) + len(data) > most:
            msg = "cannot write the trace: No space left on device"
            raise StorageError(msg)
        written[self] = written.get(self, 0) + len(data)
        return real(self, data)

    monkeypatch.setattr(AtomicFile, "write", write)


@pytest.mark.parametrize("cls", [Trace, LiveTrace])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_full_disk_leaves_what_a_live_run_has_written(tmp_path, monkeypatch, cls, suffix):
    """On an error a live trace stays as `.part`, up to the last flush; others go."""
    path = tmp_path / f"day.jsonl{suffix}"
    fill_disk_after(monkeypatch, 20_000)
    trace = cls(path)
    trace.begin(**CACHE)

    def run():
        with trace:
            for index in range(10_000):
                trace.request(ask(index, "a"), index)
                if index % 50 == 0:
                    trace.flush()

    with pytest.raises(StorageError, match="No space left on device") as caught:
        run()
    part = tmp_path / f"day.jsonl{suffix}.part"
    assert not path.exists()
    assert part.exists() == (cls is LiveTrace)
    if part.exists():
        assert f"{part} keeps what was written before" in str(caught.value)
        assert len(list(read_events(part))) > 50
    trace.give_up(caught.value)  # a second time


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_disk_that_fills_with_the_last_bytes_leaves_the_lines_before(
    tmp_path, monkeypatch, suffix
):
    """A compressed live file whose end finds no room stays as `.part`, which is named."""
    path = tmp_path / f"day.jsonl{suffix}"
    trace = LiveTrace(path)
    trace.begin(**CACHE)
    trace.request(ask(0, "a"), 0)
    trace.flush()
    part = tmp_path / f"{path.name}.part"
    size = part.stat().st_size
    fill_disk_after(monkeypatch, 0)
    with pytest.raises(StorageError, match="keeps what was written before") as caught:
        trace.close()
    assert str(part) in str(caught.value)
    assert part.stat().st_size == size


def test_an_error_of_a_full_disk_names_no_file_that_is_gone(tmp_path, monkeypatch):
    """On a disk that is full from the start nothing is kept, and the error says no more."""
    fill_disk_after(monkeypatch, 0)
    trace = LiveTrace(tmp_path / "day.jsonl")
    trace.begin(**CACHE)
    trace.request(ask(0, "a"), 0)
    with pytest.raises(StorageError, match=r"No space left on device$"):
        trace.close()
    assert not list(tmp_path.iterdir())


def test_a_live_run_in_which_nothing_happened_leaves_no_file(tmp_path):
    """An error before the first line leaves no file."""
    trace = LiveTrace(tmp_path / "day.jsonl")
    trace.begin(**CACHE)
    trace.give_up(InputError("port in use"))
    assert not list(tmp_path.iterdir())
