"""The journal of a sweep: torn and damaged files, locks, and files that are no journals."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import InputError, StorageError
from kvcore_lab.sweep import Journal

CELLS = {f"{index:032x}": {"hit_blocks": index, "ratio": index / 7} for index in range(5)}


def write(path, cells):
    """Add cells to a journal."""
    with Journal(path) as journal:
        for digest, result in cells.items():
            journal.add(digest, {"blocks": 3}, result, 0.25)


def read(path):
    """Return the results of a journal."""
    with Journal(path) as journal:
        return journal.results


def test_a_line_has_the_axes_and_the_result_of_its_cell(tmp_path):
    """A line has the axes, the result and the wall time of its cell, as readable JSON."""
    write(tmp_path / "j", {"ab": {"hits": 1}})
    *_, line = (tmp_path / "j").read_text().splitlines()
    expected = {"cell": "ab", "axes": {"blocks": 3}, "result": {"hits": 1}, "wall_s": 0.25}
    assert json.loads(line) == expected | {"digest": "031436fa45913f14"}


@given(data=st.data())
def test_an_incomplete_last_line_is_cut_off(tmp_path_factory, data):
    """A file cut at any byte keeps its whole lines.

    Lines that are added afterwards are readable.
    """
    path = tmp_path_factory.mktemp("torn") / "j"
    write(path, CELLS)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = whole[:cut].count(b'"}\n', whole.index(b"\n") + 1)
    assert list(read(path)) == list(CELLS)[:kept]
    write(path, {"ff": {"hits": 1}})
    assert list(read(path)) == [*list(CELLS)[:kept], "ff"]


@given(data=st.data())
def test_a_changed_byte_loses_cells_but_changes_no_result(tmp_path_factory, data):
    """A changed byte loses at most two cells, and changes the result of none.

    Unless it is the last byte, the journal reports a damaged line.
    """
    path = tmp_path_factory.mktemp("changed") / "j"
    write(path, CELLS)
    damaged = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    with Journal(path) as journal:
        assert journal.results.items() <= CELLS.items()
        assert len(journal.results) >= len(CELLS) - 2
        assert journal.damaged or place == len(damaged) - 1


def test_a_line_edited_by_hand_is_reported_as_damaged(tmp_path):
    """The number of a line edited by hand is in `damaged`, and its cell is ignored.

    The file is not rewritten, and a result that is added for the cell counts.
    """
    write(tmp_path / "j", CELLS)
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"hit_blocks":1,', b'"hit_blocks":2,')
    (tmp_path / "j").write_bytes(b"".join(lines))
    digest, *others = [*CELLS][1], *[*CELLS][:1], *[*CELLS][2:]
    with Journal(tmp_path / "j") as journal:
        assert (journal.damaged, [*journal.results]) == ([3], others)
    with journal:
        assert (journal.damaged, [*journal.results]) == ([3], others)
        journal.add(digest, {}, CELLS[digest], 0.5)
    assert read(tmp_path / "j") == CELLS
    assert (tmp_path / "j").read_bytes().startswith(b"".join(lines))


@pytest.mark.parametrize(
    "text",
    [
        '{"schema":1,"run":{"pid":1}}\n{"cell":"ab","axes":{},"result":{},"wall_s":1}\n',
        '{"schema":1,"run":{"pid":1}}\n',
        '{"a":1}\n',
        "1,2\n3,4",
        "text",
    ],
)
def test_a_file_that_is_no_journal_is_refused(tmp_path, text):
    """A file that is no journal of this version is refused and remains unchanged.

    Among them are a journal without digests, other JSON lines, and a table.
    """
    (tmp_path / "j").write_text(text)
    with pytest.raises(InputError, match=r"j:1: no line .* older kvcore: remove .* again"):
        read(tmp_path / "j")
    assert (tmp_path / "j").read_text() == text


def test_a_journal_in_use_is_refused(tmp_path):
    """Opening a journal that is in use raises InputError with the id of the other process."""
    with Journal(tmp_path / "j"), pytest.raises(InputError) as refused, Journal(tmp_path / "j"):
        pass
    assert f"process {os.getpid()} is using it" in str(refused.value)


def test_a_journal_of_a_killed_process_can_be_opened(tmp_path):
    """A journal of a killed process can be opened again without removing any file."""
    code = (
        "import os, signal, sys; from kvcore_lab.sweep import Journal\n"
        "with Journal(sys.argv[1]) as journal:\n"
        "    journal.add('ab', {}, {'hits': 1}, 0.5)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "j"], check=False)
    assert done.returncode == -9
    assert read(tmp_path / "j") == {"ab": {"hits": 1}}


def test_a_closed_journal_writes_to_no_file(tmp_path):
    """The number that its file had may be that of another file, which stays as it is."""
    with Journal(tmp_path / "j") as journal:
        pass
    with (tmp_path / "other").open("w"), pytest.raises(StorageError, match="cannot write"):
        journal.add("ab", {}, {"hits": 1}, 0.25)
    assert not (tmp_path / "other").read_text()


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch):
    """On a file system without locks the error gives the reason of the system.

    It does not report that another process uses the journal.
    """

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    path = tmp_path / "journal.jsonl"
    with pytest.raises(InputError, match=r"cannot be locked .* \(No locks available\)"):
        Journal(path).__enter__()


@pytest.mark.parametrize(("option", "name"), [((), "journal"), (("--out",), "--out")])
def test_an_error_names_the_option_of_the_journal(option, name, tmp_path):
    """Python has another option than the command line."""
    (tmp_path / "j").write_text("text")
    with pytest.raises(InputError, match=f"give another {name}$"):
        Journal(tmp_path / "j", *option).__enter__()


def test_a_journal_in_a_missing_directory_is_refused(tmp_path):
    """A journal in a missing directory raises InputError that names its path."""
    with pytest.raises(InputError, match="nowhere/j: cannot be written"):
        read(tmp_path / "nowhere" / "j")


def test_a_journal_works_where_files_have_no_locks(tmp_path):
    """Without `fcntl`, as on Windows, a journal is written and read all the same."""
    code = (
        "import importlib, sys, kvcore_lab.sweep.journal as module\n"
        "sys.platform = 'win32'; sys.modules['fcntl'] = None; del module.fcntl\n"
        "Journal = importlib.reload(module).Journal\n"
        "with Journal(sys.argv[1]) as journal: journal.add('00', {}, {'a': 1}, 0.0)\n"
        "with Journal(sys.argv[1]) as journal: print(journal.results)\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "journal.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "{'00': {'a': 1}}\n", done.stderr
