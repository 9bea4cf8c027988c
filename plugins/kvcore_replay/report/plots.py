"""Plots of a run: its pool, hits, ages of blocks, requests and latencies, as PNG, SVG or PDF.

Each function takes its data and the form, `png`, `svg` or `pdf`, and returns the bytes of the
file. Equal runs give equal bytes with the same matplotlib. All raise PluginError without it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, cycle, islice
from math import ceil, floor, isnan, log10
from operator import add
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from kvcore.cache import Residency
from kvcore.errors import InputError, shorten
from kvcore.histogram import Histogram, borders
from kvcore.request import SLO
from kvcore.serving.result import REQUESTS, SUMMARY, Result
from kvcore.trace.fields import slo_field
from kvcore.units import INT64_LIMIT, NS_PER_S, format_number, format_seconds
from kvcore_cli.report.simulation import SimulationReport
from kvcore_cli.report.tables import counted, printable, setup
from kvcore_replay.report.charts import end_labels
from kvcore_replay.report.figure import COLOURS, GREY, INK, PALE, add_title, log_ticks, picture
from kvcore_replay.timeline import Kind, Series, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from kvcore_cluster.result import ClusterResult

INCHES = 8.4, 4.8
CAPTION: dict[str, Any] = {"width": 185, "max_lines": 10, "placeholder": " ..."}
"""Size of a plot in inches, and the wrapping of its caption."""

POINTS, BINS = 1500, 600
"""Number of points of a line, and of time spans in which requests are counted."""

WINDOWS, SAMPLES = 40, 10
"""The most windows of a trace for its windowed hit ratio, and the mean requests of a window."""

ROWS, BARS, NAMED = 100, 5000, 40
"""The most requests with a row each, phases with a bar each, and rows with a name."""

BLUE, RED, GREEN, PINK, ORANGE, SKY, _ = COLOURS

BANDS = {"private": BLUE, "cached": SKY, "free": PALE}
"""The colours of the parts of a pool, from the bottom of a stack to its top."""

PHASES = {
    Kind.DECODE: BLUE,
    Kind.PREFILL: ORANGE,
    Kind.LOADING: PINK,
    Kind.PREEMPTED: RED,
    Kind.QUEUED: "#C8C8C8",
}
"""The colours of phases, from the bottom of a stack to its top."""

DECADES = 1e5
"""The largest ratio of the longest to the shortest time on a logarithmic axis."""

THIN = 0.13
"""Share of the height below which a band has no room for its name."""

PLACES = 100
"""Number of places that are tried for the name of a band."""

FEW = 4
"""The most ticks of a small logarithmic axis."""

COLUMNS = {"queue": "queue_s", "TTFT": "ttft_s", "TPOT": "tpot_s", "E2E": "e2e_s"}
"""The columns of latencies in a result, by the names in plots."""

SLO_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "deadline": "E2E"}
"""The measures that an SLO limits, by its fields."""

UNITS = {"ns": 1, "µs": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}


def occupancy(timeline: Timeline, form: str) -> bytes:
    """Plot the blocks of the pool over time, and below them waiting and running requests."""

    def draw(figure: Figure) -> None:
        series = timeline.series.thinned(POINTS)
        unit, times = _times(series)
        highest = max(*series.running, *series.waiting, 0)
        rows = 2 if highest else 1
        panels = figure.subplots(
            rows, 1, sharex=True, squeeze=False, height_ratios=(3, 1)[:rows]
        )
        above, below = panels[0, 0], panels[-1, 0]
        _bands(above, times, *_parts_of_pool(series))
        above.set_ylabel(_block_text(timeline.header))
        above.set_ylim(0, timeline.header["blocks"])
        above.yaxis.set_major_formatter("{x:,.0f}")
        below.set_xlabel(f"time, {unit}")
        _add_grid(above, below)
        if not highest:
            return
        below.set_ylim(0, 1.4 * highest)
        below.set_ylabel("requests")
        for index, (name, colour) in enumerate((("running", BLUE), ("waiting", RED))):
            counts = getattr(series, name)
            below.plot(times, counts, color=colour, linewidth=1, drawstyle="steps-post")
            peak, corner = f"{name} (at most {max(counts):,})", (0.01 + 0.26 * index, 0.97)
            below.text(
                *corner, peak, color=colour, fontsize=8, va="top", transform=below.transAxes
            )

    return _framed(form, draw, f"Pool of {_run_text(timeline)}", _caption(timeline))


def hits(timeline: Timeline, form: str) -> bytes:
    """Plot the hit ratio over time: in the window before, and since the start."""

    def draw(figure: Figure) -> None:
        axes, series = figure.add_subplot(), timeline.series
        looked_up = series.lookup_blocks[-1]
        if not looked_up:
            _empty(axes, "Nothing was looked up.")
            return
        span = timeline.end - timeline.begin
        admitted = sum(time >= 0 for time in timeline.requests.admitted)
        window = _round_time(max(span // WINDOWS, span * SAMPLES // admitted, 1))
        unit, times = _times(series)
        lines = [(series.hit_ratio(), "since the start", BLUE, 2.0)]
        if window < span / 2:
            name = f"in the last {_time_text(window)}"
            lines.insert(0, (series.hit_ratio(window), name, SKY, 1.0))
        ends: list[tuple[float, float, str, str]] = []
        highest = 0.0
        for ratios, name, colour, width in lines:
            rows = _even_rows(series, timeline.begin, span)
            shares = [100 * ratios[row] for row in rows]
            axes.plot([times[row] for row in rows], shares, color=colour, linewidth=width)
            known = [share for share in shares if not isnan(share)]
            if not known:  # All lookups are in windows without a point.
                continue
            highest = max(highest, *known)
            ends.append((times[-1], known[-1], f"{name}: {known[-1]:.1f}%", colour))
        axes.set_ylim(0, 1.08 * highest or 1)
        end_labels(axes, ends)
        axes.yaxis.set_major_formatter("{x:g}%")
        axes.set_ylabel(f"of {looked_up:,} blocks looked up that hit")
        axes.set_xlabel(f"time, {unit}")
        _add_grid(axes)

    return _framed(form, draw, f"Hits of {_run_text(timeline)}", _caption(timeline))


def ages(residency: Residency, header: Mapping[str, Any], form: str) -> bytes:
    """Plot the time since the last use of blocks at hits and evictions, and their lifetime."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        residency.settle()
        drawn: list[float] = []
        for histogram, name, colour, dashes in (
            (residency.age_at_hit, "since last use, at a hit", GREEN, "-"),
            (residency.age_at_eviction, "since last use, at eviction", RED, "-"),
            (residency.lifetime, "in the cache, at eviction", BLUE, "--"),
        ):
            percentiles = histogram.percentiles()
            if percentiles is None:
                continue
            times, shares = _distribution(histogram)
            figures = ", ".join(f"{p} {_time_text(percentiles[p])}" for p in ("p50", "p99"))
            label = f"{name}: {figures} ({counted(histogram.weight, 'block')})"
            line: Any = {"color": colour, "linestyle": dashes, "drawstyle": "steps-post"}
            axes.plot(times, shares, label=label, linewidth=1.6, **line)
            drawn += times[0], times[-1]
        if not drawn:
            _empty(axes, "No block was hit, and none was evicted.")
            return
        low, high = min(drawn), max(drawn)
        _percent_axis(axes)
        axes.set_ylabel("blocks")
        _time_axis(axes.xaxis, max(low, high / DECADES), high, "time, at most")
        axes.legend(loc="upper left", edgecolor="none", framealpha=0.85, fontsize=8)
        axes.set_ylim(0, 130)
        _add_grid(axes)

    return _framed(form, draw, "Ages of blocks", setup(header))


