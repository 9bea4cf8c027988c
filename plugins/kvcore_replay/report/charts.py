"""Plots of charts: lines over the values of an axis, or bars where there is one value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice
from math import log
from textwrap import fill
from typing import TYPE_CHECKING, Any

from kvcore.errors import shorten
from kvcore.sections import Chart, Panel
from kvcore_cli.report.tables import printable
from kvcore_replay.belady import Belady
from kvcore_replay.report.figure import COLOURS, DARK, GREY, INK, MARKERS, add_title, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, HIGH, SMALL = 5.2, 4.4, (5.6, 3.0)
"""Inches: width and height of a panel, and the size of a chart in a notebook."""

CAPTION = 24
"""Characters of the caption per inch."""

BAR = 0.28
"""Inches of a bar."""

NAME, GAP = 44, 0.055
"""The most characters of a name beside a line, and its height as a share of the panel's."""

DECADE = 8
"""The ratio of its largest to its smallest value from which an axis is logarithmic."""

MOST_TICKS = 8
"""The most ticks of the axis of a chart."""

PLACES = 200
"""Places in a part of an axis that are tried for a tick."""

LETTER = 0.0125
"""The width of a letter of a tick, as a share of the axis."""

MANY_PANELS, MANY_POINTS = 4, 100
"""The number of panels of lines from which they are in two columns, and the number of points
from which a line has no markers."""

DASHES = "-", "--", ":", "-."
"""Dashes of the lines of a policy that differ in something else."""

POLICIES = (
    *("lru", "hazard", "arc", "s3fifo", "lfu", "fifo", "slru", "lruk", "sieve", "tinylfu"),
    *("lookahead", "cost", "tail-lru", "workload-aware", "priority", "tool-ttl", "ttl", "mru"),
    "random",
)
"""Policies whose lines look alike in all charts: they have the first of `LOOKS`, in order."""

PALETTE = (*COLOURS[:-1], *DARK)
LOOKS = [*islice(zip(cycle(PALETTE), cycle(MARKERS[:-1]), strict=False), 60)]
"""Colours and markers of lines. Their numbers have no common factor, so that many differ."""

TIERS = " + tiers"
"""End of the name of a line for the hits of pool and tiers: the line of the pool, dashed."""


