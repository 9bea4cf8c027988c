"""Pages of traces with cache groups."""

import json

import pytest
from helpers.commands import run_here
from helpers.pages import data_of

from kvcore import read_events
from kvcore_pages.report import report_page
from kvcore_replay.misses.explain import explain
from kvcore_replay.timeline import Timeline

RUN = (
    *("simulate", "zipf:requests=60,rate=40,prefixes=4", "--model", "gpt-oss-20b"),
    *("--tensor-parallel", 1, "--blocks", 1200, "--out", "run", "--no-search"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the result of a run of gpt-oss, and explanations of its trace."""
    folder = tmp_path_factory.mktemp("groups")
    made = run_here(*RUN, cwd=folder)
    assert made.returncode == 0, made.stderr
    for name, arguments in (("all", ["--summary"]), ("one", ["9"])):
        told = run_here("explain", "run/trace.jsonl.gz", *arguments, "--json", cwd=folder)
        (folder / f"{name}.json").write_text(told.stdout)
    return folder


def parts(*files):
    """Return the parts of the first section of a report, by caption or title, and its text."""
    found = data_of(report_page(list(files)), "report")
    named = {
        part.get("caption") or part.get("title"): part for part in found["sections"][0]["parts"]
    }
    return named, json.dumps(found, ensure_ascii=False)


def test_the_report_of_a_run_has_its_groups(folder):
    """A report has the blocks of each group over time, and what each was short for."""
    trace = folder / "run/trace.jsonl.gz"
    found, text = parts(folder / "run")
    series, explained = Timeline.read(trace).series, explain(trace)
    lines = found["Cache groups"]["lines"]
    assert [line["name"] for line in lines] == [f"group {name}" for name in series.groups]
    short = explained.summary().groups
    rows = found["Tokens that a cache group was short for"]["rows"]
    assert [row[2] for row in rows] == [f"{each.tokens:,}" for each in short]
    assert "There is no optimum of a cache of groups" in text


@pytest.mark.parametrize("name", ["all.json", "one.json"])
def test_explanations_with_groups_are_reported(name, folder):
    """A page shows the document of `explain`, whose reasons are those of groups."""
    _, text = parts(folder / name)
    categories = explain(folder / "run/trace.jsonl.gz").categories
    document = json.loads((folder / name).read_text())
    if name == "one.json":
        named = {loss["category"] for loss in document["losses"]}
    else:
        named = {name for name, lost in document["lost"].items() if lost["tokens"]}
    assert named
    assert all(categories[each] in text for each in named)


def test_the_trace_of_a_result_has_the_groups_of_its_summary(folder):
    """`--out` writes a trace of a model with groups, whose header has those of the summary."""
    header = next(iter(read_events(folder / "run/trace.jsonl.gz"))).as_dict()
    summary = json.loads((folder / "run/summary.json").read_text())
    assert header["cache_groups"] == summary["config"]["cache_groups"]