def timeline(timeline: Timeline, form: str) -> bytes:
    """Plot the phases of requests: a row each; or, of many, the number in each phase.

    Raises:
        InputError: no request took any time, as in a trace without a clock, or if none was
            admitted.
    """
    requests, phases = timeline.requests, timeline.phases
    if len(requests) and not len(phases):
        msg = f"{timeline.source}: no request was admitted in it, so that there is no timeline"
        if timeline.header["mode"] == "untimed":
            msg = (
                f"{timeline.source}: requests take no time in it, so that there is no "
                "timeline: give the trace of a run with a clock, as `kvcore simulate --trace` "
                "writes it"
            )
        raise InputError(msg)
    title, size, draw = f"Requests of {_run_text(timeline)}", INCHES, _density
    if len(requests) <= ROWS and len(phases) <= BARS:
        size, draw = (INCHES[0], min(max(3.0, 1.8 + 0.2 * len(requests)), 14)), _rows
    else:
        title += ": too many for rows, so how many are in each phase"
    return _framed(form, partial(draw, timeline=timeline), title, _caption(timeline), size)


def _rows(figure: Figure, timeline: Timeline) -> None:
    """Draw a row for each request."""
    axes, requests, phases = figure.add_subplot(), timeline.requests, timeline.phases
    if not len(requests):
        _empty(axes, "There are no requests.")
        return
    unit, factor = _unit(timeline.end - timeline.begin)
    for kind in map(Kind, sorted(set(phases.kind))):
        bars = [
            (row, begin / factor, (end - begin) / factor)
            for row, kind_of_phase, begin, end, _ in phases
            if kind_of_phase is kind
        ]
        rows, left, widths = zip(*bars, strict=True)
        height = 0.3 if kind.waits else 0.8
        label, colour = kind.name.lower(), PHASES[kind]
        axes.barh(rows, widths, height, left, color=colour, linewidth=0, label=label)
        if kind is Kind.PREEMPTED:
            axes.plot(left, rows, "x", color=INK, markersize=4, label="preemption")
    chunks = timeline.chunks
    ended = [time / factor for time in chunks.time]
    axes.plot(ended, chunks.request, "|", color="white", markersize=4, markeredgewidth=0.6)
    first = [row for row, time in enumerate(requests.first_token) if time >= 0]
    refused = list(requests.rejected)
    for label, marked, times, marker, colour in (
        ("first token", first, requests.first_token, "o", "white"),
        ("rejected", refused, requests.arrival, "D", GREY),
    ):
        if marked:
            look: Any = {"color": colour, "markersize": 3.5, "markeredgecolor": INK}
            axes.plot(
                [times[row] / factor for row in marked], marked, marker, label=label, **look
            )
    if len(requests) <= NAMED:
        names = [printable(shorten(str(name))) for name in requests.ids]
        axes.set_yticks(range(len(requests)), names, fontsize=7)
    axes.set_ylim(len(requests) - 0.4, -0.6)
    axes.set_ylabel("request")
    axes.set_xlabel(f"time, {unit}")
    _legend(axes, axes.get_legend_handles_labels()[0], "lower left")
    _add_grid(axes)


