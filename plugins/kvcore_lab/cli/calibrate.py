"""`kvcore calibrate`: fit a latency model to measured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import attrs
import click
from click.core import ParameterSource

from kvcore.errors import InputError
from kvcore.files import atomic_file
from kvcore.plugins import Plugins
from kvcore.plugins.options import parse
from kvcore.sections import Table
from kvcore.units import PS_PER_S, format_seconds
from kvcore_cli.output import emit_json, file_option, input_file, json_option, print_sections
from kvcore_cli.verb import Count, echo, plugin_completion, verb
from kvcore_lab.measured.calibration import FOLDS, Calibratable, Calibration, fit_latency
from kvcore_plugins.latency.engine_times import EngineName
from kvcore_plugins.latency.measured_steps import COUNTS, write_steps
from kvcore_plugins.latency.step_times import Deployment, TableDtype


@verb(
    "kvcore calibrate steps.csv",
    "kvcore calibrate steps.csv --latency roofline",
    "kvcore calibrate --from aic --model qwen3-32b --device h200 -o steps.csv",
)
@click.argument("steps", callback=input_file, required=False)
@click.option(
    "--latency",
    default="linear",
    help="Latency model to fit: linear, or roofline with the options that are not fitted, such "
    "as roofline:model=llama-3.1-8b,device=h100,tensor_parallel=1.",
    **plugin_completion("latency"),
)
@click.option(
    "--from",
    "source",
    type=click.Choice(["aic"]),
    help="Source of step times to write to --out, in place of a fit: aic composes those of the "
    "deployment that the options below describe, with the package aiconfigurator-core.",
)
@click.option(
    "--model",
    default="llama-3.1-8b",
    metavar="NAME",
    help="With --from: name of the model in kvcore or Hugging Face, such as Qwen/Qwen3-32B.",
)
@click.option(
    "--device",
    default="h100",
    metavar="NAME",
    help="With --from: name of the GPU in kvcore or AIConfigurator, such as h200 or gb200.",
)
@click.option(
    "--tensor-parallel",
    default=4,
    type=Count(1),
    help="With --from: number of GPUs that share the model.",
)
@click.option(
    "--engine",
    default="vllm",
    type=click.Choice(get_args(EngineName)),
    help="With --from: engine that serves the model.",
)
@click.option(
    "--weights-dtype",
    default="bf16",
    type=click.Choice(get_args(TableDtype)),
    help="With --from: number format of weights and K/V.",
)
@file_option(
    "-o",
    "--out",
    help="With --from: CSV file for the steps, which `--latency table:path=FILE` reads.",
)
@json_option
def calibrate(
    *,
    steps: Path | None,
    latency: str,
    source: str | None,
    out: Path | None,
    as_json: bool,
    **deployment: Any,
) -> None:
    """Fit a latency model to the measured steps of the CSV file STEPS.

    Its columns are prefill_tokens, decode_sequences, context_tokens and seconds; a column
    attended_pairs is optional. The fit minimises the squared relative error.
    """
    if (source is None) != (out is None) or (source is None) == (steps is None):
        msg = "give either 'STEPS', to fit a model, or --from aic and -o FILE, to compose steps"
        raise click.UsageError(msg)
    chosen = click.get_current_context().get_parameter_source
    for name in deployment if out is None else ["latency"]:
        if chosen(name) is not ParameterSource.DEFAULT:
            use = "describes what --from composes" if out is None else "is fitted to STEPS"
            msg = f"--{name.replace('_', '-')} {use}: leave it out"
            raise click.UsageError(msg)
    if out is not None:
        deployment["dtype"] = deployment.pop("weights_dtype")
        _compose(out, Deployment(**deployment), as_json=as_json)
        return
    assert steps is not None
    calibration = fit_latency(steps, _model(latency))
    report = _report(steps, calibration)
    if as_json:
        emit_json(report)
        return
    echo(f"--latency {report['latency']}\n")
    errors = ["median", "p90", "held out: median", "held out: p90"]
    print_sections(
        Table(
            ["option", "fitted", ""],
            [
                (
                    name,
                    f"{value:.1%}" if name in calibration.shares else format_seconds(value),
                    "at its bound: other values fit worse"
                    if name in calibration.at_bound
                    else "",
                )
                for name, value in calibration.fitted.items()
            ],
            ["fitted"],
        ),
        f"{report['rows']:,} steps of {steps}. Errors are absolute, as shares of the measured "
        f"time. Held out: one in {FOLDS} steps is judged by a fit to the others, in turns.",
        Table(
            ["steps", "rows", *errors],
            [
                [kind, f"{rows:,}", *(f"{error:.1%}" for error in rest)]
                for kind, rows, *rest in map(attrs.astuple, calibration.errors)
            ],
        ),
        "The steps that are furthest off, as a share of their time:",
        Table(
            headers := ["line", *COUNTS, "measured", "fitted", "off by"],
            [
                [
                    row["line"],
                    *(f"{row[name]:,}" for name in COUNTS),
                    format_seconds(row["seconds"]),
                    format_seconds(row["fitted_seconds"]),
                    f"{row['relative']:+.1%}",
                ]
                for row in report["worst"]
            ],
            headers,
        ),
    )


def _compose(out: Path, deployment: Deployment, *, as_json: bool) -> None:
    """Write the composed step times of a deployment."""
    from kvcore_lab.measured.aic import compose_steps  # noqa: PLC0415 - imports a large package

    steps = list(compose_steps(deployment).steps())
    with atomic_file(out) as file:
        write_steps(file, steps)
    latency = f"table:path={out}"
    if as_json:
        emit_json({"schema": 1, "rows": len(steps), "latency": latency})
    else:
        echo(f"--latency {latency}")


def _model(text: str) -> Any:
    """Return the latency model of a text, which may set no option that is fitted."""
    model = Plugins().build("latency", text)
    if isinstance(model, Calibratable):
        fitted = model.fitted_times + model.fitted_shares
        given = [name for name in parse(text)[0].options if name in fitted]
        if given:
            msg = f"--latency {text}: {given[0]} is what the steps tell: leave it out"
            raise InputError(msg)
    return model


def _report(steps: Path, calibration: Calibration) -> dict[str, Any]:
    return {
        "schema": 1,
        "steps": str(steps),
        "rows": len(calibration.residuals),
        "latency": calibration.spec,
        "fitted": calibration.fitted,
        "at_bound": calibration.at_bound,
        "errors": [attrs.asdict(errors) for errors in calibration.errors],
        "worst": [
            {
                "line": residual.step.line,
                **dict(zip(COUNTS, residual.step.counts, strict=True)),
                "seconds": residual.step.time / PS_PER_S,
                "fitted_seconds": residual.fitted / PS_PER_S,
                "relative": residual.relative,
            }
            for residual in calibration.worst()
        ],
    }
