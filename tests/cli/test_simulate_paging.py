"""Tests of `kvcore simulate --allocation contiguous`, which runs beside paged memory."""

import json
from functools import partial

from helpers.commands import json_of, stdout_of

SMALL = (
    "zipf:requests=40,rate=2000,prefixes=4,prefix_tokens=64,suffix_tokens=32,output_tokens=8"
)
COMMAND = ["simulate", SMALL, "--allocation", "contiguous", "--blocks", "20"]

run = partial(stdout_of, *COMMAND)


def test_the_document_has_a_contiguous_and_a_paged_run():
    """The document has the contiguous run, and beside it the paged run as it is alone."""
    contiguous = json_of(*COMMAND, "--no-search")
    paged = json_of("simulate", SMALL, "--blocks", 20, "--no-search")
    config = paged.pop("config")
    beside = contiguous["paged"]
    assert paged["fragmentation"] is None
    same = dict.fromkeys(("wall_s", "fragmentation"))
    assert beside | same == paged | same
    assert contiguous["config"] == config | {"allocation": "contiguous"}
    assert contiguous["hit"]["hit_blocks"] == 0 < beside["hit"]["hit_blocks"]
    assert contiguous["fragmentation"]["running"] < beside["fragmentation"]["running"]


def test_the_table_is_readable():
    """The table has both runs side by side, in 80 columns."""
    out = run()
    text = " ".join(out.split())
    assert "320 tokens, contiguous: a request reserves its prompt and 8 tokens of" in text
    rows = [line.split() for line in out.splitlines()]
    assert rows.count(["contiguous", "paged"]) == 1
    assert ["completed", "40", "40"] in rows
    assert max(map(len, out.splitlines())) <= 80


def test_the_folder_of_results_has_no_trace(tmp_path):
    """`--out` has the summary of both runs and the requests, and no trace."""
    run("--out", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "summary.json",
        "requests.jsonl",
    }
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["fragmentation"] != summary["paged"]["fragmentation"]