def _density(figure: Figure, timeline: Timeline) -> None:
    """Draw the number of requests in each phase, and the times to first token."""
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    begin, span = timeline.begin, max(timeline.end - timeline.begin, 1)
    unit, factor = _unit(span)
    counts = _means(timeline, begin, span)
    present = [kind for kind in PHASES if kind in counts]
    times = [(begin + span * part / BINS) / factor for part in range(BINS + 1)]
    layers = [[*counts[kind], counts[kind][-1]] for kind in present]
    colours = [PHASES[kind] for kind in present]
    names = [kind.name.lower() for kind in present]
    _bands(above, times, layers, names, colours)
    above.set_ylim(0, None)
    above.set_ylabel(f"requests, mean of {_time_text(span // BINS)}")
    requests, phases = timeline.requests, timeline.phases
    waits = [
        (first / factor, (first - came) / NS_PER_S)
        for came, first in zip(requests.arrival, requests.first_token, strict=True)
        if first > came
    ]
    if waits:
        dots = {"markersize": 2, "alpha": 0.5, "rasterized": True}
        below.plot(*zip(*waits, strict=True), ".", color=ORANGE, **dots)
        _time_axis(below.yaxis, min(w for _, w in waits), max(w for _, w in waits), "TTFT", FEW)
    lost = [start for _, kind, start, _, _ in phases if kind is Kind.PREEMPTED]
    if lost:
        style = {"transform": below.get_xaxis_transform(), "clip_on": False}
        below.plot([time / factor for time in lost], [0] * len(lost), "x", color=RED, **style)
    losses = f"{counted(len(lost), 'preemption')}{', crosses' if lost else ''}"
    title = f"{counted(len(waits), 'first token')}, dots; {losses}"
    below.set_title(title, loc="left", fontsize=8)
    below.set_xlabel(f"time, {unit}")
    _add_grid(above, below)


