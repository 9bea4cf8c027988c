"""Report on a sweep: tables of the best policies, a chart, and rows as CSV, JSON or Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product, zip_longest
from math import isclose, prod
from pathlib import Path
from typing import Any

import attrs

from kvcore.errors import InputError, shorten
from kvcore.files import atomic_file, part_path
from kvcore.lazy import import_extra
from kvcore.plugins.options import as_text
from kvcore.sections import Chart, Panel, Section, Table
from kvcore.trace.fields import version
from kvcore.units import format_bytes, format_dollars, format_number, format_seconds
from kvcore_cli.output import json_bytes
from kvcore_cli.report.tables import NONE, cell, counted, share
from kvcore_lab.statistics import SESSIONS, STRETCHES, Interval, Parts, bootstrap, ratio
from kvcore_lab.sweep.executors import Row, Sweep
from kvcore_lab.sweep.grid import Grid, axes_of
from kvcore_replay.report.charts import is_bound

POLICIES = (
    *("prefix", "retention", "checkpoint", "drafter", "router", "scheduler", "eviction"),
)
"""The axes whose values compete: cells that differ in nothing else are compared."""

MOST_PANELS = 6
"""Panels of a chart of several workloads, from which on it has the first measure alone."""

MOST_LINES = 24
"""Lines of a chart that can be told apart."""


@attrs.frozen
class Measure:
    """A quantity by which cells are ranked.

    Attributes:
        title: header of the column with the best cells.
        column: its column in the rows of a sweep.
        unit: header of the column with its value.
        text: formats a value.
        best: `max` or `min`.
        names: whether the best policy is named: costs follow from the GPUs above all.
        figure: formats a value beside others of its kind, with the zeros at its end.
        change: formats a difference of two values in the same way.
    """

    title: str
    column: str
    unit: str
    text: Callable[[float], str]
    best: Callable[..., float] = max
    names: bool = True
    figure: Callable[[float], str] = attrs.Factory(lambda self: self.text, takes_self=True)
    change: Callable[[float], str] = attrs.Factory(lambda self: self.figure, takes_self=True)

    @property
    def label(self) -> str:
        """The quantity and its unit: `hits, of blocks`."""
        return f"{self.title.partition(' ')[2]}, {self.unit}"


def _points(part: float) -> str:
    """Format a difference of shares."""
    return f"{100 * part:.1f} points"


_seconds = partial(format_seconds, zeros=True)
_number = partial(format_number, zeros=True)

LEAST_COST = Measure(
    title="least cost",
    column="usd_per_million_output_tokens",
    unit="$ per million tokens",
    text=format_dollars,
    best=min,
    names=False,
)
"""The measure of sweeps whose cells have different GPUs."""

TIED = 0.01
"""Figures that differ by no more than this share of them are told as equal."""

PRICED = {"device", "model", "tensor_parallel", "replicas", "autoscale", "rate_scale"}
"""The axes by which cells differ in their GPUs, or in the tokens that these generate."""

MEASURES: Mapping[str, Sequence[Measure]] = {
    "compare": [Measure("most hits", "hit_ratio_block", "of blocks", share, change=_points)],
    "simulate": [
        Measure("most goodput", "goodput", "requests/s", format_number, figure=_number),
        Measure("least TTFT", "ttft_s_mean", "mean", format_seconds, min, figure=_seconds),
        Measure("most hits", "hit_ratio_token", "of tokens", share, change=_points),
    ],
}


@attrs.frozen
class SweepReport:
    """A sweep as a table with sentences, and as a chart.

    Attributes:
        sweep: the sweep.
        intervals: whether each policy has an interval by a bootstrap over sessions or
            stretches of the requests, where seeds do not vary.
    """

    sweep: Sweep
    intervals: bool = False

    @property
    def sections(self) -> list[Section]:
        """The whole report on the sweep, with a chart if one axis of numbers varies."""
        sections: list[Section] = [self.headline, *self.tables]
        with suppress(InputError):
            sections.append(self.chart(chart_axis(self.sweep.grid, None)))
        return [*sections, f"{self.reading}\n{self.setup}".lstrip()]

    @property
    def headline(self) -> str:
        """A sentence about the cells of the sweep."""
        sweep, axes = self.sweep, self.sweep.grid.axes
        varied = ", ".join(f"{len(axes[name])} x {name}" for name in sweep.grid.varied)
        how = "simulated" if sweep.grid.mode == "simulate" else "replayed without a clock"
        failed = f" {counted(len(sweep.failed), 'cell')} failed." if sweep.failed else ""
        were = "was" if sweep.found == 1 else "were"
        kept = f" {sweep.found:,} {were} there already." if sweep.found else ""
        of = f" ({varied})" if varied else ""
        return f"{counted(len(sweep.rows), 'cell')}{of}, {how}.{kept}{failed}"

    @property
    def table(self) -> Table:
        """The best of each group of competing cells by each measure, in the grid's order."""
        contests: dict[tuple[str, ...], list[Row]] = {}
        for row in self.sweep.rows:
            contests.setdefault(self._contest(row), []).append(row)
        rows = [[*key, *self._best(rows)] for key, rows in contests.items()]
        best = [header for measure in self.measures for header in self._headers(measure)]
        headers = [*self._given, *best, *(["of the optimum"] if self._bounded else [])]
        numbers = ["blocks", "memory", "block_size", "replicas", "of the optimum"]
        numbers += (self._headers(measure)[-1] for measure in self.measures)
        return Table(headers, rows, numbers, split=True)

    @property
    def tables(self) -> list[Section]:
        """The best policies; or with seeds or intervals, all of them by each measure."""
        if "seed" in self.sweep.grid.varied:
            return [*map(self._seed_table, self.measures)]
        if self.intervals:
            tables = map(self._stretch_table, self.measures)
            return [table for table in tables if table.rows]
        return [self.table]

    def _stretch_table(self, measure: Measure) -> Table:
        """Return each policy with intervals by a bootstrap over parts of the requests."""
        firsts: dict[tuple[str, ...], Parts] = {}
        rows = []
        for row, parts in zip(self.sweep.rows, self.sweep.shares, strict=True):
            own = (parts or {}).get(measure.column)
            if own is None:
                continue
            key = self._contest(row)
            first = firsts.setdefault(key, own)
            change = [NONE, NONE]
            if first is not own:
                low, high = (_signed(measure, end) for end in bootstrap(own, first))
                apart = _signed(measure, ratio(own) - ratio(first))
                change = [apart, _between(low, high)]
            interval = _between(*map(measure.figure, bootstrap(own)))
            policy = [self._policy(row)] if self._competing else []
            rows.append([*key, *policy, measure.figure(ratio(own)), interval, *change])
        figures = [measure.label, "95 %", "to the first", "95 % "]
        return Table([*self._apart, *figures], rows, figures)

    @property
    def _drawn(self) -> str:
        """The parts that the bootstrap draws: sessions if a workload has them, or stretches."""
        sizes = {
            len(parts[0])
            for row in self.sweep.shares
            for parts in (row or {}).values()
            if parts is not None
        }
        names = [f"{STRETCHES} stretches of the requests"] * (STRETCHES in sizes)
        names += [
            f"{size} {'groups of ' * (size == SESSIONS)}sessions"
            for size in sorted(sizes - {STRETCHES})
        ]
        return " or ".join(names)

    def _seed_table(self, measure: Measure) -> Table:
        """Return the means over seeds, with differences to the first policy."""
        contests: dict[tuple[str, ...], dict[str, dict[Any, float]]] = {}
        for row in self.sweep.rows:
            if (value := row[measure.column]) is not None:
                policies = contests.setdefault(self._contest(row), {})
                policies.setdefault(self._policy(row), {})[row["seed"]] = value
        paired = any(len(policies) > 1 for policies in contests.values())
        rows = []
        for key, policies in contests.items():
            first = next(iter(policies.values()))
            for name, values in policies.items():
                mean = Interval.from_values([*values.values()])
                half = cell(mean.half, measure.change)
                cells = [measure.figure(mean.mean), half, str(mean.runs)]
                if paired:
                    cells += _difference(measure, values, first)
                rows.append([*key, *([name] if self._competing else []), *cells])
        figures = [measure.label, "± 95 %", "seeds"]
        if paired:
            figures += ["to the first", "± 95 % ", "better"]
        return Table([*self._apart, *figures], rows, figures)

    @property
    def reading(self) -> str:
        """Sentences about the table, and a warning about saturated cells."""
        lines = []
        if "seed" in self.sweep.grid.varied:
            lines.append(
                "Means over seeds, with intervals of 95 % by Student's t. To the first: the "
                "mean of the differences to the first policy, each with the same seed; better: "
                "the seeds with which it is."
            )
        elif self.intervals:
            lines.append(
                f"Intervals of 95 % by a bootstrap over {self._drawn}: how much a figure rests "
                "on few of them. To the first: the difference to the first policy, paired by "
                "what is drawn."
            )
        elif self._competing:
            by = " and ".join(self._competing)
            tied = f"those within {TIED:.0%} of it are named with it"
            lines.append(f"Each row: the best by {by}, all else being equal; {tied}.")
        saturated = sum(row.get("saturated") is True for row in self.sweep.rows)
        if saturated:
            lines.append(
                f"Saturated: {counted(saturated, 'cell')}, whose queue grows for as long as "
                "requests arrive; their times tell how long the workload is."
            )
        return "\n".join(lines)

    @property
    def setup(self) -> str:
        """A sentence with the options that all cells share."""
        grid, row = self.sweep.grid, self.sweep.rows[0]
        # Options that were not given may follow from others in which the cells differ.
        others = self.sweep.rows[1:]
        same = (n for n in axes_of(grid.mode) if n not in grid.varied)
        same = (n for n in same if all(other.get(n) == row.get(n) for other in others))
        names = [n for n in same if row.get(n) is not None]
        parts = [f"{name} {written(name, row)}" for name in names]
        return f"Setup: {'; '.join([f'kvcore {version()}', *parts])}."

    def chart(self, axis: str) -> Chart:
        """Return a chart of the cells over the values of an axis, as `chart_axis` allows it.

        Cells that failed have no point. Bands are over the seeds, or by a bootstrap.
        """
        sweep, grid = self.sweep, self.sweep.grid
        names = [name for name in grid.varied if name not in (axis, "seed", "workload")]
        # Policies come first: they have the colours.
        names.sort(key=lambda name: name not in POLICIES)
        sized = len({row.get("block_size") for row in sweep.rows}) > 1
        column = "pool_bytes" if axis == "memory" else axis
        sources = dict.fromkeys(row["workload"] for row in sweep.rows if "workload" in row)
        several = len(sources) > 1 and "workload" in grid.varied
        measures = self.measures
        if several and len(sources) * len(measures) > MOST_PANELS:
            measures = measures[:1]
        panels = []
        drawn = sweep.shares if self.intervals and "seed" not in grid.varied else ()
        for source, measure in product(sources if several else [None], measures):
            values: dict[str, dict[float, list[float]]] = {}
            ends: dict[tuple[str, float], tuple[float, float]] = {}
            for row, parts in zip_longest(sweep.rows, drawn):
                if source is not None and row["workload"] != source:
                    continue
                name = ", ".join(written(column, row) for column in names) or measure.title
                value, size = row[measure.column], row[column]
                points = values.setdefault(name, {})
                if value is not None and size is not None:
                    tokens = row["block_size"] if axis == "blocks" and sized else 1
                    points.setdefault(size * tokens, []).append(value)
                    if own := (parts or {}).get(measure.column):
                        ends[name, size * tokens] = bootstrap(own)
            of = "" if source is None else f"{shorten(str(source), 40)}: "
            panels.append(_panel(f"{of}{measure.label}", values, measure, ends))
        if not panels:
            panels = [Panel(MEASURES[grid.mode][0].title, {}, format_number)]
        write_x = _bytes if axis == "memory" else format_number
        across = axis
        if axis == "blocks":
            size = sweep.rows[0].get("block_size")
            across = "pool, tokens" if sized else f"pool, blocks of {size} tokens"
        title = self.headline.partition(". ")[0].removesuffix(".")
        return Chart(title, self.setup, across, panels, write_x)

    @property
    def _competing(self) -> list[str]:
        return [name for name in self.sweep.grid.varied if name in POLICIES]

    @property
    def _given(self) -> list[str]:
        """The axes that tell rows apart in which no policies compete, without seeds."""
        varied = self.sweep.grid.varied
        shown = [name for name in varied if name not in (*POLICIES, "seed")]
        sizes = {row.get("block_size") for row in self.sweep.rows}
        if len(sizes) > 1 and "block_size" not in varied:
            shown.append("block_size")  # that of the keys of each workload
        return shown

    @property
    def _apart(self) -> list[str]:
        """The headers of the columns that tell rows apart in a table of all policies."""
        return [*self._given, *([" + ".join(self._competing)] if self._competing else [])]

    def _contest(self, row: Row) -> tuple[str, ...]:
        """Return what a row has in common with those that it competes with."""
        return tuple(written(name, row) for name in self._given)

    def _policy(self, row: Row) -> str:
        """Return the policies of a row that compete."""
        return " + ".join(written(name, row) for name in self._competing)

    @property
    def measures(self) -> list[Measure]:
        """The measures that at least one cell has."""
        measures, rows = MEASURES[self.sweep.grid.mode], self.sweep.rows
        if set(self.sweep.grid.varied) & PRICED:
            measures = [*measures, LEAST_COST]
        if "tier" in self.sweep.grid.axes:
            tiered = {
                "hit_ratio_block": "reuse_ratio_block",
                "hit_ratio_token": "reuse_ratio_token",
            }
            measures = [
                attrs.evolve(measure, column=tiered.get(measure.column, measure.column))
                for measure in measures
            ]
        return [m for m in measures if any(row.get(m.column) is not None for row in rows)]

    @property
    def _bounded(self) -> bool:
        return any(row.get("share_of_optimum") is not None for row in self.sweep.rows)

    def _headers(self, measure: Measure) -> list[str]:
        """Return the headers of a measure: its best policy, if any compete, and its value."""
        if self._competing and measure.names:
            return [measure.title, measure.unit]
        return [measure.label]

    def _best(self, rows: list[Row]) -> Iterator[str]:
        """Yield the best cells by each measure, and the value of the measure."""
        candidates = [row for row in rows if not is_bound(str(row["eviction"]))] or rows
        best: list[Row] = []
        for measure in self.measures:
            ranked = [row for row in candidates if row[measure.column] is not None]
            if not ranked:
                yield from [NONE] * len(self._headers(measure))
                continue
            value = measure.best(row[measure.column] for row in ranked)
            tied = [row for row in ranked if isclose(row[measure.column], value, rel_tol=TIED)]
            best = [row for row in tied if row[measure.column] == value]
            best += [row for row in tied if row[measure.column] != value]
            text = measure.text(value)
            if self._competing and measure.names:
                nothing = measure.best is max and text == measure.text(0)  # there is no winner
                yield NONE if nothing else self._names(best, len(candidates))
            yield text
        if self._bounded:
            yield share(self._part(best[0]) if best else None)

    def _part(self, row: Row) -> float | None:
        """Return the share of the optimum in the blocks that the table shows.

        In documents of earlier releases both shares had one name.
        """
        part: float | None = row["share_of_optimum"]
        if "tier" in self.sweep.grid.axes:
            part = row.get("reuse_share_of_optimum", part)
        return part

    def _names(self, rows: list[Row], candidates: int) -> str:
        if len(rows) == candidates > 1:
            return "all alike"
        names = [self._policy(row) for row in rows]
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _panel(
    label: str,
    values: Mapping[str, Mapping[float, list[float]]],
    measure: Measure,
    ends: Mapping[tuple[str, float], tuple[float, float]],
) -> Panel:
    """Return a panel with the mean of the values at each place, and a band.

    The band is that of several values, or has the ends that are given by line and place.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    bands: dict[str, list[tuple[float, float]]] = {}
    for name, values_at in values.items():
        means = {x: Interval.from_values(values) for x, values in values_at.items()}
        lines[name] = [(x, mean.mean) for x, mean in means.items()]
        if ends:
            bands[name] = [ends.get((name, x), (mean.mean,) * 2) for x, mean in means.items()]
        elif any(mean.half is not None for mean in means.values()):
            bands[name] = [
                (mean.mean - (mean.half or 0), mean.mean + (mean.half or 0))
                for mean in means.values()
            ]
    return Panel(label, lines, measure.text, bands=bands)


def _signed(measure: Measure, change: float) -> str:
    """Format a change with its sign; one that is shown as 0 has that of 0."""
    text = measure.change(abs(change))
    return f"{'-' if change < 0 and text != measure.change(0) else '+'}{text}"


def _between(low: str, high: str) -> str:
    """Return an interval, with a unit of both ends at its end."""
    amount, space, unit = low.partition(" ")
    return f"{amount if high.endswith(space + unit) else low} to {high}"


def _difference(
    measure: Measure, values: Mapping[Any, float], first: Mapping[Any, float]
) -> list[str]:
    """Return the cells of the difference of a policy to the first one, by seed."""
    if values is first:
        return [NONE] * 3
    pairs = [(values[seed], first[seed]) for seed in values if seed in first]
    if not pairs:
        return [NONE] * 3
    mean = Interval.from_values([own - other for own, other in pairs])
    better = sum(own != other and measure.best(own, other) == own for own, other in pairs)
    return [
        _signed(measure, mean.mean),
        cell(mean.half, measure.change),
        f"{better} of {len(pairs)}",
    ]


def chart_axis(grid: Grid, asked: str | None) -> str:
    """Return the axis over which a sweep is drawn: `asked`, or the only one with numbers.

    Raises:
        InputError: `asked` has no several numbers; or it is None and there are several axes,
            or none; or there would be too many lines.
    """
    numbers = [name for name in grid.varied if _is_number(name, grid.axes[name])]
    names = " and ".join(numbers)
    if asked is not None and asked not in numbers:
        there = f"there are: {names}" if numbers else "no axis has several numbers"
        msg = f"--plot-axis {asked}: no axis of numbers that varies; {there}"
    elif not numbers:
        msg = "--plot: no number varies: give blocks, memory or rate_scale several values"
    elif asked is None and len(numbers) > 1:
        msg = f"--plot: {names} vary: choose one of them with --plot-axis"
    else:
        axis = asked or numbers[0]
        apart = (name for name in grid.varied if name not in (axis, "seed", "workload"))
        lines = prod(len(grid.axes[name]) for name in apart)
        if lines <= MOST_LINES:
            return axis
        msg = f"--plot: {lines} lines over {axis} cannot be told apart; {MOST_LINES} can"
    raise InputError(msg)


def _is_number(name: str, values: Iterable[Any]) -> bool:
    if name in ("seed", "chunked"):
        return False
    return name == "memory" or all(type(value) in (int, float) for value in values)


def _bytes(value: float) -> str:
    return format_bytes(int(value))


def sweep_document(sweep: Sweep) -> dict[str, Any]:
    """Return a sweep as a JSON object; it is the same if the sweep was killed and resumed."""
    return {
        "schema": 1,
        "mode": sweep.grid.mode,
        "cells": len(sweep.rows),
        "failed": len(sweep.failed),
        "rows": sweep.rows,
    }


def check_table(path: Path) -> None:
    """Check that `write_table` can write a file of this name here.

    Raises:
        InputError: the name ends in no known format.
        PluginError: Parquet, and polars is not installed.
    """
    if path.suffix not in WRITERS:
        known = ", ".join(WRITERS)
        msg = f"{path}: a table ends in one of {known}"
        raise InputError(msg)
    if path.suffix == ".parquet":
        _polars()


def write_table(sweep: Sweep, path: Path) -> None:
    """Write the rows of a sweep to a file: CSV, JSON or Parquet (extra `lab`) by its name.

    The file appears when it is whole. A part that a killed sweep has left is removed: call this
    while the journal is open, so that no other process writes the file.

    Raises:
        InputError, PluginError: as `check_table`, or it cannot be opened for writing.
        StorageError: the disk refused it.
    """
    check_table(path)
    data = WRITERS[path.suffix](sweep)
    if part_path(path) != path:
        part_path(path).unlink(missing_ok=True)
    with atomic_file(path) as file:
        file.buffer.write(data)


def _csv(sweep: Sweep) -> bytes:
    """Return the rows as CSV with a header; an empty cell is a missing value."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(sweep.rows[0])
    for row in sweep.rows:
        writer.writerow([None if value is None else as_text(value) for value in row.values()])
    return file.getvalue().encode()


def _parquet(sweep: Sweep) -> bytes:
    file = io.BytesIO()
    frame = _polars().DataFrame(sweep.rows, infer_schema_length=None)
    frame.write_parquet(file)
    return file.getvalue()


WRITERS: Mapping[str, Callable[[Sweep], bytes]] = {
    ".csv": _csv,
    ".json": lambda sweep: json_bytes(sweep_document(sweep)),
    ".parquet": _parquet,
}
"""The formats of a table, by the end of its name."""


def _polars() -> Any:
    needed = "Parquet needs polars, which cannot be imported"
    return import_extra("polars", needed, "lab", ", or write .csv or .json")


def written(name: str, row: Row) -> str:
    """Format the value of an axis."""
    if name == "memory":
        return format_bytes(row["pool_bytes"])
    value = row[name]
    return f"{value:,}" if type(value) is int and name != "seed" else as_text(value)