def plot_chart(chart: Chart, form: str, *, small: bool = False) -> bytes:
    """Return a chart as `png`, `svg` or `pdf` bytes; a `small` one has the first panel alone.

    Raises:
        PluginError: matplotlib is not installed.
    """
    panels = chart.panels[:1] if small else chart.panels
    names = max((len(panel.lines) for panel in panels), default=0)
    bars = all(len(points) < 2 for panel in panels for points in panel.lines.values())  # noqa: PLR2004
    # Bars side by side share their names.
    columns = len(panels) if bars or len(panels) < MANY_PANELS else 2
    rows = -(-len(panels) // max(columns, 1))
    high = 1.8 + BAR * max(names, 3) if bars else max(HIGH, 1.6 + BAR * names)
    size = WIDE * max(columns, 1) + 2, high * max(rows, 1)

    def draw(figure: Figure) -> None:
        _draw(figure, chart, panels, figure.subplots(rows, columns, squeeze=False).flat)

    return picture(form, draw, SMALL if small else size)


def _draw(
    figure: Figure, chart: Chart, panels: Sequence[Panel], axes_of_panels: Iterable[Axes]
) -> None:
    """Draw panels, each in its place, with the title and the caption of a chart."""
    every = [*axes_of_panels]
    for unused in every[len(panels) :]:
        unused.set_axis_off()
    rows = [*dict.fromkeys(name for panel in panels for name in panel.lines)]
    for axes, panel in zip(every, panels, strict=False):
        points = [x for points in panel.lines.values() for x, _ in points]
        if len(set(points)) > 1:
            _lines(axes, panel)
            values = sorted(set(points))
            if chart.logarithmic and values[0] > 0 and values[-1] / values[0] >= DECADE:
                axes.set_xscale("log")
            sizes = sorted(_sampled(panel)) or values
            if len(sizes) <= MOST_TICKS or len(values) < MANY_POINTS:
                _ticks(axes, sizes, chart.axis_text)
            else:
                _ticks(axes, _round_values(axes, values, chart.axis_text), chart.axis_text)
            axes.set_xlabel(chart.across)
            axes.set_ylabel(panel.label)
        else:
            _bars(axes, panel, rows, named=axes is every[0])
            axes.set_xlabel(panel.label)
        axes.grid(axis="both" if len(set(points)) > 1 else "x")
        axes.tick_params(labelsize=8)
    caption = ""
    if panels is chart.panels:
        width = int(CAPTION * figure.get_figwidth())
        caption = fill(printable(" ".join(chart.caption.splitlines())), width)
    add_title(figure, printable(chart.title), caption)


def _lines(axes: Axes, panel: Panel) -> None:
    """Draw a line for each name, with the name at its end."""
    looks = _looks(_line_of(name)[0] for name in panel.lines)
    ends = []
    sizes = _sampled(panel)
    exact = any(len(points) >= MANY_POINTS for points in panel.lines.values())
    dashes: dict[str, str] = {"": "-", TIERS: "--"}
    for name, points in panel.lines.items():
        # A policy has one colour, whatever else a line is of: that is its dashes.
        base, rest = _line_of(name)
        dash = dashes.setdefault(rest, DASHES[len(dashes) % len(DASHES)])
        colour, marker = looks[base]
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash}
        # Between computed points a line is a guess: thin, beside a line that is known.
        style |= (
            {"markersize": 5, "linewidth": 0.5}
            if exact
            else {"markersize": 4, "linewidth": 1.2}
        )
        if len(points) >= MANY_POINTS:
            style |= {"linewidth": 2, "marker": marker if sizes else None, "markersize": 4}
            style["markevery"] = [n for n, (x, _) in enumerate(sorted(points)) if x in sizes]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), **style)
            if band := panel.bands.get(name):
                pairs = sorted(zip(points, band, strict=True))
                across = [x for (x, _), _ in pairs]
                low, high = zip(*(ends for _, ends in pairs), strict=True)
                axes.fill_between(across, low, high, color=style["color"], alpha=0.15, lw=0)
            ends.append((*max(points), printable(shorten(name, NAME)), style["color"]))
    values = [value for points in panel.lines.values() for _, value in points]
    values += (high for band in panel.bands.values() for _, high in band)
    if panel.bound is not None:
        name, bound = panel.bound
        values.append(bound)
        axes.axhline(bound, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        text = f"{name}: {panel.text(bound)}"
        axes.annotate(
            text, (0, bound), (4, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", color=GREY, fontsize=8,
        )  # fmt: skip
    axes.set_ylim(0, 1.1 * max(values, default=0) or 1)
    axes.yaxis.set_major_formatter(lambda value, _: panel.text(value))
    end_labels(axes, ends)


def _line_of(name: str) -> tuple[str, str]:
    """Return the policy, or another series, of a line, and what else the line is of."""
    base, comma, rest = name.partition(", ")
    if not comma:
        base, rest, _ = name.partition(TIERS)
    return base, rest


def _looks(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the colour and the marker of each name: of a known policy, those it always has.

    Of several lines of a policy that differ in its options the first has these. The looks of
    known policies are not lent beside them.
    """
    looks: dict[str, tuple[str, str]] = {}
    own = dict(zip(POLICIES, LOOKS, strict=False))
    names = [*dict.fromkeys(names)]
    for name in names:
        if look := (INK, ".") if is_bound(name) else own.pop(policy_of(name), None):
            looks[name] = look
    free = cycle(LOOKS[len(POLICIES) :] if looks else LOOKS)
    return {name: looks.get(name) or next(free) for name in names}


def _sampled(panel: Panel) -> set[float]:
    """Return the places of the points that lines of few points have."""
    few = (points for points in panel.lines.values() if len(points) < MANY_POINTS)
    return {x for points in few for x, _ in points}


def end_labels(axes: Axes, ends: Iterable[tuple[float, float, str, str]]) -> None:
    """Write names at the ends (x, y, name, colour) of lines, so that none overlap.

    The limits of `axes` must be set before.
    """
    ends = sorted(ends, key=lambda end: end[1])
    low, high = axes.get_ylim()
    ys = spread([y for _, y, _, _ in ends], GAP * (high - low), low, high)
    right = max((x for x, *_ in ends), default=0)
    for y, (_, _, name, colour) in zip(ys, ends, strict=True):
        axes.annotate(
            name, (right, y), (8, 0), textcoords="offset points", color=colour,
            fontsize=8, va="center", annotation_clip=False,
            # No line of a bound or of the grid strikes it through.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )  # fmt: skip


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places near ascending values that are `gap` apart, from `low` to `high`.

    Values that are nearer to one another form a group, which is centred on its mean.
    """
    # Less a gap for each value before it, a place is no lower than the one before.
    groups: list[tuple[float, int]] = []
    for index, value in enumerate(values):
        sums, count = value - gap * index, 1
        while groups and groups[-1][0] / groups[-1][1] > sums / count:
            before, size = groups.pop()
            sums, count = sums + before, count + size
        groups.append((sums, count))
    highest = high - gap * (len(values) - 1)
    firsts = (
        max(min(sums / count, highest), low) for sums, count in groups for _ in range(count)
    )
    return [first + gap * index for index, first in enumerate(firsts)]


def is_bound(name: str) -> bool:
    """Return True if a line is that of the optimum, which is black."""
    return policy_of(name) in Belady.names


def policy_of(name: str) -> str:
    """Return the policy in the name of a line."""
    return re.split("[:,]| ", name)[0]


def _round_values(axes: Axes, values: list[float], text: Callable[[float], str]) -> list[float]:
    """Return the roundest value, as text tells it, in each of `MOST_TICKS` parts of an axis."""
    low, high = values[0], values[-1]
    scaled = axes.get_xscale() == "log"

    def at(part: float) -> float:
        return low * (high / low) ** part if scaled else low + (high - low) * part

    def roundness(value: float) -> tuple[int, int]:
        digits = re.sub("[^0-9]", "", text(value)).strip("0")
        return len(digits), "152".find(digits[:1]) % 4

    ticks = []
    for part in range(MOST_TICKS):
        tried = [at((part + step / PLACES) / MOST_TICKS) for step in range(PLACES)]
        ticks.append(min(*tried, *(float(f"{value:.1g}") for value in tried), key=roundness))
    return [tick for tick in dict.fromkeys(ticks) if low <= tick <= high]


def _ticks(axes: Axes, values: list[float], text: Callable[[float], str]) -> None:
    """Set the ticks of the horizontal axis: at values that are far enough apart."""
    step = -(-len(values) // MOST_TICKS)
    scale: Callable[[float], float] = log if axes.get_xscale() == "log" else float
    letters = 1 + max(len(text(value)) for value in values)
    gap = (scale(values[-1]) - scale(values[0])) * LETTER * letters
    ticks: list[float] = []
    for value in values[::-step]:
        if not ticks or scale(ticks[-1]) - scale(value) >= gap:
            ticks.append(value)
    axes.set_xticks(ticks, [text(tick) for tick in ticks])
    axes.set_xticks([], minor=True)


def _bars(axes: Axes, panel: Panel, rows: Sequence[str], *, named: bool) -> None:
    """Draw a bar for each name, with its value, in the same row in all panels."""
    drawn = {name: points[0][1] for name, points in panel.lines.items() if points}
    for name, value in drawn.items():
        row = rows.index(name)
        axes.barh(row, value, height=0.7, color=INK if is_bound(name) else COLOURS[0])
        for low, high in panel.bands.get(name, ())[:1]:
            axes.plot((low, high), (row, row), color=GREY, linewidth=1.2)
        axes.annotate(
            panel.text(value), (value, row), (3, 0), textcoords="offset points", va="center",
            fontsize=8,
        )  # fmt: skip
    values = [*drawn.values(), *(high for band in panel.bands.values() for _, high in band)]
    if panel.bound is not None:
        name, bound = panel.bound
        values.append(bound)
        axes.axvline(bound, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_title(f"{name}: {panel.text(bound)}", loc="right", fontsize=8, color=GREY)
    names = [printable(shorten(name, NAME)) if named else "" for name in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * max(values, default=0) or 1)
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - as in `picture`

    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda value, _: panel.text(value))


def as_percent(value: float) -> str:
    """Format a share as a percentage with three digits: `12.3%`."""
    return f"{100 * value:.3g}%"
