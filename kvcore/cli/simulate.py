"""`kvcore simulate`: simulate serving a workload, in any mode that its options choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import click
from click.core import ParameterSource

from kvcore.cli.options import (
    batching_options,
    config_of,
    names_from_file,
    naming,
    output_options,
    part_options,
    policy_options,
    server_options,
    traffic_options,
    workload_argument,
)
from kvcore.cli.output import json_option, print_sections
from kvcore.cli.served import opened
from kvcore.cli.verb import option, verb
from kvcore.config import RunConfig
from kvcore.config.options import CORE, find_mode, known_modes, mode_options
from kvcore.errors import InputError
from kvcore.hookspecs import RULES_OF_ENGINES
from kvcore.plugins.manager import imported_place
from kvcore.plugins.options import as_text
from kvcore.sections import Table
from kvcore.serving import Batching


@verb(
    "kvcore simulate",
    "kvcore simulate zipf:requests=1000 --device h200 --scheduler slo",
    "kvcore simulate requests.jsonl --window 0:600 --trace run.jsonl.gz",
)
@workload_argument
@part_options
@policy_options
@server_options
@batching_options
@traffic_options
@output_options
@option(
    "--show",
    heading=RULES_OF_ENGINES,
    is_flag=True,
    help="Print the limits and rules that these options give, and exit.",
)
@json_option
@click.pass_context
def simulate(ctx: click.Context, /, **given: Any) -> None:
    """Simulate serving WORKLOAD: latency, throughput, goodput, hits, preemptions.

    The defaults are Llama 3 8B on four H100 GPUs, which can serve the trace that comes with
    kvcore; one GPU cannot. Plugins take options after a colon, as in --scheduler
    srpt:preemptive=false.
    """
    from_file = names_from_file(ctx, given)
    config = config_of(given, "simulate")
    named = naming(given["config"], from_file)
    if given["show"]:
        _show_rules(config)
        return
    _check_effect(ctx, named)
    parts = config.build(naming=named)
    with opened(parts, given) as run:
        result = run.run("simulating")
        document = parts.document(result)
        run.end(result, document)
    report_of = imported_place(find_mode(config.mode_of_run).report)
    run.report(
        document,
        lambda searching: report_of(result, document, searching=searching).sections,
    )


def _show_rules(config: RunConfig) -> None:
    """Print the limits of a step and the rules of a configuration, with their meanings."""
    from kvcore.config.like import LIKENESSES  # noqa: PLC0415 - `--show` alone

    rows = [
        (
            name,
            as_text(getattr(config, name)),
            as_text(CORE[name].default),
            CORE[name].help.rstrip("."),
        )
        for name in (*attrs.fields_dict(Batching), "scheduler", "eviction", "prefix")
    ]
    about = "" if config.like is None else LIKENESSES[config.like].text
    print_sections(about, Table(("option", "value", "kvcore", "meaning"), rows, ()))


def _check_effect(ctx: click.Context, named: Callable[[str], str]) -> None:
    """Refuse options of a mode that no option chooses: they would have no effect."""
    source = ctx.get_parameter_source
    for mode in known_modes().values():
        default = (ParameterSource.DEFAULT, None)
        if not mode.chosen_by or any(source(name) not in default for name in mode.chosen_by):
            continue
        for name in mode_options(mode):
            if source(name) is ParameterSource.COMMANDLINE:
                msg = f"{named(name)}{mode.missing}"
                raise InputError(msg)
