"""Report on a validation: tables of errors, rows as CSV, and a plot."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import attrs

from kvcore.plugins.options import as_text
from kvcore.sections import Section, Table
from kvcore.units import format_number, format_seconds
from kvcore_cli.report.tables import NONE, counted, printable
from kvcore_lab.measured.rows import LABELS, LOAD, MEASURES, OPTIONS
from kvcore_lab.measured.validation import GROUPS, Compared, Errors, Validation
from kvcore_replay.report.figure import COLOURS, GREY, INK, MARKERS, add_title, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "throughput": "throughput"}
UNITS = {"ttft": "", "tpot": "", "throughput": ", output tokens/s"}

SMALL = 0.01
"""Share of all rows below which a group is left out of the table, but not of the JSON."""

WORST = 3
"""Number of rows that are listed for each measure."""

MOST_GROUPS = 12
"""The most groups that have a colour and a marker of their own in a plot."""


@attrs.frozen
class ValidationReport:
    """Measured rows beside their simulations, as tables, JSON, CSV and a plot.

    Attributes:
        validation: the validation.
        by: the columns by which rows are grouped, one after another.
    """

    validation: Validation
    by: Sequence[str] = GROUPS

    @property
    def sections(self) -> list[Section]:
        """The whole report on the validation."""
        measure = self.validation.measures[-1]
        (worst,) = self.validation.worst(measure, 1)
        reasons = [[f"{rows:,}", why] for why, rows in self.validation.left_out.items()]
        return [
            self.headline,
            self.table,
            self.worst,
            f"The row that is furthest off in {NAMES[measure]}, by itself:\n{command(worst)}",
            Table(["left out", "why"], reasons, ["left out"]),
        ]

    @property
    def headline(self) -> str:
        """Sentences about the numbers of rows, and the errors."""
        validation = self.validation
        rows = counted(len(validation.compared), "row")
        left = sum(validation.left_out.values())
        others = f", {left:,} left out" if left else ""
        return (
            f"{validation.source}: {rows} simulated{others}. "
            "Errors are simulated / measured - 1: their median, that of their absolute values, "
            "and of these the 90th percentile."
        )

    @property
    def table(self) -> Table:
        """The errors of all rows, and of each group that is neither small nor all."""
        headers = ["rows that have", "rows"]
        for name in self.validation.measures:
            headers += [NAMES[name], "absolute", "p90"]
        every = self.validation.compared
        rows = [
            self._cells("all", every),
            *(
                self._cells(f"{column} {name}", rows)
                for column, name, rows in self._groups()
                if SMALL * len(every) <= len(rows) < len(every)
            ),
        ]
        return Table(headers, rows)

    @property
    def worst(self) -> Table:
        """The rows with the largest errors of each measure."""
        names = ["furthest off in", "line", "server", "load", "measured", "simulated", "error"]
        rows = [
            [
                NAMES[measure],
                f"{row.row.line:,}",
                _server(row),
                _load(row),
                _written(measure, row.row.values[measure]),
                _written(measure, row.values[measure]),
                f"{row.error(measure):+.1%}",
            ]
            for measure in self.validation.measures
            for row in self.validation.worst(measure, WORST)
        ]
        return Table(names, rows, [names[1], *names[4:]])

    def document(self) -> dict[str, Any]:
        """Return the validation as a JSON object."""
        validation = self.validation
        return {
            "schema": 1,
            "source": validation.source,
            "rows": len(validation.compared),
            "errors": self._errors(validation.compared),
            "groups": [
                {"by": column, "value": name, "errors": self._errors(rows)}
                for column, name, rows in self._groups()
            ],
            "left_out": [{"reason": why, "rows": n} for why, n in validation.left_out.items()],
            "compared": [_fields(row) for row in validation.compared],
        }

    def write_csv(self, file: TextIO) -> None:
        """Write a line for each row: the measured and the simulated values, and the errors."""
        rows = [_fields(row) for row in self.validation.compared]
        every = {name for row in rows for name in row}
        order = ["line", *LABELS, *OPTIONS, *LOAD]
        for measure in MEASURES:
            order += [measure, f"simulated_{measure}", f"{measure}_error"]
        names = [name for name in order if name in every]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

    def plot(self, form: str) -> bytes:
        """Return a plot as `png`, `svg` or `pdf` bytes: simulated over measured, on log axes.

        Each measure has a panel, each value of the first grouping a colour.

        Raises:
            PluginError: matplotlib is not installed.
        """
        measures = self.validation.measures
        return picture(form, self._draw, (4.2 * len(measures) + 1.8, 4.6))

    def _draw(self, figure: Figure) -> None:
        measures, of_all = self.validation.measures, self.validation.compared
        column, groups = self.by[0], self.validation.groups(self.by[0])
        panels = figure.subplots(1, len(measures), squeeze=False)[0]
        looks = list(zip(cycle(COLOURS[:-1]), MARKERS * 2, strict=False))[:MOST_GROUPS]
        for axes, measure in zip(panels, measures, strict=True):
            points: list[tuple[float, float]] = []
            for index, (name, rows) in enumerate(groups.items()):
                pairs = [
                    (row.row.values[measure], row.values[measure])
                    for row in rows
                    if row.error(measure) is not None
                ]
                colour, marker = looks[index] if index < len(looks) else (COLOURS[-1], ".")
                axes.plot(
                    *(zip(*pairs, strict=True) if pairs else ((), ())),
                    linestyle="none", marker=marker, markersize=3.5, color=colour,
                    markeredgewidth=0, alpha=0.65, label=printable(name),
                )  # fmt: skip
                points += pairs
            _frame(axes, measure, points, self.validation.errors(measure))
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside right upper",
            title=column.replace("_", " "), frameon=False, fontsize=8,
        )  # fmt: skip
        title = f"{Path(self.validation.source).name}: {counted(len(of_all), 'row')}"
        add_title(figure, printable(title))

    def _groups(self) -> Iterator[tuple[str, str, list[Compared]]]:
        for column in self.by:
            for name, rows in self.validation.groups(column).items():
                yield column, name, rows

    def _cells(self, name: str, rows: list[Compared]) -> list[str]:
        cells = [name, f"{len(rows):,}"]
        for measure in self.validation.measures:
            errors = self.validation.errors(measure, rows)
            cells += (
                [NONE] * 3
                if errors is None
                else [f"{errors.signed:+.1%}", f"{errors.absolute:.1%}", f"{errors.p90:.1%}"]
            )
        return cells

    def _errors(self, rows: list[Compared]) -> dict[str, Any]:
        errors = {name: self.validation.errors(name, rows) for name in self.validation.measures}
        return {
            name: None if error is None else attrs.asdict(error)
            for name, error in errors.items()
        }


def command(compared: Compared) -> str:
    """Return the command that simulates a row by itself, as a shell reads it."""
    words = ["kvcore", "simulate", str(compared.config.workload)]
    for name, value in compared.options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            for text in value if isinstance(value, list | tuple) else [value]:
                words += [f"--{flag}", as_text(text)]
    return shlex.join(words)


def _frame(
    axes: Axes, measure: str, points: list[tuple[float, float]], errors: Errors | None
) -> None:
    """Draw the diagonal, on which both values are equal, and set the axes."""
    values = [value for point in points for value in point]
    low, high = min(values) / 1.3, max(values) * 1.3
    axes.plot((low, high), (low, high), color=INK, linewidth=0.8, zorder=1)
    for factor in (0.5, 2):
        axes.plot(
            (low, high), (low * factor, high * factor), color=GREY, linewidth=0.6,
            linestyle=(0, (4, 3)), zorder=1,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: _written(measure, value))
        axis.set_minor_formatter("")
    axes.tick_params(labelsize=8)
    axes.set_xlabel(f"measured {NAMES[measure]}{UNITS[measure]}")
    axes.set_ylabel(f"simulated {NAMES[measure]}")
    axes.grid()
    if errors is not None:
        text = f"median {errors.signed:+.1%}\nabsolute {errors.absolute:.1%}"
        axes.text(0.04, 0.96, text, transform=axes.transAxes, va="top", fontsize=8, color=GREY)


def _fields(compared: Compared) -> dict[str, Any]:
    """Return a row and its simulation as one mapping."""
    row = compared.row
    own = {name: _plain(value) for name, value in {**row.options, **row.load}.items()}
    fields: dict[str, Any] = {"line": row.line, **row.labels, **own}
    for measure in MEASURES:
        if measure in row.values:
            fields[measure] = row.values[measure]
        if measure in compared.values:
            fields[f"simulated_{measure}"] = compared.values[measure]
        if compared.error(measure) is not None:
            fields[f"{measure}_error"] = compared.error(measure)
    return fields


def _plain(value: Any) -> Any:
    """Return an option as a value of JSON and CSV."""
    finite = isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value))
    return value if finite else str(value)


def _server(compared: Compared) -> str:
    row = compared.row
    names = (row.label("engine"), row.label("version"))
    engine = " ".join(name for name in names if name != "-")
    weights = row.options.get("weights_dtype")
    served = f"{row.label('model')}{f' in {weights}' if weights else ''}"
    devices = f"{compared.config.tensor_parallel} x {row.label('device')}"
    return f"{served} on {devices} {engine}".strip()


def _load(compared: Compared) -> str:
    load = compared.row.load
    clients, rate = load.get("concurrency"), load.get("rate")
    lengths = f"{load['input_tokens']:,} + {load['output_tokens']:,} tokens"
    return f"{lengths}, {counted(clients, 'client') if clients else f'{rate:g} requests/s'}"


def _written(measure: str, value: float) -> str:
    write: Callable[[float], str] = format_number if measure == "throughput" else format_seconds
    return write(value)
