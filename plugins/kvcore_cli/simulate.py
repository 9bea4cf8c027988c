"""`kvcore simulate`: simulate serving a workload, in any mode that its options choose."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import getdoc
from typing import Any

import click
from click.core import ParameterSource

from kvcore.config import RunConfig
from kvcore.config.options import CORE, find_mode, known_modes, mode_options
from kvcore.config.run_config import built_rules
from kvcore.errors import InputError
from kvcore.hookspecs import OUTPUT
from kvcore.plugins.manager import imported_place
from kvcore.plugins.options import as_text
from kvcore.sections import Table
from kvcore.serving.rules import CHOICES, Rules
from kvcore.serving.scheduler import LIMITS
from kvcore_cli.options import (
    batching_options,
    config_of,
    group_options,
    names_from_file,
    naming,
    output_options,
    part_options,
    policy_options,
    server_options,
    traffic_options,
    workload_argument,
)
from kvcore_cli.output import emit_json, json_option, print_sections
from kvcore_cli.served import opened
from kvcore_cli.verb import option, verb

REPORT = "kvcore_cli.report.simulation:report_of"
"""The report of a run on one server, which JSON does without."""


@verb(
    "kvcore simulate",
    "kvcore simulate zipf:requests=1000 --device h200 --scheduler slo",
    "kvcore simulate requests.jsonl --window 0:600 --trace run.jsonl.gz",
)
@workload_argument
@part_options
@policy_options
@server_options
@group_options
@batching_options
@traffic_options
@output_options
@option(
    "--show",
    heading=OUTPUT,
    is_flag=True,
    help="Print the limits and rules that these options give, and exit.",
)
@json_option
@click.pass_context
def simulate(ctx: click.Context, /, **given: Any) -> None:
    """Simulate serving WORKLOAD: latency, throughput, goodput, hits, preemptions.

    The defaults are Llama 3.1 8B on four H100 GPUs, which can serve the trace that comes with
    kvcore; one GPU cannot. Plugins take options after a colon, as in --scheduler
    srpt:preemptive=false.
    """
    from_file = names_from_file(ctx, given)
    config = config_of(given, "simulate")
    named = naming(given["config"], from_file)
    if given["show"]:
        _show_rules(config, as_json=given["as_json"])
        return
    _check_effect(ctx, named)
    parts = config.build(naming=named)
    with opened(parts, given) as run:
        result = run.run("simulating")
        document = parts.document(result)
        run.end(result, document)
    report_of = imported_place(find_mode(config.mode_of_run).report or REPORT)
    run.report(
        document,
        lambda searching: report_of(result, document, searching=searching).sections,
    )


def _show_rules(config: RunConfig, *, as_json: bool) -> None:
    """Print the limits of a step and the rules of a configuration, with their meanings."""
    rules = built_rules(config.like)
    texts = _meanings(Rules) | _meanings(type(rules))
    meanings = {name: CORE[name].help for name in CORE} | texts
    plain = {name: CORE[name].default for name in CORE} | Rules().options()
    values = {**config.options, **rules.choices(), **rules.options()}
    own = [name for name in rules.options() if name not in CHOICES]
    names = (*LIMITS, *CHOICES, *own, "scheduler", "eviction", "prefix")
    rows = [
        (name, values[name], plain.get(name), meanings.get(name, "").rstrip("."))
        for name in names
    ]
    if as_json:
        options = {
            name: {"value": _as_json(value), "kvcore": _as_json(own), "meaning": meaning}
            for name, value, own, meaning in rows
        }
        emit_json({"schema": 1, "rules": rules.name, "options": options})
        return
    about = "" if config.like is None else (getdoc(type(rules)) or "").partition("\n\n")[0]
    cells = [
        (name, as_text(value), as_text(plain.get(name, "-")), meaning)
        for name, value, _, meaning in rows
    ]
    headers = ("option", "value", "kvcore", "meaning")
    print_sections(" ".join(about.split()), Table(headers, cells, ()))


def _as_json(value: Any) -> Any:
    """Return a number, a truth value or None as it is, and anything else as text."""
    return value if value is None or isinstance(value, int | float) else as_text(value)


def _meanings(rules: type[Rules]) -> dict[str, str]:
    """Return the texts of the options of rules, by name, as their docstring has them."""
    entry = r"^    (\w+): (.*?)(?=^    \w|^\S|\Z)"
    entries = re.findall(entry, getdoc(rules) or "", re.MULTILINE | re.DOTALL)
    sentences = ((name, " ".join(text.split()).partition(". ")[0]) for name, text in entries)
    return {name: text[:1].upper() + text[1:] for name, text in sentences}


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
