"""Results in a notebook: a table of escaped texts, a plot, and data frames."""

from __future__ import annotations

import re
import sys
from base64 import b64decode
from html.parser import HTMLParser

import attrs
import pytest
from helpers import traces

from kvcore import PluginError, compare, plan, simulate, simulate_cluster
from kvcore.notebook import data_frame
from kvcore.sections import Table
from kvcore_lab.curves.mrc import curve
from kvcore_lab.quality import Quality, QualityRow
from kvcore_lab.report.notebook import ROWS
from kvcore_lab.report.notebook import report_html as html
from kvcore_lab.router_comparison import compare_routers
from kvcore_lab.sweep import Grid, Journal, Plan, sweep
from kvcore_lab.sweep.executors import ThisProcess
from kvcore_replay.misses.explain import explain
from kvcore_replay.what_if import whatif

SMALL = "zipf:requests=60,prefixes=4,rate=40"

EVIL = "<script>alert(1)</script>&"


def swept(folder):
    """Return a small sweep."""
    with Journal(folder / "journal") as journal:
        grid = Grid("compare", workload=SMALL, eviction=["lru", "lfu"], blocks=[160, 400])
        return sweep(Plan.from_grid(grid), journal, executor=ThisProcess())


def traced(folder):
    """Return the trace of a small simulation."""
    simulate(SMALL, blocks=400, trace=folder / "run.jsonl")
    return folder / "run.jsonl"


def quality():
    """Return a quality report with a policy whose name is markup."""
    rows = []
    for name in ("full", EVIL):
        row = {field.name: 0.5 for field in attrs.fields(QualityRow)}
        row |= {"retention": name, "codec": "fp16", "needle_by_depth": None}
        rows.append(QualityRow(**row | ({"budget": None} if name == "full" else {})))
    fields = dict.fromkeys((field.name for field in attrs.fields(Quality)), 1)
    fields |= {"generator": "tiny", "dtype": "fp32", "full_codec": "fp16", "rows": rows}
    return Quality(**fields)


MADE = {
    "simulation": lambda _: simulate(SMALL),
    "cluster": lambda _: simulate_cluster(SMALL, replicas=2),
    "routers": lambda _: compare_routers(SMALL, "round-robin,lmetric", 2),
    "comparison": lambda _: compare(SMALL, "lru,optimum", [160, 400]),
    "curves": lambda _: curve(SMALL, "lru,optimum", [160, 400]),
    "plan": lambda _: plan(
        SMALL, slo="ttft=1", tier="none", tensor_parallel=1, max_gpus=1, policies=[]
    ),
    "sweep": swept,
    "what-if": lambda folder: whatif(traced(folder), eviction="lfu"),
    "explanation": lambda folder: explain(traced(folder)),
    "quality": lambda _: quality(),
}


class Reader(HTMLParser):
    """A parser that records elements, cell texts and the source of a picture."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.cells, self.source = set(), [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        """Record an element."""
        self.elements.add(tag)
        self.source = dict(attributes).get("src", self.source)

    def handle_data(self, data):
        """Record a text."""
        self.cells.append(data)


@pytest.mark.slow
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_results_show_a_table_and_a_plot(make, tmp_path):
    """Every result shows a table and a plot as an SVG picture, and no other elements."""
    pytest.importorskip("matplotlib")
    shown = Reader(make(tmp_path)._repr_html_())
    assert shown.elements == {"div", "p", "table", "thead", "tbody", "tr", "th", "td", "img"}
    kind, data = shown.source.split(",")
    assert kind == "data:image/svg+xml;base64"
    assert b64decode(data).startswith(b"<?xml")


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_without_matplotlib_only_the_table_is_shown(make, tmp_path, monkeypatch):
    """Without matplotlib a result shows its table and no picture."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = Reader(make(tmp_path)._repr_html_())
    assert "table" in shown.elements
    assert "img" not in shown.elements


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_results_give_their_sections(make, tmp_path):
    """Every result gives sentences first, and tables with a distinct header for each cell."""
    first, *others = make(tmp_path).sections()
    assert isinstance(first, str)
    widths = {
        (len(row), len(other.headers), len(set(other.headers)))
        for other in others
        if isinstance(other, Table)
        for row in other.rows
    }
    assert widths
    assert all(len(set(width)) == 1 for width in widths)


