"""Results in Python and notebooks: their sections as text and as HTML, with plots."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from functools import partial
from html import escape
from io import StringIO
from typing import Any

import attrs

from kvcore.errors import PluginError
from kvcore.sections import Section, Table
from kvcore.serving import Result
from kvcore.units import format_number, format_seconds
from kvcore_cli.output import print_sections
from kvcore_cli.report.simulation import COLUMNS, TIMES
from kvcore_cli.report.tables import cell, counted, share
from kvcore_cluster.result import ClusterResult
from kvcore_lab.comparison import Comparison
from kvcore_lab.curves.mrc import Curves
from kvcore_lab.plans.devices import DevicePlans
from kvcore_lab.plans.planning import FleetPlan
from kvcore_lab.quality import Quality
from kvcore_lab.report.comparison import ComparisonReport
from kvcore_lab.report.mrc import CurvesReport
from kvcore_lab.report.plan import DevicePlansReport, PlanReport
from kvcore_lab.report.quality import QualityReport
from kvcore_lab.report.routers import RoutersReport
from kvcore_lab.report.sweep import SweepReport
from kvcore_lab.router_comparison import RouterComparison
from kvcore_lab.sweep import Sweep
from kvcore_replay.misses.reasons import Explanation
from kvcore_replay.report import plots
from kvcore_replay.report.charts import plot_chart
from kvcore_replay.report.misses import SummaryReport
from kvcore_replay.report.whatif import WhatIfReport
from kvcore_replay.what_if import WhatIf

ROWS = 40
"""The most rows of a table."""

PLOT = "max-width: 100%; width: 640px; background: white"


def report_on(result: object) -> Any:
    """Return the report on a result. A plot that is no chart is drawn by its method `plot`.

    Raises:
        TypeError: `result` is of no class that has one.
    """
    for kind in type(result).__mro__:
        if kind in REPORTS:
            return REPORTS[kind](result)
    msg = f"there is no view of {type(result).__name__}"
    raise TypeError(msg)


def told(result: object) -> str:
    """Return the notes of the workload of a result, each on a line."""
    notes = getattr(result, "workload_notes", None)  # of plans, which have notes of their own
    return "\n".join(getattr(result, "notes", ()) if notes is None else notes)


def report_text(result: object) -> str:
    """Return a result as the command line prints it."""
    text = StringIO()
    with redirect_stdout(text):
        print_sections(*report_on(result).sections, told(result))
    return text.getvalue().rstrip("\n")


def report_html(result: object) -> str:
    """Return a result as HTML: all texts escaped, and the plot as an image."""
    report = report_on(result)
    parts = map(_part, (*report.sections, told(result)))
    plot: Callable[[str], bytes] | None = getattr(report, "plot", None)
    return f"<div>{''.join(parts)}{'' if plot is None else _picture(plot)}</div>"


def _part(section: Section) -> str:
    """Return a section as elements."""
    if isinstance(section, str):
        return "".join(f"<p>{escape(line)}</p>" for line in section.splitlines())
    if not isinstance(section, Table):
        return _picture(partial(plot_chart, section, small=True))
    if not section.rows:
        return ""
    head = _row("th", section.headers)
    body = "".join(_row("td", row) for row in section.rows[:ROWS])
    more = len(section.rows) - ROWS
    rest = f"<p>{counted(more, 'more row')}.</p>" if more > 0 else ""
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{rest}"


def _row(tag: str, cells: Iterable[object]) -> str:
    """Return a row: the first cell flush left, the others right, as numbers are."""
    texts = [escape(str(cell)) for cell in cells]
    sides = ("left", *["right"] * len(texts))
    row = "".join(
        f'<{tag} style="text-align: {side}">{text}</{tag}>'
        for text, side in zip(texts, sides, strict=False)
    )
    return f"<tr>{row}</tr>"


def _picture(plot: Callable[[str], bytes]) -> str:
    """Return a plot as an element; nothing without matplotlib."""
    try:
        data = b64encode(plot("svg")).decode()
    except PluginError:
        return ""
    # As an image: texts in it can never become markup of the page.
    return f'<img alt="plot" style="{PLOT}" src="data:image/svg+xml;base64,{data}">'


@attrs.frozen
class RunReport:
    """Report on a run whose configuration is not known: its figures and its times.

    Attributes:
        result: the result.
    """

    result: Result | ClusterResult

    @property
    def sections(self) -> list[Section]:
        """The whole report on the run."""
        result, hits = self.result, self.result.hit_ratio
        requests, rejected = len(result.log.ids), len(result.log.reasons)
        quantities: list[tuple[float | None, Callable[[float], str], str]] = [
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
            cells = [cell(getattr(times, n, None), format_seconds) for n in COLUMNS]
            rows.append([title, *cells])
        return [f"{'; '.join(parts)}.", Table(["time", *COLUMNS], rows)]

    def plot(self, form: str) -> bytes:
        """Return a plot of the latencies of requests.

        Raises:
            PluginError: matplotlib is not installed.
        """
        return plots.latency(plots.Latencies.of_result(self.result), form)


REPORTS: Mapping[type, Callable[[Any], Any]] = {
    Comparison: ComparisonReport,
    Curves: CurvesReport,
    Explanation: lambda explanation: SummaryReport.from_explanation(
        explanation, explanation.summary()
    ),
    DevicePlans: lambda plans: DevicePlansReport(plans.as_dict()),
    FleetPlan: lambda plan: PlanReport(plan.as_dict()),
    Quality: QualityReport,
    RouterComparison: RoutersReport,
    Sweep: SweepReport,
    WhatIf: WhatIfReport,
    Result: RunReport,
    ClusterResult: RunReport,
}
"""The report on a result, by its class."""
