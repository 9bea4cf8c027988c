"""`kvcore sweep`: a grid of runs, which can be interrupted and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

from kvcore.config.options import option_default
from kvcore.errors import InputError, PluginError
from kvcore.files import make_directory, refuse_overwrite
from kvcore.plugins.manager import Plugins
from kvcore.workloads import Workload
from kvcore_cli.output import emit_json, file_option, file_path, json_option, progress
from kvcore_cli.report.tables import counted
from kvcore_cli.verb import echo, verb
from kvcore_lab.cli.lab_options import (
    executor_options,
    markup_options,
    print_report,
    tell_model,
)
from kvcore_lab.report.sweep import (
    WRITERS,
    SweepReport,
    chart_axis,
    check_table,
    sweep_document,
    write_table,
)
from kvcore_lab.sweep import Grid, Journal, Plan, Sweep
from kvcore_lab.sweep import sweep as run_sweep
from kvcore_lab.sweep.executors import executor_named
from kvcore_lab.sweep.grid import read_sweep
from kvcore_replay.cli.plot_option import plot_file, plot_option
from kvcore_replay.cli.trace_options import gpu_price_option

JOURNAL = "journal.jsonl"
"""The name of the journal in a directory."""

FAILED = 1
"""The exit code if a cell failed."""

SHOWN = 10
"""Largest number of failed cells to name."""


@verb("kvcore sweep grid.toml --out results.csv --jobs 4")
@click.argument("file", callback=file_path, metavar="NAME.TOML")
@file_option(
    "--out",
    metavar="DIR|FILE",
    help="File for the results (.csv, .json or .parquet), or a directory.  "
    "[default: NAME-results]",
)
@click.option(
    "--intervals",
    is_flag=True,
    help="Print each policy with intervals, by a bootstrap over sessions, or stretches.",
)
@gpu_price_option
@executor_options
@markup_options
@plot_option
@click.option(
    "--plot-axis",
    metavar="NAME",
    help="Axis of the grid for the x-axis of the plot.  [default: the only one with numbers]",
)
@json_option
@click.pass_context
def sweep(
    ctx: click.Context,
    /,
    *,
    file: Path,
    out: Path | None,
    intervals: bool,
    gpu_price: dict[str, float],
    jobs: int | None,
    executor: str | None,
    markup: str | None,
    picture: Path | None,
    plot_axis: str | None,
    as_json: bool,
) -> None:
    """Run each combination of the workloads, policies, sizes and other options in NAME.TOML.

    Each cell of the grid is simulated (mode "simulate") or replayed without a clock (mode
    "compare"), in processes of this machine or on a Ray cluster. Finished cells are kept: after
    a crash the same command goes on with the rest.
    """
    if plot_axis is not None and picture is None:
        msg = f"--plot-axis {plot_axis} is the x-axis of a plot: give --plot FILE too"
        raise InputError(msg)
    grid, own = read_sweep(file)
    with _naming(None if executor or jobs else file):
        where = executor or own.get("executor", "local")
        runner = executor_named(where, jobs or own.get("jobs"))
    with _naming(None if out else file):
        journal, tables = _places(out or own.get("out"), file)
    with _naming(file):
        plan = Plan.from_grid(grid)
    written = [journal, *tables, *([] if picture is None else [picture])]
    _refuse_overwrite(plan.grid, written)
    axis = None if picture is None else chart_axis(plan.grid, plot_axis)
    if journal.name == JOURNAL:
        make_directory(journal.parent)
    try:
        with Journal(journal, "--out") as opened, plot_file(picture) as write_plot:
            for line in opened.damaged:
                text = f"{journal}:{line}: does not match its digest: its cell is run again"
                echo(f"kvcore: {text}, unless a later line has it", err=True)
            result = run_sweep(
                plan, opened, executor=runner, progress=progress, gpu_price=gpu_price
            )
            for table in tables:
                write_table(result, table)
            if axis is not None:
                write_plot(SweepReport(result, intervals=intervals).chart(axis))
    except KeyboardInterrupt:
        echo(f"kvcore: what is finished is in {journal}; run it again to go on", err=True)
        raise
    if as_json:
        emit_json(sweep_document(result))
    else:
        *sections, setup = SweepReport(result, intervals=intervals).sections
        places = f"All rows: {', '.join(map(str, tables))}."
        print_report([*sections, f"{setup}\n{places}"], markup)
    _print_notes(result)
    if result.failed:
        _report_failures(result)
        ctx.exit(FAILED)


@contextmanager
def _naming(file: Path | None) -> Iterator[None]:
    """Prefix errors of the body with the name of the file, if one is given."""
    try:
        yield
    except (InputError, PluginError) as error:
        if file is None:
            raise
        msg = f"{file}: {error}"
        raise type(error)(msg) from error


def _places(given: Path | None, file: Path) -> tuple[Path, list[Path]]:
    """Return the paths of the journal and of the tables; by default, in a folder by `file`."""
    out = given or file.with_name(f"{file.stem}-results")
    if given is None or out.is_dir() or not out.suffix:
        return out / JOURNAL, [out / "results.csv", out / "results.json"]
    if out.suffix not in WRITERS:
        msg = f"out {out}: give a directory, or a file that ends in {', '.join(WRITERS)}"
        raise InputError(msg)
    check_table(out)
    return out.with_name(f"{out.name}.journal"), [out]


def _refuse_overwrite(grid: Grid, written: list[Path]) -> None:
    """Refuse to write over files that the workloads read."""
    for workload in _workloads(grid):
        for path in written:
            refuse_overwrite(path, workload.options().values())


def _workloads(grid: Grid) -> Iterator[Workload]:
    """Yield the workloads that the grid names."""
    return map(partial(Plugins().build, "workload"), grid.axes.get("workload", ()))


def _print_notes(result: Sweep) -> None:
    """Print on stderr what the workloads say of their requests and their models."""
    for note in result.notes:
        echo(f"kvcore: {note}", err=True)
    if "model" not in result.grid.axes:
        for workload in _workloads(result.grid):
            tell_model(workload, str(option_default("model")), "model =")


def _report_failures(result: Sweep) -> None:
    """Print the failed cells and their errors on stderr."""
    failed = result.failed
    varied = [name for name in result.grid.varied if name in result.rows[0]]
    for row in failed[:SHOWN]:
        cell = ", ".join(f"{name} {row[name]}" for name in varied) or row["workload"]
        echo(f"kvcore: failed: {cell}: {row['error']}", err=True)
    if len(failed) > SHOWN:
        more = counted(len(failed) - SHOWN, "more cell")
        echo(f"kvcore: failed: {more}", err=True)
    echo("kvcore: the same command tries the failed cells again", err=True)
