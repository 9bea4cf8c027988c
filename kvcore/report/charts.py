"""Charts of the tables that have an axis: lines over its values, or bars where there is one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from textwrap import fill
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.analysis import Belady, Comparison
from kvcore.analysis.planning import FleetPlan
from kvcore.analysis.sweep import Grid, Sweep
from kvcore.errors import InputError, shorten
from kvcore.report.comparison import ComparisonReport
from kvcore.report.mrc import COLOURS, GREY, INK, MARKERS, PALE, picture
from kvcore.report.plan import PlanReport
from kvcore.report.sweep import MEASURES, SweepReport, written
from kvcore.report.tables import counted, named, printable
from kvcore.units import BINARY, format_bytes, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, HIGH, SMALL = 5.2, 4.4, (5.6, 3.0)
"""Inches of a panel, and of a chart in a notebook."""

CAPTION = 24
"""Characters of the caption an inch."""

BAR = 0.28
"""Inches of a bar."""

NAME, GAP = 44, 0.055
"""Characters of a name beside a line, and the room that it needs as a share of the height."""

DECADE = 8
"""From which ratio of its largest and smallest value on an axis is logarithmic."""

TIERS = " + tiers"
"""The end of the name of what a pool and the tiers below it hit: the same line, dashed."""

MOST_LINES = 24
"""Lines that can be told apart."""


@attrs.frozen
class Panel:
    """Lines over an axis.

    Attributes:
        label: what is drawn, with its unit.
        lines: points (place on the axis, value) by the name of the line.
        text: writes a value.
        bound: the name and value of what no line exceeds, or is to reach.
    """

    label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    text: Callable[[float], str]
    bound: tuple[str, float] | None = None


@attrs.frozen
class Chart:
    """Panels side by side over one axis.

    Attributes:
        title, caption: what was run, in a few words and with every option.
        across: what the axis is, with its unit.
        panels: what is drawn over it.
        place: writes a value of the axis.
        logarithmic: whether the axis may be, if its values are far apart.
    """

    title: str
    caption: str
    across: str
    panels: Sequence[Panel]
    place: Callable[[float], str] = format_number
    logarithmic: bool = True

    def plot(self, form: str, *, small: bool = False) -> bytes:
        """Return the chart as `png` or `svg` bytes; a `small` one is the first panel alone.

        Raises:
            PluginError: matplotlib is not installed.
        """
        panels = self.panels[:1] if small else self.panels
        names = max((len(panel.lines) for panel in panels), default=0)
        size = WIDE * max(len(panels), 1) + 2, max(HIGH, 1.6 + BAR * names)
        if all(len(points) < 2 for panel in panels for points in panel.lines.values()):  # noqa: PLR2004 - bars
            size = size[0], 1.8 + BAR * max(names, 3)
        return picture(
            form, lambda figure: self._draw(figure, panels), SMALL if small else size
        )

    def _draw(self, figure: Figure, panels: Sequence[Panel]) -> None:
        every = figure.subplots(1, len(panels), squeeze=False)[0]
        rows = [*dict.fromkeys(name for panel in panels for name in panel.lines)]
        for axes, panel in zip(every, panels, strict=True):
            points = [at for points in panel.lines.values() for at, _ in points]
            if len(set(points)) > 1:
                _lines(axes, panel)
                places = sorted(set(points))
                if self.logarithmic and places[0] > 0 and places[-1] / places[0] >= DECADE:
                    axes.set_xscale("log")
                _ticks(axes, places, self.place)
                axes.set_xlabel(self.across)
                axes.set_ylabel(panel.label)
            else:
                _bars(axes, panel, rows, named=axes is every[0])
                axes.set_xlabel(panel.label)
            axes.grid(color=PALE, linewidth=0.6, axis="both" if len(set(points)) > 1 else "x")
            axes.set_axisbelow(True)
            axes.tick_params(length=3, labelsize=8)
        figure.suptitle(printable(self.title), x=0.01, ha="left", fontsize=10)
        if panels is self.panels:
            width = int(CAPTION * figure.get_figwidth())
            text = fill(printable(" ".join(self.caption.splitlines())), width)
            figure.supxlabel(text, x=0.01, ha="left", fontsize=5.5, color=GREY)


def _lines(axes: Axes, panel: Panel) -> None:
    """Draw a line for each name, with the name at its end."""
    looks = zip(cycle(COLOURS[:-1]), cycle(MARKERS), strict=False)
    known: dict[str, dict[str, Any]] = {}
    ends = []
    for name, points in panel.lines.items():
        base, beside, _ = name.partition(TIERS)
        if base not in known:
            colour, marker = (INK, ".") if _is_bound(name) else next(looks)
            known[base] = {"color": colour, "marker": marker, "markersize": 4}
        style = {**known[base], "linewidth": 1.2, "linestyle": "--" if beside else "-"}
        if points:
            axes.plot(*zip(*sorted(points), strict=True), **style)
            ends.append((*max(points), printable(shorten(name, NAME)), style["color"]))
    values = [value for points in panel.lines.values() for _, value in points]
    if panel.bound is not None:
        told, bound = panel.bound
        values.append(bound)
        axes.axhline(bound, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        text = f"{told}: {panel.text(bound)}"
        axes.annotate(
            text, (0, bound), (4, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", color=GREY, fontsize=8,
        )  # fmt: skip
    axes.set_ylim(0, 1.1 * max(values, default=0) or 1)
    axes.yaxis.set_major_formatter(lambda value, _: panel.text(value))
    end_labels(axes, ends)


def end_labels(axes: Axes, ends: Iterable[tuple[float, float, str, str]]) -> None:
    """Name lines at their ends, as (x, y, name, colour), none above another.

    The limits of `axes` have to be set.
    """
    ends = sorted(ends, key=lambda end: end[1])
    low, high = axes.get_ylim()
    places = spread([y for _, y, _, _ in ends], GAP * (high - low), low, high)
    right = max((x for x, *_ in ends), default=0)
    for at, (_, _, name, colour) in zip(places, ends, strict=True):
        axes.annotate(
            name, (right, at), (8, 0), textcoords="offset points", color=colour,
            fontsize=8, va="center", annotation_clip=False,
        )  # fmt: skip


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places near ascending values that are `gap` apart, from `low` to `high`.

    Values nearer than that make a group, which lies about its mean.
    """
    groups: list[tuple[float, int]] = []
    for value in values:
        sums, count = value, 1
        while groups:
            before, size = groups[-1]
            if sums / count - before / size >= gap * (count + size) / 2:
                break
            sums, count = sums + before, count + size
            groups.pop()
        groups.append((sums, count))
    places: list[float] = []
    for sums, count in groups:
        first = sums / count - gap * (count - 1) / 2
        first = max(min(first, high - gap * (count - 1)), low)
        places += [first + gap * place for place in range(count)]
    return places


