"""Atomic files, which are complete or not there."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from kvcore import InputError, StorageError
from kvcore.files import AtomicFile, atomic_file
from kvcore_replay.check.trace import check_trace


def test_a_file_appears_when_it_is_whole(tmp_path):
    """A file gets its name when it is complete, and leaves no other file."""
    path = tmp_path / "rows.csv"
    with atomic_file(path) as file:
        file.write("é\n")
        assert not path.exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.csv"]
    assert path.read_text("utf-8") == "é\n"


def test_an_unfinished_file_leaves_the_old_one(tmp_path):
    """An exception during writing leaves the old file, and no other file."""
    path = tmp_path / "rows.csv"
    path.write_text("old")
    file = atomic_file(path)
    file.__enter__().write("new")
    assert not file.__exit__(RuntimeError, RuntimeError(), None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.csv"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(("old", "calls"), [(True, ["fsync", "rename"]), (False, ["rename"])])
def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path, monkeypatch, old, calls):
    """A power cut leaves the old file or the new one, not an empty one in place of both."""
    path, made = tmp_path / "rows.csv", []
    if old:
        path.write_text("old")
    replace = Path.replace
    monkeypatch.setattr(os, "fsync", lambda _: made.append("fsync"))
    monkeypatch.setattr(
        Path, "replace", lambda part, to: made.append("rename") or replace(part, to)
    )
    with atomic_file(path) as file:
        file.write("new")
    assert made == calls
    assert path.read_text() == "new"


def test_a_file_has_the_mode_of_the_umask(tmp_path):
    """Files that are written are as readable as the umask of the process allows."""
    umask = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "rows.csv") as file:
            file.write("new")
    finally:
        os.umask(umask)
    assert (tmp_path / "rows.csv").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("place", ["missing/rows.csv", "."])
def test_a_file_that_cannot_be_opened_is_refused(tmp_path, place):
    """A path in a missing directory, or of a directory, is refused at once."""
    with pytest.raises(InputError, match="cannot write"), atomic_file(tmp_path / place):
        pytest.fail("opened")


def test_a_pipe_is_written_in_place(tmp_path):
    """A pipe is written in place and stays a pipe."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read = []
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    with atomic_file(path) as file:
        file.write("row\n")
    reader.join()
    assert (read, path.is_fifo()) == (["row\n"], True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("text", ["row\n", "row\n" * 100_000])
def test_a_full_disk_raises_storage_error_with_the_path(text):
    """A full disk raises StorageError with the path, even if it shows only at the end."""
    with (
        pytest.raises(StorageError, match=r"cannot write /dev/full: No space left"),
        atomic_file(Path("/dev/full")) as file,
    ):
        file.write(text)


def test_two_runs_do_not_share_a_part(tmp_path):
    """While one run writes a file another run is refused, and the first one goes on."""
    path = tmp_path / "rows.csv"
    with atomic_file(path) as file:
        file.write("first")
        with pytest.raises(InputError, match=r"rows.csv.part is being written by another run"):
            atomic_file(path).__enter__()
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.csv"]


def test_the_part_of_a_killed_run_is_kept(tmp_path, caplog):
    """A `.part` that a killed run has left is kept under another name, which is logged."""
    part = tmp_path / "rows.csv.part"
    for left in ("all there is", "of two runs"):
        part.write_text(left)
        with atomic_file(tmp_path / "rows.csv") as file:
            file.write("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "rows.csv": "new",
        "rows.csv.part-1": "all there is",
        "rows.csv.part-2": "of two runs",
    }
    assert f"{part} was left by a run that was killed: it is kept as {part}-1" in caplog.text


def test_a_part_that_is_a_link_is_refused(tmp_path):
    """A `.part` that is a symbolic link is refused, as it may lead to any file."""
    (tmp_path / "precious").write_text("old")
    (tmp_path / "rows.csv.part").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="cannot write"):
        atomic_file(tmp_path / "rows.csv").__enter__()
    assert (tmp_path / "precious").read_text() == "old"


def test_a_part_that_is_a_pipe_is_refused_at_once(tmp_path):
    """A `.part` that is a pipe without a reader is refused at once."""
    os.mkfifo(tmp_path / "rows.csv.part")
    with pytest.raises(InputError, match="cannot write"):
        atomic_file(tmp_path / "rows.csv").__enter__()


