"""Tests of the inputs of verbs: standard input, pipes, and a part of a workload."""

import io
import json
import os
import sys
from threading import Thread
from types import SimpleNamespace

import pytest
from helpers.commands import as_process, run_here

from kvcore import files

LINE = '{"timestamp":%d,"input_length":512,"output_length":1,"hash_ids":[%d]}\n'

ROWS = "".join(LINE % (1000 * n, n % 3) for n in range(8))
"""Eight requests, one per second."""


@pytest.fixture
def stdin(monkeypatch):
    """Yield a function that replaces standard input by a text."""

    def give(text):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))

    files._copy.cache_clear()
    yield give
    files._copy.cache_clear()


def requests_of(document):
    """Return the number of requests in the JSON document of a verb."""
    found = document.get("requests") or document["workload"]["requests"]
    return found["admitted"] if isinstance(found, dict) else found


@pytest.mark.parametrize(
    "line",
    [
        "simulate - --json",
        "compare - --eviction lru,optimum --blocks 2 --json",
        "compare mooncake:- --blocks 2 --json",
        "compare mooncake:path=- --blocks 2 --json",
        "curve - --sizes 1,2 --eviction fifo --jobs 1 --json",
        "explain - --summary --blocks 2 --json",
    ],
)
def test_a_workload_is_read_from_stdin(stdin, line):
    """A workload is read from standard input, even if the verb reads it several times."""
    stdin(ROWS)
    done = run_here(*line.split())
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert requests_of(document) == 8


def test_standard_input_is_named_by_a_dash(stdin, tmp_path):
    """Errors and traces name standard input `-`, not a temporary file.

    Traces of equal runs are equal.
    """
    for name in ("one", "two"):
        files._copy.cache_clear()
        stdin(ROWS)
        run_here(
            "compare", "-", "--blocks", "2", "--eviction", "lru", "--trace", name, cwd=tmp_path
        )
    first = (tmp_path / "one").read_bytes()
    assert first == (tmp_path / "two").read_bytes()
    assert b'"path":"-"' in first
    files._copy.cache_clear()
    stdin('{"no": "format"}')
    assert run_here("compare", "-").stderr.startswith("kvcore: error: -: no known workload")


def test_a_trace_is_read_from_stdin(stdin, tmp_path):
    """`replay`, `whatif`, `explain` and `export` read a trace from standard input."""
    stdin(ROWS)
    assert run_here("simulate", "-", "--trace", "t.jsonl", cwd=tmp_path).returncode == 0
    for line in (
        "replay -",
        "whatif - --eviction lfu",
        "explain - --summary",
        "export - --to mooncake --out requests.jsonl",
    ):
        files._copy.cache_clear()
        stdin((tmp_path / "t.jsonl").read_text())
        done = run_here(*line.split(), cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("stdin")
def test_a_workload_is_read_from_a_pipe(tmp_path):
    """A workload is read from a pipe, such as the one of `kvcore compare <(zcat FILE)`."""
    os.mkfifo(tmp_path / "pipe")
    writer = Thread(target=(tmp_path / "pipe").write_text, args=(ROWS,))
    writer.start()
    done = run_here("compare", "pipe", "--blocks", "2", "--json", cwd=tmp_path)
    writer.join()
    assert json.loads(done.stdout)["workload"]["requests"] == 8


@pytest.mark.parametrize("source", ["w.jsonl", "-", "/dev/stdin", "/dev/fd/0"])
def test_no_trace_is_written_over_requests_on_standard_input(tmp_path, source):
    """The file that is standard input is not written over, by whatever name it is read."""
    path = tmp_path / "w.jsonl"
    path.write_text(ROWS)
    with path.open() as file:
        done = as_process("simulate", source, "--trace", "w.jsonl", cwd=tmp_path, stdin=file)
    assert (done.returncode, path.read_text()) == (2, ROWS)
    assert "cannot write w.jsonl: the requests come from" in done.stderr


@pytest.mark.parametrize(
    ("options", "requests"),
    [
        (["--limit", "3"], 3),
        (["--limit", "0"], 8),
        (["--window", "2:5"], 3),
        (["--window", "2:", "--limit", "2"], 2),
    ],
)
@pytest.mark.parametrize("verb", ["simulate", "compare", "curve", "explain", "run"])
def test_limit_and_window_select_a_part_of_a_workload(tmp_path, verb, options, requests):
    """Every verb runs the first `--limit` requests of those that arrive in `--window`."""
    if verb == "run":
        pytest.importorskip("torch")
    (tmp_path / "w.jsonl").write_text(ROWS)
    more = {
        "compare": ["--eviction", "lru", "--blocks", "2"],
        "curve": ["--sizes", "1,2", "--eviction", "fifo", "--jobs", "1"],
        "explain": ["--summary", "--blocks", "2"],
        "run": ["--shrink", "512"],
    }
    done = run_here(verb, "w.jsonl", *options, *more.get(verb, []), "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert requests_of(json.loads(done.stdout)) == requests


def test_limit_and_window_are_axes_of_a_sweep(tmp_path):
    """`limit` and `window` are axes of a sweep, and columns only if they are given."""
    (tmp_path / "w.jsonl").write_text(ROWS)
    common = "workload = 'w.jsonl'\nblocks = 100\nmode = 'compare'\n"
    for name, text in (("part", "limit = [2, 5]\nwindow = '1:'\n"), ("whole", "")):
        (tmp_path / f"{name}.toml").write_text(common + text)
        done = run_here("sweep", f"{name}.toml", "--jobs", "1", "--json", cwd=tmp_path)
        rows = json.loads(done.stdout)["rows"]
        parts = [(row.get("limit"), row.get("window"), row["requests"]) for row in rows]
        assert parts == ([(2, "1:", 2), (5, "1:", 5)] if name == "part" else [(None, None, 8)])


def test_the_header_of_a_trace_has_the_window(tmp_path):
    """The header of a trace has the window of the workload, and `replay` runs it again."""
    (tmp_path / "w.jsonl").write_text(ROWS)
    line = "simulate w.jsonl --window 2:5 --trace t.jsonl"
    assert run_here(*line.split(), cwd=tmp_path).returncode == 0
    header = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0])
    assert header["workload"]["name"] == "mooncake"
    assert header["workload"]["options"]["window"] == "2:5"
    done = run_here("whatif", "t.jsonl", "--eviction", "lfu", "--json", cwd=tmp_path)
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document["recorded"]["completed"] == document["rerun"]["completed"] == 3


def test_an_option_of_an_earlier_release_works_with_a_warning(tmp_path):
    """An option name of an earlier release works with a FutureWarning."""
    words = ("compare", "kv-events:file=none.jsonl,lookups=full")
    with pytest.warns(FutureWarning, match="'file' of workload plugin 'kv-events' is called"):
        done = run_here(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot read the recording none.jsonl: No such file" in done.stderr
