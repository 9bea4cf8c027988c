"""Tests of `kvcore simulate --allocation contiguous`, which runs beside paged memory."""

import json

import pytest

from kvcore.cli import main as frame

SMALL = (
    "zipf:requests=40,rate=2000,prefixes=4,prefix_tokens=64,suffix_tokens=32,output_tokens=8"
)
COMMAND = ["simulate", SMALL, "--allocation", "contiguous", "--blocks", "20"]


@pytest.fixture
def run(capsys):
    """Return a function that runs the command and returns exit code, stdout and stderr."""

    def command(*arguments):
        code = frame.run([*COMMAND, *map(str, arguments)])
        return code, *capsys.readouterr()

    return command


def test_the_document_has_a_contiguous_and_a_paged_run(run, capsys):
    """The document has the contiguous run, and beside it the paged run as it is alone."""
    code, out, err = run("--json", "--no-search")
    assert (code, err) == (0, "")
    contiguous = json.loads(out)
    frame.run(["simulate", SMALL, "--blocks", "20", "--no-search", "--json"])
    paged = json.loads(capsys.readouterr().out)
    config = paged.pop("config")
    beside = contiguous["paged"]
    assert paged["fragmentation"] is None
    same = dict.fromkeys(("wall_s", "fragmentation"))
    assert beside | same == paged | same
    assert contiguous["config"] == config | {"allocation": "contiguous"}
    assert contiguous["hit"]["hit_blocks"] == 0 < beside["hit"]["hit_blocks"]
    assert contiguous["fragmentation"]["running"] < beside["fragmentation"]["running"]


def test_the_table_is_readable(run):
    """The table has both runs side by side, in 80 columns."""
    _, out, _ = run()
    text = " ".join(out.split())
    assert "320 tokens, contiguous: a request reserves its prompt and 8 tokens of" in text
    rows = [line.split() for line in out.splitlines()]
    assert rows.count(["contiguous", "paged"]) == 1
    assert ["completed", "40", "40"] in rows
    assert max(map(len, out.splitlines())) <= 80


def test_the_folder_of_results_has_no_trace(run, tmp_path):
    """`--out` has the summary of both runs and the requests, and no trace."""
    code, *_ = run("--out", tmp_path / "out")
    assert code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "summary.json",
        "requests.jsonl",
    }
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["fragmentation"] != summary["paged"]["fragmentation"]


def test_a_trace_is_refused(run, tmp_path):
    """`--trace` is an error with contiguous memory, and nothing is written."""
    path = tmp_path / "trace.jsonl"
    code, out, err = run("--trace", path)
    assert (code, out) == (2, "")
    assert "use allocation='paged'" in err
    assert list(tmp_path.iterdir()) == []
