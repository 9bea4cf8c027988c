"""Pages of traces with cache groups."""

import json
import re
from itertools import islice

import pytest
from helpers.browser import tab
from helpers.commands import run_here
from helpers.pages import data_of

from kvcore import read_events
from kvcore_pages.report import report_page
from kvcore_pages.view import view_page
from kvcore_replay.misses.explain import explain
from kvcore_replay.state.groups import GroupState
from kvcore_replay.timeline import Timeline

WORK = ("simulate", "zipf:requests=60,rate=40,prefixes=4", "--blocks", 1200, "--no-search")
GROUPED = (*WORK, "--model", "gpt-oss-20b", "--tensor-parallel", 1)
RUN = (*GROUPED, "--out", "run")

COMPARED = """(part) => {
  const { playback } = kvcore.sides[0];
  kvcore.seek(playback.times[Math.floor((playback.length - 1) * part)]);
  for (const panel of kvcore.panels) panel.draw();
  const flags = (side) => kvcore.colouring.onlyHere(side);
  return [
    kvcore.sides.map(({ row }) => row),
    kvcore.sides.map((side) =>
      side.cache.cached - flags(side).reduce((sum, flag) => sum + flag, 0)),
    [...document.querySelectorAll("#figures td:last-child")].map((cell) => cell.textContent),
    document.querySelector(".now-here")?.textContent,
  ];
}"""


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


@pytest.fixture(scope="module")
def others(folder):
    """Return the folder, with a trace of another policy and one without groups."""
    for name, words in (("lfu", (*GROUPED, "--eviction", "lfu")), ("plain", WORK)):
        made = run_here(*words, "--trace", f"{name}.jsonl", cwd=folder)
        assert made.returncode == 0, made.stderr
    return folder


def held(file, row):
    """Return the groups and names of the blocks that are cached after a row, with copies."""
    events = iter(read_events(file))
    state = GroupState(next(events))
    for event in islice(events, row):
        state.apply(event)
    return [(each.group, each.name) for each in state.blocks.values() if each.name is not None]


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.6, 0.9])
def test_what_is_cached_only_here_is_counted_by_group(browser, others, part):
    """A content is that of a group, and one that is there twice is one of a prompt's blocks."""
    files = [others / "run/trace.jsonl.gz", others / "lfu.jsonl"]
    (others / "two.html").write_bytes(view_page(files))
    with tab(browser) as opened:
        page = opened.open(others / "two.html")
        page.evaluate("() => kvcore.choose({ side: kvcore.sides[0], request: 3 })")
        rows, both, only, now = page.evaluate(COMPARED, part)
        assert opened.complaints == []
    left, right = map(held, files, rows)
    expected = [
        sum(each not in other for each in mine)
        for mine, other in ((left, {*right}), (right, {*left}))
    ]
    assert any(expected)
    assert only == [f"{each:,}" for each in expected]
    assert both == [
        len(mine) - each for mine, each in zip((left, right), expected, strict=True)
    ]
    blocks, cached = map(
        int, re.search(r"Of the (\d+) blocks of its prompt (\d+) ", now).groups()
    )
    assert cached <= blocks


@pytest.mark.slow
def test_traces_with_other_groups_are_not_compared(browser, others):
    """Beside a trace without groups no eviction is said to differ, or to be the same."""
    (others / "odd.html").write_bytes(view_page([others / "lfu.jsonl", others / "plain.jsonl"]))
    with tab(browser) as opened:
        page = opened.open(others / "odd.html")
        _, _, only, _ = page.evaluate(COMPARED, 0.5)
        assert only == ["", ""]
        text = page.inner_text("main")
        assert opened.complaints == []
    assert "Their cache groups differ, so their contents cannot be compared" in text
    assert "Only here" not in text
    assert "hollow: as the other does" not in text


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
