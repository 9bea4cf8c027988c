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
from kvcore.analysis import Curve, Curves, Source, Steps
from kvcore.models.catalogue import find_model
from kvcore.models.memory import KVLayout
from kvcore.report import CurvesReport
from kvcore.report.mrc import draw, percent

PNG, SVG = b"\x89PNG\r\n", b"<?xml"
LAYOUT = KVLayout(find_model("llama-3-8b"), "fp16", 16)


def made(*curves, looked_up=200, distinct=100):
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


def one(eviction="lru", blocks=(1, 10, 100), hits=(1, 30, 100), steps=None, **options):
    """Return the curve of one policy."""
    return Curve(
        eviction=eviction,
        options=options,
        blocks=list(blocks),
        hit_blocks=list(hits),
        steps=steps,
    )


EXACT = one(steps=Steps(array("q", [0, 1, 10, 100]), array("q", [0, 1, 28, 98])))
CURVES = made(EXACT, one("lfu", half_life=60), one("optimum", bypass=True))


def test_the_table_is_of_sizes_by_policies():
    """A row has the blocks, their share of the footprint, and a hit ratio for each policy."""
    report = CurvesReport(CURVES)
    assert report.headers == ["blocks", "of all", "lru", "lfu", "optimum"]
    assert list(report.rows)[1] == ["10", "10%", "15.0%", "15.0%", "15.0%"]


def test_namesakes_are_told_apart():
    """Policies with equal names are shown with the options in which they differ."""
    report = CurvesReport(made(one("lfu", half_life=60), one("lfu", half_life=300)))
    assert report.headers[2:] == ["lfu:half_life=60", "lfu:half_life=300"]


def test_with_a_layout_sizes_have_bytes():
    """With a layout the table, the text and the document give sizes in bytes.

    A block of 16 tokens of Llama 3 8B takes 2 MiB.
    """
    report = CurvesReport(CURVES, LAYOUT)
    assert report.headers[2] == "memory"
    assert [row[2] for row in report.rows] == ["2 MiB", "20 MiB", "200 MiB"]
    assert "16 tokens of llama-3-8b in fp16 takes 2 MiB" in report.reading
    assert report.document()["memory"]["bytes_per_block"] == 2 * 2**20


def test_csv_reads_back():
    """The CSV has a row for each policy and size; bytes are empty without a layout."""
    file = io.StringIO()
    CurvesReport(CURVES).write_csv(file)
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert len(rows) == 9
    assert json.loads(rows[3]["options"]) == {"half_life": 60}
    assert (rows[4]["blocks"], rows[4]["bytes"], rows[4]["hit_ratio"]) == ("10", "", "0.15")


def test_where_nothing_is_looked_up_the_headline_says_so():
    """If nothing is looked up, the headline says so and the report has no table."""
    report = CurvesReport(made(one(blocks=[1], hits=[0]), looked_up=0, distinct=0))
    assert report.empty
    assert "Nothing in them has a key" in report.headline
    assert report.document()["infinite"]["hit_ratio"] is None


@pytest.mark.parametrize(
    ("share", "text"), [(1, "100%"), (0.123, "12%"), (0.001, "0.1%"), (1.5, "150%")]
)
def test_a_share_has_two_digits(share, text):
    """`percent` prints two significant digits at most, and no exponent."""
    assert percent(share) == text


@pytest.mark.parametrize(("form", "magic"), [("png", PNG), ("svg", SVG)])
@pytest.mark.parametrize("layout", [None, LAYOUT])
def test_a_plot_is_the_same_every_time(form, magic, layout):
    """Plotting the same curves twice gives the same bytes."""
    pytest.importorskip("matplotlib")
    first, second = (CurvesReport(CURVES, layout).plot(form) for _ in range(2))
    assert first.startswith(magic)
    assert first == second


@pytest.mark.parametrize(
    "curves",
    [
        made(one(blocks=[5], hits=[3])),
        made(one(blocks=[1], hits=[0]), looked_up=0, distinct=0),
        made(*(one(f"policy-{number}") for number in range(12))),
        made(one(blocks=[1, 1000], hits=[0, 100])),
    ],
    ids=["one size", "nothing", "many policies", "beyond the footprint"],
)
def test_odd_curves_are_drawn_too(curves):
    """Unusual curves can be plotted.

    They have one size, no look-up, more policies than colours, or a pool larger than the
    footprint.
    """
    pytest.importorskip("matplotlib")
    assert CurvesReport(curves, LAYOUT).plot("png").startswith(PNG)


def drawn(curves, layout=None):
    """Return the axes of a plot of `curves`."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.add_subplot()
    draw(axes, CurvesReport(curves, layout))
    return axes


def test_a_line_is_what_is_known_at_every_size():
    """An exact curve has many points and no markers; others have a marker at each size."""
    exact, sampled, *_ = drawn(CURVES).lines
    assert exact.get_marker() == "None"
    assert len(exact.get_xdata()) == 100
    assert list(sampled.get_xdata()) == [1, 10, 100]
    assert list(sampled.get_ydata()) == [0.5, 15, 50]
    assert sampled.get_marker() not in {"None", ""}


def test_no_two_of_many_policies_look_alike():
    """Twenty policies have twenty different pairs of colour and marker."""
    axes = drawn(made(*(one(f"policy-{number}") for number in range(20))))
    lines = [line for line in axes.lines if len(line.get_xdata()) == 3]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 20


@pytest.mark.parametrize("policies", [8, 16, 40])
def test_many_names_stand_beside_the_curves(policies):
    """The legend of many policies is outside of the axes."""
    axes = drawn(made(*(one(f"policy-{number}") for number in range(policies))))
    axes.figure.canvas.draw()
    assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1


@pytest.mark.parametrize("hits", [0, 1, 50])
def test_the_ticks_of_low_ratios_differ(hits):
    """The labels of the hit ratio's ticks differ, even if next to nothing hits."""
    axes = drawn(attrs.evolve(made(one(blocks=[1], hits=[hits])), hit_blocks=hits))
    axes.figure.canvas.draw()
    told = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(told)) == len(told)


def test_the_axes_say_what_they_measure():
    """The lower axis has shares of the footprint, the upper one blocks or bytes of K/V."""
    axes = drawn(CURVES, LAYOUT)
    (above,) = axes.child_axes
    assert axes.get_xlabel() == "pool, as a share of the 100 distinct blocks of 16 tokens"
    assert above.get_xlabel() == "MiB of K/V (llama-3-8b, fp16)"
    assert drawn(CURVES).child_axes[0].get_xlabel() == "blocks"


def test_without_matplotlib_a_plot_says_what_to_install(monkeypatch):
    """Without matplotlib `plot` raises PluginError with the extra to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PluginError, match=r"pip install 'kvcore\[lab\]'"):
        CurvesReport(CURVES).plot("png")
