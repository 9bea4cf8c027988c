"""Charts of comparisons, sweeps and plans: their axes, lines, bars and texts."""

from __future__ import annotations

import re

import attrs
import pytest

from kvcore import InputError, compare, plan
from kvcore.plugins import Plugins
from kvcore.sections import Chart, Panel
from kvcore_lab.report.comparison import ComparisonReport
from kvcore_lab.report.plan import PlanReport
from kvcore_lab.report.sweep import SweepReport, chart_axis
from kvcore_lab.sweep import Grid, Journal, Plan, sweep
from kvcore_lab.sweep.executors import ThisProcess
from kvcore_replay.report.charts import _draw, is_bound, plot_chart, spread

pytest.importorskip("matplotlib")

SMALL = "zipf:requests=60,prefixes=4"


def texts(chart, **how):
    """Return the texts of a chart, which its SVG has as comments."""
    svg = plot_chart(chart, "svg", **how).decode()
    return set(re.findall("<!-- (.*?) -->", svg, re.DOTALL))


def test_a_comparison_is_drawn_over_pool_sizes():
    """A comparison has a line for each policy over the sizes, and the infinite bound."""
    found = compare(SMALL, "lru,lfu,optimum", [160, 400])
    chart = ComparisonReport(found).chart()
    lines = chart.panels[0].lines
    assert list(lines) == ["lru", "lfu", "optimum"]
    for row in found.rows:
        assert (row.blocks, row.hit_ratio["block"]) in lines[row.eviction]
    assert chart.panels[0].bound == ("never evicts", found.infinite.hit_ratio["block"])
    shown = texts(chart)
    assert {"160", "400", "lru", "lfu", "optimum", "pool, blocks of 16 tokens"} <= shown
    assert any(text.startswith("Setup: ") for text in shown)


def test_tiers_add_a_second_line_to_each_policy():
    """With tiers each policy has a second line, with the hits in the tiers added."""
    tier = "host:memory=1GiB"
    found = compare(SMALL, "lru", [160, 400], tier=tier)
    lines = ComparisonReport(found).chart().panels[0].lines
    assert list(lines) == ["lru", "lru + tiers"]
    for line, name in (("lru", "hit_ratio"), ("lru + tiers", "reuse_ratio")):
        assert [value for _, value in lines[line]] == [
            getattr(row, name)["block"] for row in found.rows
        ]
    assert lines["lru + tiers"] != lines["lru"]


def drawn_lines(chart):
    """Return the lines of the only panel of a chart, as matplotlib draws them."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.add_subplot()
    _draw(figure, chart, chart.panels, [axes])
    return axes.lines


def test_a_line_of_many_points_has_markers_where_others_were_computed():
    """A line that is known at many places has markers at those of others, which are thinner.

    By itself it has none.
    """
    lines = {"many": [(x, x) for x in range(1, 101)], "few": [(1, 2), (9, 8)]}
    many, few = drawn_lines(Chart("", "", "pool", [Panel("hits", lines, str)]))
    assert many.get_markevery() == [0, 8]
    assert few.get_marker() not in {"None", ""}
    assert few.get_linewidth() < many.get_linewidth()
    (alone,) = drawn_lines(Chart("", "", "pool", [Panel("hits", {"many": lines["many"]}, str)]))
    assert alone.get_marker() == "None"


def test_a_policy_looks_alike_in_all_charts():
    """A policy has its colour and marker whatever else is drawn; all of kvcore's differ."""
    points = [(1, 1), (9, 1)]

    def looks(*names):
        panel = Panel("hits", dict.fromkeys(names, points), str)
        drawn = drawn_lines(Chart("", "", "pool", [panel]))
        return {n: (d.get_color(), d.get_marker()) for n, d in zip(names, drawn, strict=False)}

    names = [name for name in Plugins().names("eviction") if not is_bound(name)]
    every = looks(*names)
    assert len(set(every.values())) == len(names)
    for name in names:
        assert looks("mine.py:Own", name)[name] == every[name]
        assert looks(f"{name}:seed=1, 64")[f"{name}:seed=1, 64"] == every[name]
    variants = looks("lfu:half_life=1", "lfu:half_life=2", "lru")
    assert len(set(variants.values())) == 3
    assert variants["lfu:half_life=2"] not in every.values()


def test_ticks_of_a_curve_are_round_or_its_sizes():
    """Few computed sizes are the ticks of a curve; else these are round, also of bytes."""
    many = [(x, x) for x in range(30, 30_001)]
    few = [(31, 1), (1933, 2)]

    def ticks(text=lambda value: f"{value:,.0f}", **lines):
        drawn = drawn_lines(Chart("", "", "pool", [Panel("hits", lines, str)], text))
        return [label.get_text() for label in drawn[0].axes.get_xticklabels()]

    assert ticks(lru=many, hazard=few) == ["1,933", "31"]
    for found in (ticks(lru=many), ticks(lambda value: f"{value / 7:.0f} GiB", lru=many)):
        assert len(found) > 4
        assert all(len(re.sub("[^0-9]", "", text).strip("0")) == 1 for text in found)


def test_a_band_is_within_the_axes():
    """An axis reaches to the end of the highest band."""
    lines = {"lru": [(1, 1.0), (2, 2.0)]}
    panel = Panel("hits", lines, str, bands={"lru": [(0.5, 2.0), (1.0, 9.0)]})
    assert drawn_lines(Chart("", "", "pool", [panel]))[0].axes.get_ylim()[1] > 9


def test_thirty_lines_differ():
    """Thirty lines have thirty different pairs of colour and marker."""
    lines = {f"policy-{n}": [(1, n), (9, n)] for n in range(30)}
    drawn = drawn_lines(Chart("", "", "pool", [Panel("hits", lines, str)]))
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == 30


