"""What verbs print, on a terminal and in a pipe."""

from __future__ import annotations

import io
import sys

import orjson
import pytest

from kvcore.cli.output import emit_json, print_table, progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        """Say so."""
        return True


def test_json_is_the_payload_alone(capsys):
    """Stdout has the payload, indented, and one newline; nothing is added."""
    payload = {"schema": 1, "rows": [{"name": "lru", "share": None}]}
    emit_json(payload)
    out, err = capsys.readouterr()
    assert orjson.loads(out) == payload
    assert out.startswith('{\n  "schema": 1,')
    assert out.endswith("}\n")
    assert err == ""


def test_json_without_schema_is_refused(capsys):
    """JSON that does not say its schema is never printed."""
    with pytest.raises(ValueError, match=r"needs a 'schema'; this has rows"):
        emit_json({"rows": []})
    assert capsys.readouterr().out == ""


def test_table_in_a_pipe_is_never_cut(capsys, monkeypatch):
    """In a pipe a row is one line and every cell is whole, whatever COLUMNS says."""
    monkeypatch.setenv("COLUMNS", "20")
    cells = ["a" * 300, "b " * 100 + "end"]
    print_table(["first", "second"], [cells])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "aaa" in line)
    assert line.split(maxsplit=1) == cells


def test_table_prints_text_as_it_is(capsys):
    """Brackets, colons and numbers are neither markup nor emoji nor coloured."""
    print_table(["run"], [["[red][9,-3] :smile:"]])
    assert "[red][9,-3] :smile:" in capsys.readouterr().out


def test_table_aligns_numbers(capsys):
    """Columns named as such are flush right."""
    print_table(["policy", "hits"], [["lru", 5], ["lfu", 12345]], right=["hits"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("l")] == [
        "lru          5",
        "lfu      12345",
    ]


def test_table_on_a_terminal_fits_it(monkeypatch):
    """On a terminal long cells wrap instead of running over."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    print_table(["words"], [["word " * 30]])
    rows = [line for line in terminal.getvalue().splitlines() if line.startswith("word ")]
    assert len(rows) > 1
    assert max(map(len, rows)) <= 40


def test_progress_in_a_pipe_is_silent(capsys, monkeypatch):
    """A pipe gets no progress, even where colour is forced."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress("replaying", total=3) as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal(monkeypatch, capsys):
    """A terminal sees what is done, on stderr."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with progress("replaying", total=3) as advance:
        advance(1)
        advance(2)
    assert "replaying" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()
    assert capsys.readouterr().out == ""