def test_texts_are_escaped(tmp_path):
    """Ids, policy names and file names that contain markup are escaped."""
    with traces.Trace(tmp_path / f"{EVIL.replace('/', '')}.jsonl") as trace:
        cache = traces.KVCache(8, traces.BLOCK, trace=trace)
        cache.close(cache.open(traces.ask(EVIL, "ab"), None, 1), 2)
    shown = Reader(explain(next(tmp_path.iterdir()))._repr_html_())
    assert "script" not in shown.elements
    assert any("<script>" in text for text in shown.cells)
    assert EVIL in Reader(quality()._repr_html_()).cells


def test_a_comparison_without_lookups_is_a_sentence():
    """A comparison without lookups shows a sentence, and no table or plot."""
    found = compare(SMALL, "lru", [9])
    nothing = attrs.evolve(found.infinite, lookup_blocks=0)
    shown = Reader(attrs.evolve(found, infinite=nothing)._repr_html_())
    assert shown.elements == {"div", "p"}


def test_a_long_table_is_cut(tmp_path):
    """A long table is cut, and the number of missing rows is shown."""
    found = swept(tmp_path)
    rows = [{**row, "blocks": blocks} for row in found.rows for blocks in range(ROWS)]
    shown = html(attrs.evolve(found, rows=rows))
    assert len(re.findall("<tr>", shown)) == 1 + ROWS
    assert "more row" not in shown
    rows = [{**row, "blocks": blocks} for row in found.rows for blocks in range(ROWS + 3)]
    assert "<p>3 more rows.</p>" in html(attrs.evolve(found, rows=rows))


def test_other_objects_have_no_view():
    """An object that is no result raises TypeError."""
    with pytest.raises(TypeError, match="no view of int"):
        html(3)


COLUMNS = {
    "simulation": {"id", "ttft_s", "hit_tokens"},
    "cluster": {"id", "replica", "ttft_s"},
    "routers": {"replicas", "router", "hit_ratio", "goodput"},
    "comparison": {"eviction", "blocks", "hit_ratio_block"},
    "curves": {"eviction", "options", "blocks", "hit_blocks", "hit_ratio"},
    "plan": {"replicas", "gpus", "pool_bytes", "slo_met"},
    "sweep": {"blocks", "eviction", "hit_ratio_block", "error"},
    "what-if": {"request", "recorded_hit_tokens", "rerun_hit_tokens"},
    "explanation": {"request", "state", "hit_tokens", "capacity_tokens"},
    "quality": {"retention", "codec", "kl"},
}


@pytest.mark.parametrize("kind", MADE)
def test_results_become_frames(kind, tmp_path):
    """Every result becomes a data frame with its columns and at least one row."""
    pytest.importorskip("polars")
    frame = MADE[kind](tmp_path).to_frame()
    assert COLUMNS[kind] <= set(frame.columns)
    assert len(frame) > 0


def test_frames_are_exported_by_arrow():
    """A frame can be imported through the Arrow PyCapsule interface."""
    pl = pytest.importorskip("polars")
    frame = compare(SMALL, "lru,lfu", [160]).to_frame()

    @attrs.frozen
    class Exported:
        """A frame of a library that offers only the Arrow PyCapsule interface."""

        inner: object

        def __arrow_c_stream__(self, requested_schema=None):
            return self.inner.__arrow_c_stream__(requested_schema)

    assert pl.DataFrame(Exported(frame)).equals(frame)


def test_without_polars_the_error_names_the_data(monkeypatch):
    """Without polars, the error names the data from which a frame can be made."""
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(PluginError, match="or make a frame of `it` yourself"):
        data_frame([], "`it`")


def test_a_result_is_short_where_nothing_draws_it(tmp_path):
    """A console shows no list with an item a request."""

    def lengths(requests):
        path, workload = tmp_path / f"{requests}.jsonl", f"zipf:requests={requests},rate=50"
        fleet = simulate_cluster(workload, replicas=2, blocks=900)
        served = simulate(workload, blocks=900, trace=path)
        return [len(repr(each)) for each in (fleet, served, whatif(path), explain(path))]

    for short, long in zip(lengths(20), lengths(200), strict=True):
        assert long < short + 100
