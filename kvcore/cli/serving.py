"""The options that verbs which serve have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from kvcore.cli.config import config_option
from kvcore.cli.metrics import prometheus_option
from kvcore.cli.output import file_path
from kvcore.cli.values import plugin_option, slo_option
from kvcore.errors import InputError
from kvcore.serving import Batching

Command = TypeVar("Command", bound=Callable[..., Any])

SLO = "ttft=30,tpot=0.1"
"""What the authors of the bundled trace ask of their own system: Qin et al., "Mooncake: a
KVCache-centric disaggregated architecture for LLM serving", 2024, on real workloads."""

CAPS = Batching()


def _all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that gives a command several options, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


policy_options = _all_of(
    plugin_option("--eviction", default="lru", help="Who dies when the pool is full."),
    plugin_option("--scheduler", default="fcfs", help="Who runs in the next step."),
    plugin_option("--prefix", default="radix", help="What can be reused."),
    plugin_option("--retention", help="What a running sequence forgets.  [default: nothing]"),
    plugin_option("--latency", default="roofline", help="How long a step takes."),
)

batching_options = _all_of(
    click.option("--block-size", type=int, default=16, help="Tokens in a block."),
    click.option("--max-tokens", type=int, default=CAPS.max_tokens, help="Tokens of a step."),
    click.option("--max-seqs", type=int, default=CAPS.max_seqs, help="Sequences of a step."),
    click.option(
        "--steps",
        type=click.Choice(["mixed", "prefill-first"]),
        default=CAPS.steps,
        help="Prefill and decode together, or apart.",
    ),
    click.option(
        "--chunked/--no-chunked",
        default=CAPS.chunked,
        help="Prefill a prompt over several steps.",
    ),
    click.option(
        "--watermark",
        type=float,
        default=CAPS.watermark,
        help="Share of blocks kept for growth.",
    ),
)

traffic_options = _all_of(
    click.option("--rate-scale", type=float, default=1.0, help="Times as fast as recorded."),
    slo_option("--slo", default=SLO, help="Seconds, or `none`."),
    click.option("--seed", type=int, default=0, help="Of plugins that draw random numbers."),
    config_option,
)


output_options = _all_of(
    click.option(
        "--residency/--no-residency", default=True, help="Measure how long blocks rest."
    ),
    click.option(
        "--trace", callback=file_path, metavar="FILE", help="Write every decision, as JSONL."
    ),
    click.option(
        "--out",
        callback=file_path,
        metavar="DIR",
        help="Write summary.json, requests.jsonl and trace.jsonl.gz.",
    ),
    prometheus_option,
)


def names_from_file(ctx: click.Context, given: dict[str, Any]) -> set[str]:
    """Return the names of the options that come from the configuration file."""
    source = ctx.get_parameter_source
    return {name for name in given if source(name) is ParameterSource.DEFAULT_MAP}


def one_of(given: dict[str, Any], one: str, other: str, why: str, from_file: set[str]) -> None:
    """Refuse two options that exclude one another, unless one of them is in the file alone.

    Raises:
        InputError: both are given in the same place.
    """
    if given[one] is None or given[other] is None:
        return
    weaker = {one, other} & from_file
    if len(weaker) != 1:
        msg = f"--{one} and --{other} {why}: give one of them"
        raise InputError(msg)
    given[weaker.pop()] = None
