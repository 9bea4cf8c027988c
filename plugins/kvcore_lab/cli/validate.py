"""`kvcore validate`: the errors of the simulator against measured servers."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from kvcore.files import input_path, refuse_overwrite
from kvcore.hookspecs import REQUESTS
from kvcore_cli.options import batching_options, run_options, shared
from kvcore_cli.output import (
    emit_json,
    file_option,
    json_option,
    optional_file,
    print_sections,
    progress,
)
from kvcore_cli.verb import Count, option, verb
from kvcore_lab.measured.rows import AIC
from kvcore_lab.measured.validation import GROUPS, ROUNDS, SPREAD
from kvcore_lab.measured.validation import validate as compare_rows
from kvcore_lab.report.validation import ValidationReport
from kvcore_replay.cli.plot_option import picture_option, plot_file

_of_rows = partial(option, heading=REQUESTS)
"""Return an option of the rows to take, or of the requests that rows stand for."""


def _conditions(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """Return the values that rows may have, by column; of a column given twice, all."""
    conditions: dict[str, list[str]] = {}
    for text in values:
        name, _, accepted = text.partition("=")
        if not accepted:
            msg = "write NAME=VALUE, such as device=h100,h200"
            raise click.BadParameter(msg, ctx, param)
        conditions.setdefault(name, []).append(accepted)
    return {name: ",".join(accepted) for name, accepted in conditions.items()}


@verb("kvcore validate aic --where weights_dtype=fp8", "kvcore validate rows.csv -o errors.png")
@click.argument("source", metavar="FILE|aic")
@_of_rows(
    "--where",
    multiple=True,
    callback=_conditions,
    metavar="NAME=VALUES",
    help="Column and its values in the rows to take, such as device=h100,h200.",
)
@_of_rows(
    "--by",
    default=",".join(GROUPS),
    metavar="LIST",
    help="Columns by which errors are grouped; model+engine groups by both at once.",
)
@_of_rows(
    "--rounds",
    type=Count(),
    default=ROUNDS,
    help="Number of requests that each client of the closed loop sends, one after another.",
)
@_of_rows(
    "--spread",
    type=click.FloatRange(0, 1, max_open=True),
    default=SPREAD,
    help="Share by which lengths of requests vary: 0.2 draws them from 80 % to 100 % of those "
    "of the row.",
)
@shared("model", default=None)
@shared("device", default=None)
@shared("tensor_parallel", default=None)
@shared("latency")
@shared("scheduler")
@batching_options
@file_option("--csv", help="CSV file for the rows.")
@picture_option("-o", "--out", help="File for a plot: .png, .svg or .pdf.")
@json_option
@click.pass_context
def validate(ctx: click.Context, /, source: str, by: str, **given: Any) -> None:
    """Simulate the measured rows of FILE, and compare TTFT, TPOT and throughput.

    FILE is a table of measurements (CSV, or JSON Lines), or the result of a benchmark of vLLM
    or SGLang; `aic` stands for the samples that come with the package aiconfigurator-core. An
    option applies to rows whose table has no column of its name. A row of an engine that --like
    knows is served by the rules of that engine, except with --like none, and in the times that
    roofline has of it, except with --latency.
    """
    path = source if source == AIC else input_path(source)
    table, out = given["csv"], given["out"]
    if table is not None:
        refuse_overwrite(table, [path])
    source_of = ctx.get_parameter_source
    unset = (name for name in given if source_of(name) is ParameterSource.DEFAULT)
    options = run_options(given, *unset)
    with (
        optional_file(table) as rows,
        plot_file(out, [path]) as write_plot,
    ):
        report = ValidationReport(
            compare_rows(
                path,
                where=given["where"],
                rounds=given["rounds"],
                spread=given["spread"],
                progress=progress,
                **options,
            ),
            [columns.strip() for columns in by.split(",")],
        )
        show = (
            partial(emit_json, report.document())
            if given["as_json"]
            else partial(print_sections, *report.sections)
        )
        write_plot(report.plot)
        if rows is not None:
            report.write_csv(rows)
    show()
