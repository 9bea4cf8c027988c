"""`kvcore bench`: the speed of kvcore, beside the limits of this machine."""

from __future__ import annotations

from typing import Any

import click

from kvcore.errors import InputError
from kvcore_cli.output import (
    emit_json,
    file_option,
    json_bytes,
    json_option,
    optional_file,
    print_sections,
    progress,
)
from kvcore_cli.verb import Count, plugin_completion, verb
from kvcore_engine.bench import SUITES, Settings, available_suites, run_suites
from kvcore_engine.bench.report import BenchReport

WRONG = 1
"""Exit code if a result is wrong."""

DEADLINES = {"gpu": 480.0}
"""Default of `--deadline` in seconds, by suite."""


@verb(
    "kvcore bench cpu",
    "kvcore bench gpu --out gpu.json",
    "kvcore bench --check --quick",
)
@click.argument("suites", nargs=-1, type=click.Choice(sorted(SUITES)), metavar="[SUITE]...")
@click.option("--quick", is_flag=True, help="Measure a few small cases, each briefly.")
@click.option(
    "--check",
    is_flag=True,
    help="Check results without measuring times; the exit code is 1 if one is wrong.",
)
@click.option(
    "--only",
    metavar="LIST",
    default="",
    show_default="all of the suite",
    help="Operations to measure, such as decode,store.",
)
@click.option(
    "--dtype",
    metavar="LIST",
    default="",
    show_default="those of the suite",
    help="Dtypes of K/V, such as bf16,fp32.",
)
@click.option(
    "--backend",
    help="Backend of the suites cpu and gpu, such as torch-cuda:attention=sdpa.",
    **plugin_completion("backend"),
)
@click.option(
    "--threads", type=Count(), default=1, metavar="N", help="Number of CPU threads to use."
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    show_default="480 with gpu, else none",
    help="Time in seconds after which no further case begins.",
)
@file_option("--out", help="File for the JSON document.")
@json_option
@click.pass_context
def bench(ctx: click.Context, /, suites: tuple[str, ...], **given: Any) -> None:
    """Measure the speed of kvcore on this machine: SUITE is cpu, gpu, cache or sim.

    Without SUITE, all suites that can run here are measured. cpu and gpu measure the
    operations of backends on K/V, cache and sim the cache and the simulator.

    The machine's own copy and read rates are measured first and last, and between them each
    operation: its bytes, its time, its share of those rates, and whether its result is right,
    compared with float64 over a pool whose unused slots are NaN.
    """
    names = list(dict.fromkeys(suites)) or available_suites()
    deadline = given["deadline"]
    if deadline is None:
        deadline = max((DEADLINES[name] for name in names if name in DEADLINES), default=None)
    settings = Settings(
        quick=given["quick"],
        check=given["check"],
        only=_listed(given["only"]),
        dtypes=_listed(given["dtype"]),
        backend=given["backend"],
        threads=given["threads"],
        deadline=deadline,
    )
    alone = not any(SUITES[name].backend for name in names)
    for option in [name for name in ("backend", "dtype") if alone and given[name]]:
        msg = f"--{option} {given[option]}: suites cpu and gpu have one; name one of them"
        raise InputError(msg)
    with optional_file(given["out"]) as file:
        with progress(f"measuring {', '.join(names)}: rows", None) as tick:
            result = run_suites(names, settings, tell=lambda _: tick(1))
        if file is not None:
            file.buffer.write(json_bytes(result.document()))
    if given["as_json"]:
        emit_json(result.document())
    else:
        print_sections(*BenchReport(result).sections)
    if settings.check and result.wrong:
        ctx.exit(WRONG)


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