def _means(timeline: Timeline, begin: int, span: int) -> dict[Kind, list[float]]:
    """Return the mean number of requests in each phase, by bins of time (`BINS`)."""
    wide = span / BINS
    sums: dict[Kind, list[float]] = {}
    changes: dict[Kind, list[int]] = {}
    for _, kind, start, end, _ in timeline.phases:
        parts = sums.setdefault(kind, [0.0] * BINS)
        change = changes.setdefault(kind, [0] * (BINS + 1))
        low, high = (start - begin) / wide, (end - begin) / wide
        first, last = min(int(low), BINS - 1), min(int(high), BINS - 1)
        # The bins at both ends count in part; those between them by the changes of the count.
        parts[last] += high - last
        parts[first] += first - low
        change[first] += 1
        change[last] -= 1
    return {
        kind: list(map(add, parts, accumulate(changes[kind]))) for kind, parts in sums.items()
    }


@attrs.frozen
class Latencies:
    """Latencies of the requests of a run, in seconds.

    Attributes:
        samples: the latencies of all requests, by measure.
        gaps: percentiles of the times between two tokens, by percentage; empty if they are not
            known.
        expected: the SLO of the run, by measure.
        title, caption: the run, in a few words and with all options.
    """

    samples: dict[str, list[float]]
    gaps: dict[float, float]
    expected: dict[str, float]
    title: str
    caption: str

    @classmethod
    def from_timeline(cls, timeline: Timeline) -> Latencies:
        """Return the latencies of a trace.

        Raises:
            InputError: the trace has no clock.
        """
        if timeline.header["mode"] == "untimed":
            msg = (
                f"{timeline.source}: it has no clock, so that there are no latencies: give "
                "the trace or the folder that `kvcore simulate --out` writes"
            )
            raise InputError(msg)
        requests = timeline.requests
        came, first, done = requests.arrival, requests.first_token, requests.finish
        samples = {
            "queue": _seconds_between(came, requests.admitted),
            "TTFT": _seconds_between(came, first),
            "TPOT": [
                (end - begin) / (tokens - 1) / NS_PER_S
                for begin, end, tokens in zip(first, done, requests.output, strict=True)
                if end >= 0 and tokens > 1
            ],
            "E2E": _seconds_between(came, done),
        }
        expected = _limits(timeline.header.get("slo", {}))
        return cls(samples, {}, expected, _run_text(timeline), _caption(timeline))

    @classmethod
    def of_result(cls, result: Result | ClusterResult) -> Latencies:
        """Return the latencies of a result."""
        log, rows = result.log, result.requests
        samples = {
            name: [time for time in rows[column] if time is not None]
            for name, column in COLUMNS.items()
        }
        gaps = _percentiles({} if result.itl is None else result.itl.as_dict())
        expected = _limits(slo_field(log.slo or SLO()))
        return cls(samples, gaps, expected, counted(len(log.ids), "request"), "")

    @classmethod
    def read(cls, folder: Path) -> Latencies:
        """Return the latencies of a result that was written to a folder.

        Raises:
            InputError: the folder has no result, or a file of it is damaged.
        """
        summary = _parsed(folder / SUMMARY, orjson.loads)
        rows = _parsed(folder / REQUESTS, lambda text: [*map(orjson.loads, text.splitlines())])
        try:
            samples = {
                name: [_seconds(row[column]) for row in rows if row[column] is not None]
                for name, column in COLUMNS.items()
            }
            expected = {
                name: _seconds(time)
                for part, name in SLO_NAMES.items()
                if (time := summary["slo"][f"{part}_s"]) is not None
            }
            gaps = _percentiles(summary["itl_s"] or {})
            config = summary.get("config")
            requests = counted(summary["requests"], "request")
            caption = "" if config is None else _setup(summary, config)
            if summary["rejected"]:
                requests += f", {summary['rejected']:,} rejected"
            name = "" if config is None else f"{shorten(config['workload']['name'])}, "
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            msg = f"{folder}: {SUMMARY} and {REQUESTS} are not those of a run ({error!r:.80})"
            raise InputError(msg) from error
        return cls(samples, gaps, expected, printable(f"{name}{requests}"), caption)


def _seconds(value: Any) -> float:
    """Return a time of a result. Raises ValueError for what is none, or of no run."""
    if type(value) in (int, float) and 0 <= value * NS_PER_S < INT64_LIMIT:
        return float(value)
    msg = f"{value!r:.20} is no time in seconds"
    raise ValueError(msg)


