"""`kvcore simulate --allocation contiguous`: the same memory without paging, beside paged."""

import json

import pytest

from kvcore.cli import main as frame

SMALL = (
    "zipf:requests=40,rate=2000,prefixes=4,prefix_tokens=64,suffix_tokens=32,output_tokens=8"
)
COMMAND = ["simulate", SMALL, "--allocation", "contiguous", "--blocks", "20"]


@pytest.fixture
def run(capsys):
    """Return a function that runs the command and returns its exit code, stdout and stderr."""

    def command(*arguments):
        code = frame.run([*COMMAND, *map(str, arguments)])
        return code, *capsys.readouterr()

    return command


def test_both_are_run(run, capsys):
    """JSON has the contiguous run, and the paged one as it is alone, but measured."""
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
    """The runs stand side by side, in 80 columns."""
    _, out, _ = run()
    text = " ".join(out.split())
    assert "320 tokens, contiguous: a request reserves its prompt and 8 tokens of" in text
    (header,) = [line for line in out.splitlines() if line.split() == ["contiguous", "paged"]]
    assert f"\n{header}\n" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_directory_has_no_trace(run, tmp_path):
    """What can be written is: the summary of both runs, and the requests of the contiguous."""
    code, *_ = run("--out", tmp_path / "out")
    assert code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "summary.json",
        "requests.jsonl",
    }
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["fragmentation"] != summary["paged"]["fragmentation"]


def test_a_trace_is_refused(run, tmp_path):
    """Nothing can be replayed of memory without blocks, so nothing is written."""
    path = tmp_path / "trace.jsonl"
    code, out, err = run("--trace", path)
    assert (code, out) == (2, "")
    assert "use allocation='paged'" in err
    assert list(tmp_path.iterdir()) == []