def test_ticks_are_apart():
    """Of two values of an axis that are near one another only the larger has a tick."""
    points = [(1, 1), (95, 1), (100, 1)]
    assert {"1", "100"} <= texts(Chart("", "", "pool", [Panel("hits", {"lru": points}, str)]))
    chart = Chart("", "", "pool", [Panel("hits", {"lru": points}, str)])
    assert "95" not in texts(chart)


def test_four_panels_are_in_two_rows():
    """The lines of four panels are drawn two by two."""
    panels = [Panel(f"measure {n}", {"lru": [(1, n), (9, n)]}, str) for n in range(4)]
    svg = plot_chart(Chart("", "", "pool", panels), "svg").decode()
    wide, high = map(float, re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg).groups())
    assert wide < 2 * high


@pytest.mark.parametrize(
    ("axes", "asked", "axis"),
    [
        ({"blocks": [1, 2], "eviction": ["lru", "lfu"]}, None, "blocks"),
        ({"memory": ["1GiB", "2GiB"], "seed": [1, 2]}, None, "memory"),
        ({"blocks": [1, 2], "block_size": [16, 32]}, "block_size", "block_size"),
    ],
)
def test_a_sweep_is_drawn_over_a_numeric_axis(axes, asked, axis):
    """A sweep is drawn over its numeric axis or the given one; seeds are not numeric."""
    assert chart_axis(Grid("compare", **axes), asked) == axis


@pytest.mark.parametrize(
    ("axes", "asked", "fault"),
    [
        ({"blocks": 1, "eviction": ["lru", "lfu"]}, None, "--plot: no number varies"),
        (
            {"blocks": [1, 2], "block_size": [16, 32]},
            None,
            "and blocks vary: choose",
        ),
        ({"blocks": [1, 2]}, "eviction", "--plot-axis eviction: .* there are: blocks"),
        ({"blocks": 1}, "blocks", "no axis has several numbers"),
        (
            {"blocks": [1, 2], "eviction": [f"lfu:half_life={n}" for n in range(1, 26)]},
            None,
            "25 lines over blocks",
        ),
    ],
)
def test_an_unsuitable_axis_of_a_sweep_is_refused(axes, asked, fault):
    """A sweep that cannot be drawn over an axis is refused with the reason and the choices."""
    with pytest.raises(InputError, match=fault):
        chart_axis(Grid("compare", **axes), asked)


def swept(tmp_path, mode, **axes):
    """Return the result of a small sweep."""
    with Journal(tmp_path / "journal") as journal:
        grid = Grid(mode, workload=SMALL, **axes)
        return sweep(Plan.from_grid(grid), journal, executor=ThisProcess())


def test_a_sweep_of_compare_has_a_line_for_each_other_value(tmp_path):
    """A sweep of `compare` has a line for each value of the other axes.

    A failed cell has no point.
    """
    found = swept(tmp_path, "compare", eviction=["lru", "lfu"], blocks=[160, 400])
    rows = [*found.rows]
    rows[0] = {**rows[0], "hit_ratio_block": None, "error": "it died"}
    chart = SweepReport(attrs.evolve(found, rows=rows)).chart("blocks")
    points = [
        (row["blocks"], row["hit_ratio_block"]) for row in rows if row["eviction"] == "lfu"
    ]
    assert chart.panels[0].lines["lfu"] == points
    assert len(chart.panels[0].lines["lru"]) == 1
    assert {
        "lru",
        "lfu",
        "pool, blocks of 16 tokens",
        "hits, of blocks",
        "160",
        "400",
    } <= texts(chart)


def test_a_sweep_of_simulate_has_a_panel_for_each_measure(tmp_path):
    """A sweep of `simulate` has a panel for each measure, over memory in bytes."""
    found = swept(tmp_path, "simulate", memory=["1GiB", "2GiB"], scheduler=["fcfs", "lpm"])
    chart = SweepReport(found).chart("memory")
    assert [panel.label for panel in chart.panels] == [
        "goodput, requests/s", "TTFT, mean", "hits, of tokens",
    ]  # fmt: skip
    assert {"1 GiB", "2 GiB", "fcfs", "lpm"} <= texts(chart)


def test_a_plan_has_a_bar_for_each_fleet_in_each_panel():
    """The chart of a plan has a bar for each fleet in each panel, and the target."""
    found = plan(
        f"{SMALL},rate=4", slo="ttft=0.2", tier="none", tensor_parallel=[1, 2], max_gpus=2
    )
    chart = PlanReport(found.as_dict()).chart()
    assert [len(panel.lines) for panel in chart.panels] == [2] * 4
    assert len(found.options) == 2
    assert chart.panels[-1].bound == ("asked for", 0.99)
    assert {"GPUs", "K/V memory in all, GiB", "asked for: 99%"} <= texts(chart)
    none = attrs.evolve(found, options=[])
    assert "No fleet of up to 2 GPUs does." in texts(PlanReport(none.as_dict()).chart())


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ([], []),
        ([1, 5, 9], [1, 5, 9]),
        ([5, 5], [4.5, 5.5]),
        ([5, 5, 5.9], [4.3, 5.3, 6.3]),
        ([9.9, 10], [9, 10]),
        ([0, 0.1], [0, 1]),
        ([0, 0, 1.6], [0, 1, 2]),
        ([8.4, 10, 10], [8, 9, 10]),
        ([1, 1.9, 4.4, 4.4], [0.95, 1.95, 3.9, 4.9]),
    ],
)
def test_close_labels_are_spread(values, places):
    """Labels that are too close are spread around their mean, inside the axes."""
    assert spread(values, 1, 0, 10) == pytest.approx(places)
