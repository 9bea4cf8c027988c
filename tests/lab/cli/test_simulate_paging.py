"""Tests of `kvcore demo paging`, and of `kvcore simulate --allocation contiguous`."""

import json

from helpers.commands import run_here

SMALL = (
    "zipf:requests=40,rate=2000,prefixes=4,prefix_tokens=64,suffix_tokens=32,output_tokens=8"
)
OLD = ("simulate", SMALL, "--allocation", "contiguous", "--blocks", "20")
DEMO = ("demo", "paging", SMALL, "--blocks", "20")
NOTICE = "kvcore: --allocation contiguous is `kvcore demo paging` now; use that\n"


def test_the_document_has_a_contiguous_and_a_paged_run():
    """The document has the contiguous run, and beside it the paged run as it is alone."""
    done = run_here(*DEMO, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    contiguous = json.loads(done.stdout)
    alone = run_here("simulate", SMALL, "--blocks", "20", "--no-search", "--json")
    paged = json.loads(alone.stdout)
    config = paged.pop("config")
    for field in ("command", "savings", "rates", "cost", "turns"):  # of a run alone
        del paged[field]
    beside = contiguous["paged"]
    assert paged["fragmentation"] is None
    same = dict.fromkeys(("wall_s", "fragmentation"))
    assert beside | same == paged | same
    assert contiguous["config"] == config | {"allocation": "contiguous"}
    assert contiguous["hit"]["hit_blocks"] == 0 < beside["hit"]["hit_blocks"]
    assert contiguous["fragmentation"]["running"] < beside["fragmentation"]["running"]


def test_the_earlier_option_has_the_same_document_and_a_notice():
    """`--allocation contiguous` prints the document of the demo, a search, and a notice."""
    done = run_here(*OLD, "--json")
    assert (done.returncode, done.stderr) == (0, NOTICE)
    earlier, document = (
        json.loads(text) for text in (done.stdout, run_here(*DEMO, "--json").stdout)
    )
    assert earlier["saturation"].pop("holds") == {"rate_scale": 0.08}
    assert document["saturation"].pop("holds") is None
    for each in (earlier, earlier["paged"], document, document["paged"]):
        del each["wall_s"]
    del earlier["command"], document["command"]
    assert earlier == document


def test_the_table_is_readable():
    """The table has both runs side by side, in 80 columns."""
    out = run_here(*DEMO).stdout
    text = " ".join(out.split())
    assert "320 tokens, contiguous: a request reserves its prompt and 8 tokens of" in text
    rows = [line.split() for line in out.splitlines()]
    assert rows.count(["contiguous", "paged"]) == 1
    assert ["completed", "40", "40"] in rows
    assert max(map(len, out.splitlines())) <= 80


def test_the_folder_of_results_has_no_trace(tmp_path):
    """`--out` has the summary of both runs and the requests, and no trace."""
    assert run_here(*OLD, "--out", tmp_path / "out").returncode == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "summary.json",
        "requests.jsonl",
    }
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["fragmentation"] != summary["paged"]["fragmentation"]
