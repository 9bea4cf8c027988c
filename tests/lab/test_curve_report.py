"""Hit curves as a table, CSV, JSON and a plot."""

from __future__ import annotations

import csv
import io
import json
import sys
from array import array

import attrs
import pytest

from kvcore import PluginError
from kvcore.models.catalogue import find_model
from kvcore.models.memory import KVLayout
from kvcore_lab.comparison import Source
from kvcore_lab.curves.mrc import Curve, Curves, Steps
from kvcore_lab.report.mrc import CurvesReport, percent
from kvcore_replay.report.charts import plot_chart
from kvcore_replay.report.figure import FORMS

PNG = b"\x89PNG\r\n"
LAYOUT = KVLayout(find_model("llama-3.1-8b"), "fp16", 16)


def example_curves(*curves, looked_up=200, distinct=100):
    """Return curves of a workload called `chat`, half of whose blocks can hit."""
    return Curves(
        workload=Source(name="chat", digest="00", requests=7, key_tokens=16, options={}),
        accounting="keys",
        block_size=16,
        lookup_blocks=looked_up,
        distinct_blocks=distinct,
        hit_blocks=looked_up // 2,
        curves=list(curves),
    )


def curve_of(eviction="lru", blocks=(1, 10, 100), hits=(1, 30, 100), steps=None, **options):
    """Return the curve of one policy."""
    return Curve(
        eviction=eviction,
        options=options,
        blocks=list(blocks),
        hit_blocks=list(hits),
        steps=steps,
    )


EXACT = curve_of(steps=Steps(array("q", [0, 1, 10, 100]), array("q", [0, 1, 28, 98])))
CURVES = example_curves(EXACT, curve_of("lfu", half_life=60), curve_of("optimum", bypass=True))


def test_the_table_has_sizes_by_policies():
    """A row has the blocks, their share of the footprint, and a hit ratio for each policy."""
    report = CurvesReport(CURVES)
    assert report.table.headers == ["blocks", "of all", "lru", "lfu", "optimum"]
    assert report.table.rows[1] == ["10", "10%", "15.0%", "15.0%", "15.0%"]


def test_with_a_layout_sizes_have_bytes():
    """With a layout the table, the text and the document give sizes in bytes.

    A block of 16 tokens of Llama 3.1 8B takes 2 MiB.
    """
    report = CurvesReport(CURVES, LAYOUT)
    assert report.table.headers[2] == "memory"
    assert [row[2] for row in report.table.rows] == ["2 MiB", "20 MiB", "200 MiB"]
    assert "16 tokens of llama-3.1-8b in fp16 takes 2 MiB" in report.reading
    assert report.document()["memory"]["bytes_per_block"] == 2 * 2**20


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (0.05, "5.0% that the log reports from 4 blocks on."),
        (0.8, "80.0% that the log reports in"),
    ],
)
def test_the_pool_that_hits_what_a_log_reports_is_told(ratio, told):
    """With an exact curve the text has the least pool in which LRU hits as much as the log."""
    source = attrs.evolve(CURVES.workload, reported_hit_ratio=ratio)
    curves = attrs.evolve(CURVES, workload=source)
    assert f" lru hits the {told}" in CurvesReport(curves).reading
    unknown = attrs.evolve(curves, curves=curves.curves[1:])
    assert "reports" not in CurvesReport(unknown).reading


def test_the_csv_has_a_row_for_each_policy_and_size():
    """The CSV has a row for each policy and size; bytes are empty without a layout."""
    file = io.StringIO()
    CurvesReport(CURVES).write_csv(file)
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert len(rows) == 9
    assert json.loads(rows[3]["options"]) == {"half_life": 60}
    assert (rows[4]["blocks"], rows[4]["bytes"], rows[4]["hit_ratio"]) == ("10", "", "0.15")


def test_a_report_without_lookups_has_no_table():
    """If nothing is looked up, the headline says so and the report has no table."""
    report = CurvesReport(
        example_curves(curve_of(blocks=[1], hits=[0]), looked_up=0, distinct=0)
    )
    assert report.empty
    assert "Nothing in them has a key" in report.headline
    short = attrs.evolve(report.curves.workload, longest_prompt=9)
    report = CurvesReport(attrs.evolve(report.curves, workload=short))
    assert "No prompt fills a block of 16 tokens (the longest has 9)" in report.headline
    assert report.document()["infinite"]["hit_ratio"] is None


def test_pools_of_private_blocks_are_no_share_of_a_footprint():
    """A cache that keeps nothing, since all blocks are private, has no footprint."""
    report = CurvesReport(example_curves(curve_of(blocks=(1,), hits=(0,)), distinct=0))
    assert report.table.rows == [["1", "–", "0.0%"]]


@pytest.mark.parametrize(
    ("share", "text"),
    [
        *[(1, "100%"), (0.123, "12%"), (0.001, "0.1%"), (0.997, "100%"), (1.5, "150%")],
        *[(12.34, "1,234%"), (170.123, "17,012%")],
    ],
)
def test_percent_has_two_significant_digits(share, text):
    """`percent` prints two digits, from 1,000% on all whole ones, and no exponent."""
    assert percent(share) == text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", [None, LAYOUT])
def test_plots_of_equal_curves_have_equal_bytes(form, layout):
    """Plotting the same curves twice gives the same bytes."""
    pytest.importorskip("matplotlib")
    first, second = (plot_chart(CurvesReport(CURVES, layout).chart(), form) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    "curves",
    [
        example_curves(curve_of(blocks=[5], hits=[3])),
        example_curves(curve_of(blocks=[1], hits=[0]), looked_up=0, distinct=0),
        example_curves(*(curve_of(f"policy-{index}") for index in range(12))),
        example_curves(curve_of(blocks=[1, 1000], hits=[0, 100])),
    ],
    ids=["one size", "nothing", "many policies", "beyond the footprint"],
)
def test_unusual_curves_can_be_plotted(curves):
    """Unusual curves can be plotted.

    They have one size, no look-up, more policies than colours, or a pool larger than the
    footprint.
    """
    pytest.importorskip("matplotlib")
    assert plot_chart(CurvesReport(curves, LAYOUT).chart(), "png").startswith(PNG)


def test_an_exact_curve_has_a_point_at_many_sizes():
    """An exact curve has a point at many sizes, and others have one at each of their own."""
    (panel,) = CurvesReport(CURVES).chart().panels
    assert [size for size, _ in panel.lines["lru"]] == list(range(1, 101))
    assert panel.lines["lfu"] == [(1, 0.005), (10, 0.15), (100, 0.5)]


def test_the_axis_has_blocks_or_bytes():
    """The axis of a chart has blocks, or with a layout the memory that they take."""
    bare, sized = (CurvesReport(CURVES, layout).chart() for layout in (None, LAYOUT))
    assert (bare.across, bare.axis_text(10)) == ("pool, blocks of 16 tokens", "10")
    assert sized.across == "K/V memory of the pool (llama-3.1-8b, fp16)"
    assert sized.axis_text(10) == "20 MiB"


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    """Without matplotlib a plot raises PluginError with the extra to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PluginError, match=r"pip install 'kvcore\[lab\]'"):
        plot_chart(CurvesReport(CURVES).chart(), "png")
