"""Tests of the output of verbs to a terminal or a pipe: tables, texts, JSON, progress."""

from __future__ import annotations

import io
import json
import math
import sys
from contextlib import contextmanager

import orjson
import pytest
from click import Context
from helpers.commands import run_here
from helpers.traces import ask, lines, seal, write

from kvcore.errors import InputError
from kvcore.sections import Chart, Table
from kvcore.untrusted import escaped
from kvcore_cli import output
from kvcore_cli.main import loaded_verb
from kvcore_cli.output import emit_json, print_sections, print_table, print_text, progress
from kvcore_cli.verb import COMMAND_LINE, echo
from kvcore_replay.cli import whatif as asking


class Terminal(io.StringIO):
    """A stream that reports itself as a terminal."""

    def isatty(self):
        """Return True."""
        return True


def test_json_is_the_payload_alone(capsys):
    """`emit_json` prints the payload, indented, and one newline on stdout, and nothing else."""
    payload = {"schema": 1, "rows": [{"name": "lru", "share": None}]}
    emit_json(payload)
    out, err = capsys.readouterr()
    assert orjson.loads(out) == payload
    assert out.startswith('{\n  "schema": 1,')
    assert out.endswith("}\n")
    assert err == ""


def test_json_with_a_large_integer_has_null_for_what_is_no_number(capsys):
    """An integer beyond 64 bits is printed whole, and a NaN beside it is null, as ever."""
    emit_json({"schema": 1, "large": 2**70, "none": math.nan, "most": [math.inf]})

    def refuse(constant):
        pytest.fail(constant)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"schema": 1, "large": 2**70, "none": None, "most": [None]}


ZIPF = "zipf:requests=9"
ROW = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}'


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (("simulate", ZIPF, "--no-search", "--config", "c.toml"), ...),
        (
            ("simulate", "--trace=t.jsonl", "--no-search", ZIPF),
            ("simulate", "--no-search", ZIPF),
        ),
        (("compare", ZIPF, "--csv", "c", "--blocks=9"), ("compare", ZIPF, "--blocks=9")),
        (("compare", "--blocks", "9", "--jobs=2", ZIPF), ("compare", "--blocks", "9", ZIPF)),
        (("compare", ZIPF, "--blocks", "9", "--count", "tokens"), ...),
        (("demo", "paging", ZIPF, "--blocks", "99", "--no-chunked"), ...),
        (("plugins", "codec"), ...),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_a_document_has_the_words_that_make_it(tmp_path, words, kept):
    """Behind `schema` stand all words but those of options that change no result."""
    (tmp_path / "c.toml").write_text("blocks = 99\n")
    document = json.loads(run_here(*words, "--json", cwd=tmp_path).stdout)
    assert [*document][:2] == ["schema", "command"]
    assert document["command"] == ["kvcore", *(words if kept is ... else kept)]


def test_words_behind_two_dashes_are_no_options(tmp_path):
    """An argument that looks like an option of output stays in the command of a document."""
    (tmp_path / "--csv").write_text(ROW)
    words = ("compare", "--blocks", "9", "--", "--csv")
    run = run_here("compare", "--json", *words[1:], cwd=tmp_path)
    assert json.loads(run.stdout)["command"] == ["kvcore", *words]


def test_a_document_has_no_password():
    """Users, passwords and queries of URLs are left out of the command of a document."""
    words = "--tier", "redis:memory=1GiB,url=redis://me:secret@host/0?password=secret,ttl=9"
    with Context(loaded_verb("simulate")) as context:
        context.meta[COMMAND_LINE] = ("simulate", *words)
        command = output.command_field()["command"]
    assert command[-1] == "redis:memory=1GiB,url=redis://***@host/0,ttl=9"


def test_a_name_that_is_no_text_is_replaced():
    """A file whose name is not UTF-8 does not keep a document from being written."""
    with Context(loaded_verb("simulate")) as context:
        context.meta[COMMAND_LINE] = ("simulate", "a\udcff.jsonl")
        found = orjson.loads(output.json_bytes({"schema": 1}))
    assert found["command"] == ["kvcore", "simulate", "a\N{REPLACEMENT CHARACTER}.jsonl"]


def test_a_folder_of_results_has_the_command(tmp_path):
    """The summary of a run begins with the words that make it, and what was run."""
    run_here("simulate", ZIPF, "--no-search", "--out", "results", cwd=tmp_path)
    summary = json.loads((tmp_path / "results" / "summary.json").read_bytes())
    assert [*summary][:3] == ["schema", "command", "config"]
    assert summary["command"] == ["kvcore", "simulate", ZIPF, "--no-search"]