def _is_bound(name: str) -> bool:
    """Return True if a line is that of the optimum, the black one."""
    return re.split("[:,]| ", name)[0] in Belady.names


def _ticks(axes: Axes, places: list[float], text: Callable[[float], str]) -> None:
    """Set the ticks of the horizontal axis: at each of some places, or at every few of many."""
    step = -(-len(places) // DECADE)
    ticks = places[::-step][::-1]
    axes.set_xticks(ticks, [text(tick) for tick in ticks])
    axes.set_xticks([], minor=True)


def _bars(axes: Axes, panel: Panel, rows: Sequence[str], *, named: bool) -> None:
    """Draw a bar for each name, with its value, in the row that all panels have it in."""
    drawn = {name: points[0][1] for name, points in panel.lines.items() if points}
    for name, value in drawn.items():
        row = rows.index(name)
        axes.barh(row, value, height=0.7, color=INK if _is_bound(name) else COLOURS[0])
        axes.annotate(
            panel.text(value), (value, row), (3, 0), textcoords="offset points", va="center",
            fontsize=8,
        )  # fmt: skip
    values = [*drawn.values()]
    if panel.bound is not None:
        told, bound = panel.bound
        values.append(bound)
        axes.axvline(bound, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_title(f"{told}: {panel.text(bound)}", loc="right", fontsize=8, color=GREY)
    names = [printable(shorten(name, NAME)) if named else "" for name in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * max(values, default=0) or 1)
    axes.xaxis.set_major_locator(_few())
    axes.xaxis.set_major_formatter(lambda value, _: panel.text(value))


def _few() -> Any:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - as in `picture`

    return MaxNLocator(4)


def comparison_chart(report: ComparisonReport) -> Chart:
    """Return what each policy hits, by the size of the pool."""
    found: Comparison = report.comparison
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, row in named(found.rows):
        for suffix, ratios in (("", row.hit_ratio), (TIERS, row.reuse_ratio)):
            if ratios is not None and ratios["block"] is not None:
                lines.setdefault(f"{name}{suffix}", []).append((row.blocks, ratios["block"]))
    never = found.infinite.hit_ratio["block"]
    bound = None if never is None else ("never evicts", never)
    memory = report.memory
    tokens = counted(found.rows[0].block_size, "token")
    return Chart(
        f"{found.workload.name}, {counted(found.workload.requests, 'request')}, "
        f"{found.accounting} counting",
        report.setup,
        f"pool, blocks of {tokens}" if memory is None else "K/V memory of the pool",
        [Panel("blocks looked up that hit", lines, _percent, bound)],
        (lambda blocks: f"{blocks:,.0f}")
        if memory is None
        else lambda blocks: memory[int(blocks)],
    )


def sweep_axis(grid: Grid, asked: str | None) -> str:
    """Return the axis of a sweep to draw it over: the one asked for, or all there is.

    Raises:
        InputError: it is no axis of numbers that varies, or none was asked for of several.
    """
    numbers = [name for name in grid.varied if _is_number(name, grid.axes[name])]
    told = " and ".join(numbers)
    if asked is not None and asked not in numbers:
        there = f"there are: {told}" if numbers else "no axis has several numbers"
        msg = f"--plot-axis {asked}: no axis of numbers that varies; {there}"
    elif not numbers:
        msg = "--plot: no number varies: give blocks, memory or rate_scale several values"
    elif asked is None and len(numbers) > 1:
        msg = f"--plot: {told} vary: choose one of them with --plot-axis"
    else:
        axis = asked or numbers[0]
        lines = 1
        for name in grid.varied:
            lines *= 1 if name == axis else len(grid.axes[name])
        if lines <= MOST_LINES:
            return axis
        msg = f"--plot: {lines} lines over {axis} cannot be told apart; {MOST_LINES} can"
    raise InputError(msg)


def _is_number(name: str, values: Iterable[Any]) -> bool:
    if name in ("seed", "chunked"):
        return False
    return name == "memory" or all(type(value) in (int, float) for value in values)


def sweep_chart(sweep: Sweep, axis: str) -> Chart:
    """Return a chart of the best cells of a sweep over the values of a numeric axis.

    Cells that failed have no point.
    """
    report, grid = SweepReport(sweep), sweep.grid
    others = [name for name in grid.varied if name != axis]
    # A policy comes first: its name alone says more than that of what it is given.
    others.sort(key=lambda name: name not in ("eviction", "scheduler"))
    column = "pool_bytes" if axis == "memory" else axis
    panels = []
    for measure in report.measures:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in sweep.rows:
            name = ", ".join(written(each, row) for each in others) or measure.title
            value = row[measure.column]
            points = lines.setdefault(name, [])
            if value is not None and row[column] is not None:
                points.append((row[column], value))
        label = f"{measure.title.partition(' ')[2]}, {measure.unit}"
        panels.append(Panel(label, lines, measure.text))
    if not panels:
        panels = [Panel(MEASURES[grid.mode][0].title, {}, format_number)]
    place: Callable[[float], str] = format_number
    if axis == "memory":
        place = _bytes
    return Chart(report.headline.partition(". ")[0], report.setup, axis, panels, place)


def plan_chart(report: PlanReport) -> Chart:
    """Return what the fleets of a plan take, a bar each, and how many requests they serve."""
    plan: FleetPlan = report.plan
    fleets = {report.fleet(option.fleet): option for option in plan.options}

    def bars(value: Callable[[Any], float]) -> dict[str, list[tuple[float, float]]]:
        return {name: [(0, value(option))] for name, option in fleets.items()}

    gib = BINARY["GiB"]
    pools = bars(lambda each: each.pool_bytes * each.fleet.replicas / gib)
    hosts = bars(lambda each: each.fleet.host_bytes * each.fleet.replicas / gib)
    asked = ("asked for", plan.percentile / 100)
    panels = [
        Panel("GPUs", bars(lambda each: each.fleet.gpus), _whole),
        Panel("K/V memory in all, GiB", pools, format_number),
        Panel("host RAM in all, GiB", hosts, format_number),
        Panel("within the SLO", bars(lambda each: each.served.attainment), _percent, asked),
    ]
    title = report.headline.splitlines()[-1] if not fleets else f"Fleets for {_asked(report)}"
    return Chart(title, report.closing, "", panels)


def _asked(report: PlanReport) -> str:
    setup = report.plan.setup
    return f"{setup['workload']}, {counted(report.plan.requests, 'request')}, {setup['slo']}"


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def _whole(value: float) -> str:
    return f"{value:g}"


def _bytes(value: float) -> str:
    return format_bytes(int(value))