def _percentiles(times: Mapping[str, Any]) -> dict[float, float]:
    """Return the percentiles of recorded times in seconds, such as `p99`, by percentage.

    Raises:
        ValueError: a name or a time is wrong, or there are times and no percentiles.
    """
    seconds = {name: _seconds(time) for name, time in times.items()}
    known = {float(name[1:]): time for name, time in seconds.items() if name.startswith("p")}
    if bool(known) != bool(times) or not all(0 <= percent <= 100 for percent in known):  # noqa: PLR2004
        msg = f"{[*times]!r:.40} are no percentiles"
        raise ValueError(msg)
    return known


def _limits(slo: Mapping[str, int]) -> dict[str, float]:
    """Return the limits of an SLO in seconds, by measure; its fields are in ns."""
    return {SLO_NAMES[part]: time / NS_PER_S for part, time in slo.items()}


def _setup(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the setup of a run with one server or several."""
    if "replicas" not in summary:
        return SimulationReport(summary, config).setup
    from kvcore_cluster.report import ClusterReport  # noqa: PLC0415 - of several servers

    return ClusterReport(dict(summary), dict(config)).setup


def latency(latencies: Latencies, form: str) -> bytes:
    """Plot the distribution of each latency, with its percentiles and the SLO."""
    known = {name: sorted(times) for name, times in latencies.samples.items() if times}

    def draw(figure: Figure) -> None:
        panels = [*known, *(["ITL"] if latencies.gaps else [])]
        if not panels:
            _empty(figure.add_subplot(), "No request was admitted.")
            return
        across = min(3, len(panels))
        grid = figure.subplots(ceil(len(panels) / across), across, squeeze=False, sharey=True)
        for axes, name in zip(grid.flat, panels, strict=False):
            if name in known:
                _draw_samples(axes, known[name])
                rest = counted(len(known[name]), "request")
            else:
                _draw_percentiles(axes, latencies.gaps)
                rest = "percentiles as recorded"
            axes.set_title(f"{name}, {rest}", loc="left", fontsize=9)
            _draw_slo(axes, latencies.expected.get(name))
            _percent_axis(axes)
            _add_grid(axes)
            axes.tick_params(labelsize=7)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes in grid[:, 0]:
            axes.set_ylabel("requests, at most")

    return _framed(form, draw, f"Latencies of {latencies.title}", latencies.caption)


def _draw_samples(axes: Axes, times: Sequence[float]) -> None:
    """Draw the distribution of sorted seconds, its median and its 99th percentile."""
    size = len(times)
    ranks = sorted({0, size - 1, *range(0, size, ceil(size / BINS))})
    shares = [100 * (rank + 1) / size for rank in ranks]
    low = _lowest(times)
    drawn = [max(times[rank], low) for rank in ranks]
    axes.plot(drawn, shares, color=BLUE, drawstyle="steps-post")
    _time_axis(axes.xaxis, low, max(times[-1], low), "", FEW)
    for percent in (50, 99):
        _mark_percentile(axes, percent, times[max(0, ceil(percent * size / 100) - 1)], low)


def _draw_percentiles(axes: Axes, known: Mapping[float, float]) -> None:
    """Draw the known percentiles of a distribution."""
    percents, times = [*known], [*known.values()]
    low = _lowest(times)
    axes.plot(
        [max(time, low) for time in times], percents, ":", color=BLUE, marker="o", markersize=4
    )
    _time_axis(axes.xaxis, low / 2, 2 * max(*times, low), "", FEW)
    for percent, time in known.items():
        if percent in (50, 99):
            _mark_percentile(axes, percent, time, low)


def _lowest(times: Sequence[float]) -> float:
    """Return the least time on a logarithmic axis."""
    least = next((time for time in sorted(times) if time > 0), 1e-3)
    return max(least, max(times) / DECADES)


def _mark_percentile(axes: Axes, percent: float, time: float, low: float) -> None:
    """Mark a percentile, and label it with its value on the side that has room."""
    axes.plot([max(time, low)], [percent], "o", color=INK, markersize=4)
    start, end = axes.get_xlim()
    left = log10(max(time, low) / start) > 0.55 * log10(end / start)
    axes.annotate(
        f"p{percent:g} {format_seconds(time)}",
        (max(time, low), percent),
        (-5 if left else 5, -11),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.85},
    )


def _draw_slo(axes: Axes, limit: float | None) -> None:
    """Draw the SLO if it is near the curve; otherwise write its value."""
    if limit is None:
        return
    low, high = axes.get_xlim()
    place, beside, side = low, 3, "left"
    text = f"SLO {format_seconds(limit)}"
    if low <= limit <= 4 * high:
        axes.set_xlim(low, max(high, 1.3 * limit))
        axes.axvline(limit, color=RED, linewidth=1, linestyle="--")
        place, beside, side = limit, -3, "right"
    else:
        text += f", {'beyond' if limit > high else 'before'} this axis"
    style: Any = {"color": RED, "fontsize": 8, "ha": side}
    axes.annotate(text, (place, 4), (beside, 0), textcoords="offset points", **style)


def _framed(
    form: str,
    draw: Callable[[Figure], None],
    title: str,
    caption: str,
    inches: tuple[float, float] = INCHES,
) -> bytes:
    """Return a plot with a title above and the setup below."""

    def fill_in(figure: Figure) -> None:
        draw(figure)
        lines = (fill(printable(line), **CAPTION) for line in caption.splitlines())
        add_title(figure, title, "\n".join(lines))

    return picture(form, fill_in, inches)


def _run_text(timeline: Timeline) -> str:
    """Return the workload and the number of requests of a timeline, as text."""
    workload = timeline.header.get("workload") or {}
    rejected = len(timeline.requests.rejected)
    refused = f", {rejected:,} rejected" if rejected else ""
    name = f"{shorten(workload['name'])}, " if workload else ""
    return printable(f"{name}{counted(len(timeline.requests), 'request')}{refused}")


def _caption(timeline: Timeline) -> str:
    """Return the setup of the run, and where its trace stops if it is incomplete."""
    cut = "" if timeline.complete else f"Incomplete: {timeline.cut_reason}.\n"
    return f"{cut}{setup(timeline.header)}"


def _unit(span: int) -> tuple[str, int]:
    """Return the unit of an axis over `span` ns: its name and its ns."""
    return next(
        ((name, size) for name, size in reversed(UNITS.items()) if span >= 10 * size), ("ns", 1)
    )


def _times(series: Series) -> tuple[str, list[float]]:
    """Return the unit of the times of a series, and the times in this unit."""
    unit, factor = _unit(series.time[-1] - series.time[0])
    return unit, [time / factor for time in series.time]


def _time_text(time: int) -> str:
    """Return `time` ns as text, with its unit."""
    return format_seconds(time / NS_PER_S)


def _round_time(time: int) -> int:
    """Return the least of 1, 2 and 5 times a power of ten that is not below `time` ns."""
    power: int = 10 ** floor(log10(time))
    return next(size for size in (power, 2 * power, 5 * power, 10 * power) if size >= time)


def _even_rows(series: Series, begin: int, span: int) -> list[int]:
    """Return the rows of a series at about `POINTS` even times, without repetitions."""
    times = (begin + span * part // POINTS for part in range(POINTS + 1))
    rows = (min(bisect_left(series.time, time), len(series) - 1) for time in times)
    return list(dict.fromkeys(rows))


def _seconds_between(begin: Iterable[int], end: Iterable[int]) -> list[float]:
    """Return the seconds from `begin` to `end`, without those that have no end."""
    return [(b - a) / NS_PER_S for a, b in zip(begin, end, strict=True) if b >= 0]


def _distribution(histogram: Histogram) -> tuple[list[float], list[float]]:
    """Return seconds, from 1 ns on, and the percent of the samples that are at most these."""
    bounds = borders()
    bounds = bounds[1 : bisect_left(bounds, max(histogram.high, 1)) + 1]
    parts = histogram.at_most(bounds)
    first = max(bisect_left(parts, 1) - 1, 0)
    last = bisect_left(parts, histogram.weight)
    kept = slice(first, last + 1)
    times = [bound / NS_PER_S for bound in bounds[kept]]
    return times, [100 * part / histogram.weight for part in parts[kept]]


def _parts_of_pool(
    series: Series,
) -> tuple[list[Sequence[float]], list[str], list[str]]:
    """Return the blocks of each part of the pool, its name and its colour.

    Of cache groups a part is what a group has, cached or private.
    """
    if not series.groups:
        layers = [getattr(series, name) for name in BANDS]
        return layers, list(BANDS), list(BANDS.values())
    colours = [*islice(cycle(COLOURS), len(series.groups)), PALE]
    names = [f"group {name}" for name in series.groups]
    return [*series.groups.values(), series.free], [*names, "free"], colours


def _block_text(header: Mapping[str, Any]) -> str:
    """Return the label of an axis of blocks, with their size if all have the same."""
    groups = (header.get("cache_groups") or {}).get("groups", ())
    sizes = {group["block_size"] for group in groups} or {header["block_size"]}
    size = sizes.pop()
    return "blocks" if sizes else f"blocks of {counted(size, 'token')}"


def _bands(
    axes: Axes,
    times: Sequence[float],
    layers: Sequence[Sequence[float]],
    names: Sequence[str],
    colours: Sequence[str],
) -> None:
    """Draw layers on top of one another; the names of thin layers are in a legend."""
    if times[-1] == times[0]:  # a moment has no width
        times, layers = [times[0], times[0] + 1], [[layer[-1]] * 2 for layer in layers]
    bottom = [0.0] * len(times)
    height = max(map(sum, zip(*layers, strict=True)), default=0) or 1
    thin = []
    for layer, name, colour in zip(layers, names, colours, strict=True):
        top = [low + part for low, part in zip(bottom, layer, strict=True)]
        band = axes.fill_between(times, bottom, top, step="post", color=colour, linewidth=0)
        band.set_label(f"{name} (at most {format_number(max(layer))})")
        x, thick = _widest(times, layer)
        if thick < THIN * height and any(layer):
            thin.append(band)
        elif any(layer):
            dark = colour in (BLUE, RED)
            middle = x, bottom[_row_at(times, x)] + thick / 2
            axes.text(*middle, name, ha="center", va="center", color="white" if dark else INK)
        bottom = top
    axes.set_xlim(times[0], times[-1])
    if thin:
        _legend(axes, thin, "lower right")


def _legend(axes: Axes, handles: Sequence[Any], loc: Any) -> None:
    """Draw a legend above the axes, in rows of three, which their width has room for."""
    anchor: Any = {"bbox_to_anchor": (float("right" in loc), 1), "ncols": min(3, len(handles))}
    axes.legend(handles=handles, loc=loc, frameon=False, fontsize=8, handlelength=1, **anchor)


def _widest(times: Sequence[float], layer: Sequence[float]) -> tuple[float, float]:
    """Return the middle of the tenth of all times with the thickest layer, and how thick."""
    step = (times[-1] - times[0]) / PLACES
    xs = [times[0] + step * index for index in range(PLACES + 1)]
    parts = [layer[_row_at(times, x)] for x in xs]
    half = PLACES // 20  # of a tenth
    middles = range(half, PLACES - half + 1)
    heights = {index: min(parts[index - half : index + half + 1]) for index in middles}
    best = max(heights, key=heights.__getitem__)
    return xs[best], heights[best]


def _row_at(times: Sequence[float], time: float) -> int:
    """Return the row that holds at `time`: the last one that is not after it."""
    return max(bisect_right(times, time) - 1, 0)


def _percent_axis(axes: Axes) -> None:
    axes.set_ylim(0, 104)
    axes.set_yticks([0, 25, 50, 75, 99], ["0", "25%", "50%", "75%", "99%"])


def _time_axis(axis: Axis, low: float, high: float, label: str, limit: int = 8) -> None:
    """Set a logarithmic axis from `low` to `high` seconds, with a limited number of ticks."""
    low, high = low / 1.15, high * 1.15
    ticks = log_ticks(low, high)
    if len(ticks) > limit:
        powers = [tick for tick in ticks if log10(tick).is_integer()]
        ticks = powers if len(powers) > 1 else ticks
        ticks = ticks[:: ceil(len(ticks) / limit)]
    axes = axis.axes
    across = axis is axes.xaxis
    (axes.set_xscale if across else axes.set_yscale)("log")
    (axes.set_xlim if across else axes.set_ylim)(low, high)
    axis.set_ticks(ticks, [format_seconds(tick) for tick in ticks])
    axis.set_ticks([], minor=True)
    if label:
        axis.set_label_text(label)


def _empty(axes: Axes, text: str) -> None:
    """Write into empty axes why nothing is drawn."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)


def _add_grid(*panels: Axes) -> None:
    for axes in panels:
        axes.grid()
        axes.tick_params(labelsize=8)


def _parsed(file: Path, parse: Callable[[bytes], Any]) -> Any:
    """Return what a file of a result has; raise InputError if it cannot be read."""
    try:
        return parse(file.read_bytes())
    except (OSError, ValueError) as error:
        wrote = "no result that `kvcore simulate --out` wrote"
        msg = f"{file.parent} is {wrote}: {file.name}: {error}"
        raise InputError(msg) from error