def test_a_table_without_columns_is_nothing(capsys):
    """A table without columns prints nothing."""
    print_table([], [])
    assert capsys.readouterr().out == ""


def test_json_without_schema_is_refused(capsys):
    """`emit_json` raises ValueError for a payload without a schema, and prints nothing."""
    with pytest.raises(ValueError, match=r"needs a 'schema'; this has rows"):
        emit_json({"rows": []})
    assert capsys.readouterr().out == ""


def test_table_in_a_pipe_is_never_cut(capsys, monkeypatch):
    """In a pipe each row is one line and each cell is whole, whatever COLUMNS is."""
    monkeypatch.setenv("COLUMNS", "20")
    cells = ["a" * 300, "b " * 100 + "end"]
    print_table(["first", "second"], [cells])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "aaa" in line)
    assert line.split(maxsplit=1) == cells


def test_tables_print_text_unchanged(capsys):
    """Brackets, colons and numbers in a cell are not read as markup, emoji or colours."""
    print_table(["run"], [["[red][9,-3] :smile:"]])
    assert "[red][9,-3] :smile:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("compact", "lines"),
    [
        (False, ["one", "", "k    n", "──────", "a   10", "", "two", "", "k    n"]),
        (True, ["one", "k    n", "──────", "a   10", "two", "", "k    n"]),
    ],
)
def test_blank_lines_separate_sections_that_are_not_empty(capsys, compact, lines):
    """Sections are separated by blank lines, compact ones before later tables alone.

    Charts and empty sections are skipped. All columns but the first are flush right.
    """
    table, empty = Table(["k", "n"], [["a", 10]]), Table(["k"], [])
    sections = ["", Chart("", "", "", []), "one", table, empty, "two", table]
    print_sections(*sections, compact=compact)
    assert capsys.readouterr().out.splitlines()[:-2] == lines


