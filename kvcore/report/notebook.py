"""Results in a notebook: a sentence, a table and, with matplotlib, a plot."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from functools import singledispatch
from html import escape

import attrs

from kvcore.analysis import Comparison, Curves, Explanation, WhatIf
from kvcore.analysis.planning import FleetPlan
from kvcore.analysis.quality import Quality
from kvcore.analysis.routers import RouterComparison
from kvcore.analysis.sweep import Sweep
from kvcore.cluster.result import ClusterResult
from kvcore.errors import InputError, PluginError
from kvcore.report import plots
from kvcore.report.charts import Chart, Panel
from kvcore.report.comparison import ComparisonReport
from kvcore.report.misses import SummaryReport
from kvcore.report.mrc import CurvesReport
from kvcore.report.plan import HEADERS, PlanReport
from kvcore.report.quality import QualityReport
from kvcore.report.routers import RoutersReport
from kvcore.report.simulation import COLUMNS, TIMES
from kvcore.report.sweep import SweepReport, chart_axis
from kvcore.report.tables import NONE, counted, share
from kvcore.report.whatif import WhatIfReport
from kvcore.serving import Result
from kvcore.units import format_number, format_seconds

ROWS, SIZES = 40, 16
"""The most rows of a table, and of a table of curves."""

PLOT = "max-width: 100%; width: 640px; background: white"


@attrs.frozen
class View:
    """A result for a notebook.

    Attributes:
        text: sentences above the table.
        headers, rows: headers and rows of the table.
        plot: draws the result as `svg`; None: there is no plot.
    """

    text: str
    headers: Sequence[str]
    rows: Iterable[Sequence[str]]
    plot: Callable[[str], bytes] | None = None


def html(result: object) -> str:
    """Return a result as HTML: all texts escaped, and the plot as an image."""
    shown = view(result)
    rows = [list(map(str, row)) for row in shown.rows]
    head = _row("th", shown.headers)
    body = "".join(_row("td", row) for row in rows[:ROWS])
    more = len(rows) - ROWS
    rest = f"<p>{counted(more, 'more row')}.</p>" if more > 0 else ""
    table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>" if rows else ""
    text = "".join(f"<p>{escape(line)}</p>" for line in shown.text.splitlines())
    return f"<div>{text}{table}{rest}{_picture(shown)}</div>"


def _row(tag: str, cells: Iterable[str]) -> str:
    """Return a row: the first cell flush left, the others right, as numbers are."""
    places = ("left", *["right"] * len(list(cells)))
    return "<tr>{}</tr>".format(
        "".join(
            f'<{tag} style="text-align: {place}">{escape(cell)}</{tag}>'
            for cell, place in zip(cells, places, strict=False)
        )
    )


def _picture(shown: View) -> str:
    """Return the plot as an element; nothing without matplotlib."""
    if shown.plot is None:
        return ""
    try:
        data = b64encode(shown.plot("svg")).decode()
    except PluginError:
        return ""
    # As an image: texts in it can never become markup of the page.
    return f'<img alt="plot" style="{PLOT}" src="data:image/svg+xml;base64,{data}">'


@singledispatch
def view(result: object) -> View:
    """Return the view of a result in a notebook."""
    msg = f"there is no view of {type(result).__name__}"
    raise TypeError(msg)


@view.register
def _(result: Comparison) -> View:
    report = ComparisonReport(result)
    if report.empty:
        return View(report.headline, [], [])
    text = f"{report.headline}\n{report.reading}"
    return View(text, report.headers, report.rows, _small(report.chart()))


@view.register
def _(result: Curves) -> View:
    report = CurvesReport(result)
    if report.empty:
        return View(report.headline, [], [])
    headers, rows = report.headers, list(report.rows)
    # The table has some of the sizes, the last one included.
    step = -(-len(rows) // SIZES)
    return View(report.headline, headers, rows[::-step][::-1], report.plot)


@view.register
def _(result: Sweep) -> View:
    report = SweepReport(result)
    text = f"{report.headline}\n{report.reading}"
    try:
        chart = report.chart(chart_axis(result.grid, None))
    except InputError:  # no axis to draw it over, or several
        return View(text, report.headers, report.rows)
    return View(text, report.headers, report.rows, _small(chart))


@view.register
def _(result: FleetPlan) -> View:
    report = PlanReport(result)
    plot = _small(report.chart()) if result.options else None
    return View(f"{report.headline}\n{report.limit}", HEADERS, report.rows, plot)


@view.register
def _(result: WhatIf) -> View:
    report = WhatIfReport(result)
    runs = {"recorded": result.recorded, "what if": result.rerun}
    hits = {name: [(0.0, run.hit["ratio"]["block"] or 0.0)] for name, run in runs.items()}
    chart = Chart("", "", "", [Panel("blocks looked up that hit", hits, share)])
    text = f"{report.headline}\n{report.verdict}"
    return View(text, report.headers, report.rows, _small(chart))


@view.register
def _(result: Explanation) -> View:
    summary = result.summary()
    report = SummaryReport(result, summary)
    lost = {
        name.replace("_", " "): [(0.0, float(missed.tokens))]
        for name, missed in summary.categories.items()
        if missed.tokens
    }
    chart = Chart("", "", "", [Panel("prompt tokens that missed", lost, format_number)])
    return View(report.headline, report.headers, report.rows, _small(chart) if lost else None)


@view.register
def _(result: Quality) -> View:
    report = QualityReport(result)
    text = f"{report.headline}\n{report.reading}"
    return View(text, report.headers, report.rows, report.plot)


@view.register
def _(result: RouterComparison) -> View:
    report = RoutersReport(result)
    text = f"{report.headline}\n{report.reading}"
    return View(text, report.headers, report.rows, _small(report.chart()))


@view.register
def _(result: Result | ClusterResult) -> View:
    log, hits = result.log, result.hit_ratio
    requests, rejected = len(log.ids), len(log.reasons)
    quantities = [
        (result.throughput_tokens_s, format_number, "generated tokens/s"),
        (result.goodput, format_number, "requests/s within the SLO"),
        (hits.block, share, "of the blocks looked up hit"),
    ]
    parts = [f"{counted(requests, 'request')}, {rejected:,} rejected"]
    for value, write, what in quantities:
        if value is not None:
            parts.append(f"{write(value)} {what}")
    rows = []
    for name, title in TIMES.items():
        times = getattr(result, name.removesuffix("_s"))
        cells = [] if times is None else [format_seconds(getattr(times, n)) for n in COLUMNS]
        rows.append([title, *(cells or [NONE] * len(COLUMNS))])
    found = plots.Latencies.of_result(result)
    return View(
        f"{'; '.join(parts)}.",
        ["time", *COLUMNS],
        rows,
        lambda form: plots.latency(found, form),
    )


def _small(chart: Chart) -> Callable[[str], bytes]:
    return lambda form: chart.plot(form, small=True)