def test_without_locks_an_existing_part_is_refused(tmp_path, monkeypatch):
    """On a file system without locks an existing `.part` is refused."""

    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with atomic_file(tmp_path / "rows.csv") as file:
        file.write("new")
    (tmp_path / "rows.csv.part").write_text("whose?")
    with pytest.raises(InputError, match=r"rows.csv.part is being written by another run"):
        atomic_file(tmp_path / "rows.csv").__enter__()


def test_discarding_twice_spares_the_part_of_the_next_run(tmp_path):
    """Discarding a file twice does not remove the `.part` of the next run."""
    first = AtomicFile(tmp_path / "rows", "rows")
    first.discard()
    second = AtomicFile(tmp_path / "rows", "rows")
    first.discard()
    second.finish()
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize("function", ["open", "fstat"])
def test_a_signal_that_comes_as_a_file_is_made_leaves_none(tmp_path, monkeypatch, function):
    """A signal that raises when the system has made a file, or locked it, leaves none."""
    real = getattr(os, function)

    def interrupted(*args):
        monkeypatch.undo()
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, function, interrupted)
    with pytest.raises(KeyboardInterrupt):
        AtomicFile(tmp_path / "rows.csv", "rows.csv")
    assert list(tmp_path.iterdir()) == []


def test_the_error_of_a_signal_before_a_file_is_made_is_raised(tmp_path, monkeypatch):
    """The error of a signal is not hidden by one about a file that is not there yet."""

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcore.files.part_path", interrupted)
    with pytest.raises(KeyboardInterrupt):
        AtomicFile(tmp_path / "rows.csv", "rows.csv")


def test_a_signal_ends_the_wait_for_the_reader_of_a_pipe(tmp_path):
    """A signal that comes as a pipe waits for its reader ends that: it is not opened again."""
    opened = []

    class Waiting(io.FileIO):
        def __init__(self, path, *_, **__):
            opened.append(path)
            raise KeyboardInterrupt

    class Pipe(AtomicFile, Waiting):
        pass

    os.mkfifo(tmp_path / "rows")
    with pytest.raises(KeyboardInterrupt):
        Pipe(tmp_path / "rows", "rows")
    assert opened == [tmp_path / "rows"]


def test_an_empty_file_is_removed_when_it_is_closed(tmp_path):
    """An empty file, as a signal may leave it, is removed on closing; one with bytes stays."""
    AtomicFile(tmp_path / "rows.csv", "rows.csv").close()
    file = AtomicFile(tmp_path / "more.csv", "more.csv")
    file.write(b"a")
    file.close()
    assert [path.name for path in tmp_path.iterdir()] == ["more.csv.part"]


@pytest.mark.parametrize("end", ["close", "discard", "finish"])
def test_a_forked_process_leaves_a_file_to_its_parent(tmp_path, end):
    """A child that ends normally neither writes what is buffered, nor renames or removes it."""
    raw = AtomicFile(tmp_path / "rows", "rows")
    file = io.BufferedWriter(raw)
    child = os.fork()
    if not child:
        with suppress(BaseException):
            file.write(b"twice")
            file.flush()
            getattr(raw, end)()
        os._exit(0)
    os.waitpid(child, 0)
    left = [(path.name, path.stat().st_size) for path in tmp_path.iterdir()]
    file.close()
    assert left == [("rows.part", 0)]


def test_a_forked_process_does_not_wait_for_the_thread_of_its_parent(tmp_path):
    """A child ends while the thread of its parent writes a trace, which has each line once."""
    code = """
import os, sys
from kvcore import KVCache, Trace

with Trace(sys.argv[1]) as trace:
    KVCache(4, 4, trace=trace)
    read, write = os.pipe()
    trace._sink._submit(lambda fd: os.read(fd, 1), read)
    child = os.fork()
    if not child:
        sys.exit(0)
    os.waitpid(child, 0)
    os.write(write, b"!")
"""
    path = tmp_path / "t.jsonl"
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=60)
    assert check_trace(path).complete


def test_a_forked_process_leaves_the_copy_of_a_pipe(tmp_path):
    """The copy of standard input is there until the process ends that has made it."""
    code = """
import os, sys
from kvcore.files import input_path

path = input_path("-")
child = os.fork()
if not child:
    sys.exit(0)
os.waitpid(child, 0)
print(path.read_text(), end="")
"""
    command, kept = [sys.executable, "-c", code], os.environ | {"TMPDIR": str(tmp_path)}
    assert subprocess.check_output(command, input=b"row", env=kept, timeout=60) == b"row"
    assert list(tmp_path.iterdir()) == []