def test_table_aligns_numbers(capsys):
    """The columns named in `right` are flush right."""
    print_table(["policy", "hits"], [["lru", 5], ["lfu", 12345]], right=["hits"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("l")] == [
        "lru          5",
        "lfu      12345",
    ]


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that makes stdout a terminal with a given number of columns."""

    def make(columns):
        stream = Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "dumb")
        return stream

    return make


def printed(stream):
    """Return the lines that were printed to a stream."""
    return stream.getvalue().splitlines()


def test_a_table_fits_the_width_of_a_terminal(terminal):
    """On a terminal a long cell is wrapped within the width of the terminal."""
    terminal = terminal(40)
    print_table(["words"], [["word " * 30]])
    rows = [line for line in printed(terminal) if line.startswith("word ")]
    assert len(rows) > 1
    assert max(map(len, rows)) <= 40


@pytest.mark.parametrize("columns", [80, 60, 30, 5])
@pytest.mark.parametrize("split", [False, True])
def test_table_on_a_terminal_is_never_cut(terminal, columns, split):
    """On a terminal of any width no cell loses a character, and a short one is not wrapped."""
    stream = terminal(columns)
    sizes = [f"{size * 1000:,}" for size in range(1, 9)]
    shares = [f"{size}2.9% (64%)" for size in range(1, 9)]
    print_table(["eviction", *sizes], [["lfu:half_life=300,unit=s", *shares]], split=split)
    text = stream.getvalue()
    assert all(cell in text for cell in sizes + shares)
    assert "…" not in text
    first = "".join(line.split(" ")[0] for line in printed(stream) if "─" not in line)
    assert "lfu:half_life=300,unit=s" in first


@pytest.mark.parametrize("columns", [80, 60, 45])
def test_wide_table_is_split(terminal, columns):
    """A table that is too wide is split into tables, each with the first column."""
    stream = terminal(columns)
    sizes = [f"{size}2.9% (64%)" for size in range(1, 9)]
    print_table(["eviction", *sizes], [["lru", *sizes], ["optimum", *sizes]], split=True)
    tables = stream.getvalue().split("\n\n")
    assert max(map(len, printed(stream))) <= columns
    assert len(tables) > 1
    for table in tables:
        assert [line.split()[0] for line in table.splitlines() if "%" in line] == [
            "eviction",
            "lru",
            "optimum",
        ]


@pytest.mark.parametrize(("columns", "width"), [(40, 40), (120, 120), (None, 80)])
def test_sentences_wrap(terminal, capsys, columns, width):
    """Sentences wrap at the width of the terminal, or at 80 columns in a pipe.

    Line ends in the text are kept.
    """
    stream = None if columns is None else terminal(columns)
    print_text("first\n" + "word " * 60)
    first, *rest = (stream.getvalue() if stream else capsys.readouterr().out).splitlines()
    assert first == "first"
    assert width - 5 <= max(map(len, rest)) <= width
    assert sum(line.count("word") for line in rest) == 60


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose one number is the time in seconds that progress reads."""
    now = [100.0]
    monkeypatch.setattr(output, "monotonic", lambda: now[0])
    monkeypatch.delenv(output.PROGRESS_SECONDS)
    return now


def test_progress_in_a_pipe_is_a_line_every_ten_seconds(clock, capsys, monkeypatch):
    """In a pipe progress is a line every ten seconds, with the remaining time and no colour."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress("replaying", total=2000) as advance:
        for moment, done in [(109, 400), (110, 100), (119, 400), (121, 100), (130, 1000)]:
            clock[0] = moment
            advance(done)
    assert capsys.readouterr() == (
        "",
        "kvcore: replaying: 25%, 30 s left\nkvcore: replaying: 50%, 21 s left\n",
    )


@pytest.mark.parametrize(("every", "lines"), [("0", 0), ("2", 3)])
def test_the_interval_of_progress_lines_can_be_set(clock, capsys, monkeypatch, every, lines):
    """An environment variable sets the seconds between lines of progress; 0 prints none."""
    monkeypatch.setenv(output.PROGRESS_SECONDS, every)
    with progress("replaying", total=None) as advance:
        for moment in range(100, 107):
            clock[0] = moment
            advance(1)
    assert len(capsys.readouterr().err.splitlines()) == lines


@pytest.mark.usefixtures("clock")
def test_an_invalid_interval_of_progress_lines_is_refused(monkeypatch):
    """An invalid interval raises InputError that names the environment variable."""
    monkeypatch.setenv(output.PROGRESS_SECONDS, "often")
    with pytest.raises(InputError, match="KVCORE_PROGRESS_SECONDS: time 'often'"):
        progress("replaying", total=None).__enter__()


@pytest.mark.parametrize(
    ("done", "total", "seconds", "text"),
    [
        (3, 12, 10, "3 of 12, 30 s left"),
        (450, 1000, 90, "45%, 1 min 50 s left"),
        (1, 10**9, 10**-5, "0%, 2 h 46 min left"),
        (2400, None, 20, "2,400 (120/s)"),
        (13, 12, 4, "13 (3.25/s)"),
        (0, 12, 10, ""),
        (999.6, 1000, 10, "99%, 0 s left"),
        (1000, 1000, 10, "100%, 0 s left"),
        (5, None, 0, ""),
    ],
)
def test_progress_is_a_count_a_share_or_a_rate(done, total, seconds, text):
    """Progress is a count of few items, a share of many, and a rate if the total is unknown."""
    assert output.done_so_far(done, total, seconds) == text


def test_progress_of_reading_is_a_share_of_the_bytes(tmp_path, clock, capsys):
    """Progress of reading is a share of the file's size, or a rate if the file is missing."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4000))
    for each in (path, tmp_path / "none"):
        with output.reading("reading", each) as advance:
            clock[0] += 10
            advance(1000)
    first, second = capsys.readouterr().err.splitlines()
    assert (first, second) == (
        "kvcore: reading: 25%, 30 s left",
        "kvcore: reading: 1,000 (100/s)",
    )


@pytest.mark.parametrize(
    "verb",
    [
        ["replay", "FILE"],
        ["replay", "FILE", "--price", "openai"],
        ["whatif", "FILE", "--eviction", "fifo"],
        ["explain", "FILE", "--summary"],
        ["export", "FILE", "--to", "mooncake", "--out", "OUT"],
        ["export", "FILE", "--to", "vllm", "--out", "OUT"],
    ],
    ids=" ".join,
)
def test_readers_of_a_trace_report_progress(tmp_path, monkeypatch, verb):
    """Each verb that reads a trace reports progress up to the end of the file."""
    path = tmp_path / "t.jsonl"
    small = ["zipf:requests=40,prefixes=8", "--eviction", "lru", "--blocks", "300"]
    assert run_here("compare", *small, "--trace", path).returncode == 0
    shown = {}

    @contextmanager
    def noted(description, total):
        shown[description] = [total, 0]

        def tick(more):
            shown[description][1] += more

        yield tick

    monkeypatch.setattr(output, "progress", noted)
    monkeypatch.setattr(asking, "progress", noted)
    words = [str(path) if word == "FILE" else word for word in verb]
    done = run_here(*(str(tmp_path / "out") if word == "OUT" else word for word in words))
    assert done.returncode == 0, done.stderr
    assert shown
    assert all(total == done for total, done in shown.values())


def test_progress_on_a_terminal(monkeypatch, capsys):
    """On a terminal progress is shown on stderr, with its description and count."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with progress("replaying", total=3) as advance:
        advance(1)
        advance(2)
    assert "replaying" in terminal.getvalue()
    assert "3 of 3" in terminal.getvalue()
    assert capsys.readouterr().out == ""


CONTROLS = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\u202e", "\u2066", "\u2028"]


def controls(printed):
    """Return the control characters in a printed text, without line ends."""
    return [control for control in CONTROLS if control in printed and control != "\n"]


@pytest.mark.parametrize("error", [False, True])
def test_control_characters_are_printed_as_their_numbers(capsys, error):
    """Control characters other than tab and newline are printed as their numbers."""
    echo("".join(CONTROLS), err=error)
    printed = "".join(capsys.readouterr())
    assert controls(printed) == ["\t"]
    assert all(text in printed for text in ("<U+0008>\t\n<U+000B>", "<U+001B>", "<U+009B>"))
    assert printed.endswith("<U+202E><U+2066><U+2028>\n")


def test_text_without_control_characters_is_printed_unchanged():
    """Letters of any script, signs and emoji are not escaped."""
    text = "a ü 漢 \u05d0 😀 · ▁▂▃ –"
    assert escaped(text) == text


def test_sentences_and_tables_hold_no_control_characters(capsys):
    """Control characters in cells, headers and sentences are printed as their numbers."""
    print_text("a\x1b[31m\x85b")
    print_table(["x\x9bm", "y"], [["\x1b]0;title\x07", "\r1"]], right=["x\x9bm"])
    printed = capsys.readouterr().out
    assert "a<U+001B>[31m<U+0085>b" in printed
    assert controls(printed) == []


def test_json_has_no_control_characters(capsys):
    """JSON is printed without control characters, and parses to the payload."""
    payload = {"schema": 1, "text": "".join(CONTROLS) + "ü"}
    emit_json(payload)
    printed = capsys.readouterr().out
    assert orjson.loads(printed) == payload
    assert controls(printed) == []
    assert "ü" in printed


@pytest.mark.parametrize(
    "verb",
    [
        ["replay", "FILE"],
        ["whatif", "FILE", "--eviction", "fifo"],
        ["explain", "FILE", "--summary"],
        ["explain", "FILE", "a\x1b[31m"],
        ["explain", "FILE", "nobody\x1b[31m"],
        ["compare", "trace:FILE", "--blocks", "9", "--prometheus", "-"],
    ],
    ids=" ".join,
)
def test_texts_of_a_trace_are_printed_without_control_characters(tmp_path, verb):
    """Names, ids and options in a trace are printed without control characters."""
    path = write(tmp_path / "trace.jsonl", ask("a\x1b[31m", "ab", tenant="t\x1b[31m"))
    events = lines(path)
    events[0]["kvcore"] = "0.1.0\x1b[31m"
    events[0]["workload"] = {"name": "w\x1b[31m", "digest": "d", "options": {"\x1b": "\x9b"}}
    seal(path, events)
    done = run_here(*(word.replace("FILE", str(path)) for word in verb))
    assert done.stdout + done.stderr
    assert controls(done.stdout + done.stderr) == []


EVEN_TABLES = [
    (["policy", "hits"], [["lru", "5"], ["lfu:unit=s", "12,345"]], ["hits"]),
    (["", "p50", "p99"], [["TTFT", "1.5 s", "–"], ["", "", "3 × 4"]], ["p50", "p99"]),
    (["only"], [["x" * 200], ["[bold]no markup[/]"]], []),
    (["none", "here"], [], ["here"]),
]


@pytest.mark.parametrize(("headers", "rows", "right"), EVEN_TABLES)
def test_a_table_in_a_pipe_looks_as_rich_prints_tables(
    capsys, monkeypatch, headers, rows, right
):
    """A table that is printed without rich, for speed, looks as rich prints it."""
    print_table(headers, rows, right=right)
    assert output._is_even([headers, *rows])
    monkeypatch.setattr(output, "_is_even", lambda _: False)
    own = capsys.readouterr().out
    print_table(headers, rows, right=right)
    assert own == capsys.readouterr().out


@pytest.mark.parametrize("cell", ["漢字", "e\u0301", "two\nlines", " ahead", "tab\t", ""])
def test_wide_characters_and_empty_tables_are_left_to_rich(cell):
    """Cells whose width differs from their length, and empty tables, are left to rich."""
    assert not output._is_even([[cell], [cell]])


def test_headers_on_a_terminal_are_marked(terminal, monkeypatch):
    """On a terminal headers are bold, and control characters of cells are escaped."""
    stream = terminal(80)
    monkeypatch.setenv("TERM", "xterm")
    print_table(["policy"], [["\x1b[31mlru"]])
    header, _, row = printed(stream)
    assert header.startswith("\x1b[1mpolicy")
    assert row == "<U+001B>[31mlru"
