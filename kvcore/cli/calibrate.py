"""`kvcore calibrate`: the `linear` latency model that fits measured steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvcore.cli.output import emit_json, file_path, json_option, print_table, print_text
from kvcore.cli.terminal import echo
from kvcore.serving.calibration import COUNTS, fit_linear
from kvcore.units import PS_PER_S, format_seconds

if TYPE_CHECKING:
    from kvcore.serving.calibration import Calibration

UNITS = {
    "step": "a step",
    "prefill": "a prompt token",
    "decode": "a sequence",
    "context": "a token attended to",
}


@click.command()
@click.argument("steps", callback=file_path)
@json_option
def calibrate(*, steps: Path, as_json: bool) -> None:
    """Fit the latency model `linear` to the measured steps of the CSV file STEPS.

    Its columns are prefill_tokens, decode_sequences, context_tokens and seconds.
    """
    report = _report(steps, fit_linear(steps))
    if as_json:
        emit_json(report)
        return
    echo(f"--latency {report['latency']}\n")
    _print_coefficients(report)
    echo()
    print_text(_sentence(report))
    echo()
    print_table(
        ["line", *COUNTS, "measured", "fitted", "off by"],
        (
            [
                row["line"],
                *(f"{row[name]:,}" for name in COUNTS),
                format_seconds(row["seconds"]),
                format_seconds(row["fitted_seconds"]),
                f"{row['relative']:+.1%}",
            ]
            for row in report["worst"]
        ),
        right=["line", *COUNTS, "measured", "fitted", "off by"],
    )


def _report(steps: Path, found: Calibration) -> dict[str, Any]:
    return {
        "schema": 1,
        "steps": str(steps),
        "rows": len(found.residuals),
        "latency": found.spec,
        "coefficients": {name: ps / PS_PER_S for name, ps in found.coefficients.items()},
        "held_at_zero": found.held,
        "residuals": {
            "rms_s": found.rms,
            "mean_s": found.mean,
            "max_s": found.largest,
            "mean_relative": found.mean_relative,
            "max_relative": found.largest_relative,
            "r2": found.r2,
        },
        "worst": [
            {
                "line": residual.step.line,
                **dict(zip(COUNTS, residual.step.counts, strict=True)),
                "seconds": residual.step.time / PS_PER_S,
                "fitted_seconds": residual.fitted / PS_PER_S,
                "relative": residual.relative,
            }
            for residual in found.worst()
        ],
    }


def _print_coefficients(report: dict[str, Any]) -> None:
    rows = []
    for name, seconds in report["coefficients"].items():
        held = "held at 0: anything above fits worse"
        takes = held if name in report["held_at_zero"] else format_seconds(seconds)
        rows.append((name, UNITS[name], takes))
    print_table(["coefficient", "for", "takes"], rows)


def _sentence(report: dict[str, Any]) -> str:
    of = report["residuals"]
    r2 = "" if of["r2"] is None else f"; R² {of['r2']:.4f}"
    return (
        f"{report['rows']:,} steps of {report['steps']}. Error: rms "
        f"{format_seconds(of['rms_s'])}, mean {format_seconds(of['mean_s'])} "
        f"({of['mean_relative']:.1%}), largest {format_seconds(of['max_s'])} "
        f"({of['max_relative']:.1%} of a step){r2}.\n"
        "The steps that are furthest off, as a share of their time:"
    )
