"""`kvcore demo`: small things to watch."""

from __future__ import annotations

from typing import Any

import attrs
import click

from kvcore.cli.output import emit_json, json_option, print_table, print_text, progress
from kvcore.demo import (
    WORKED_EXAMPLE,
    CachingReport,
    Generation,
    OneHead,
    OneHeadReport,
    with_and_without_cache,
)
from kvcore.plugins import Plugin, describe
from kvcore.plugins.manager import Plugins
from kvcore.trace.fields import plain

WAYS = 3
SHAPE = ("name", "layers", "query_heads", "kv_heads", "head_dim", "hidden_size", "parameters")
"""What the document says of the model."""


@click.group(invoke_without_command=True)
@click.pass_context
def demo(ctx: click.Context) -> None:
    """Watch what a KV cache does, on a model small enough to follow."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@demo.command(context_settings={"show_default": True})
@click.option("--prompt-tokens", type=int, default=10, help="Number of tokens of the prompt.")
@click.option("--output", type=int, default=100, help="Number of tokens to generate.")
@click.option("--block-size", type=int, default=16, help="Number of tokens in a KV block.")
@click.option("--seed", type=int, default=0, help="Seed of the weights and the prompt.")
@json_option
def cache(
    *, prompt_tokens: int, output: int, block_size: int, seed: int, as_json: bool
) -> None:
    """Generate the same tokens without a cache and with two kinds of it.

    One cache is dense, one is paged. Counts how often a token is projected to keys and
    values, times every step, and works out the attention of one head. Needs torch.
    """
    plugins = Plugins()
    generator = plugins.build("generator", "transformer", {"seed": seed})
    backend = plugins.build("backend", "torch-cpu")
    with progress("generating", WAYS * output) as done:
        generations = with_and_without_cache(
            generator,
            backend,
            prompt_tokens=prompt_tokens,
            output=output,
            block_size=block_size,
            seed=seed,
            done=done,
        )
    if as_json:
        emit_json(
            {
                "schema": 1,
                "prompt_tokens": prompt_tokens,
                "output": output,
                "block_size": block_size,
                "seed": seed,
                "model": {name: getattr(generator.spec, name) for name in SHAPE},
                "dtype": generator.dtype,
                "generator": _named(generator),
                "backend": _named(backend),
                "tokens": generations[0].tokens,
                "caches": [_measured(each) for each in generations],
                "one_head": _worked(WORKED_EXAMPLE),
            }
        )
        return
    report = CachingReport(
        generations, generator.spec, generator.dtype, prompt_tokens, block_size
    )
    print_text(report.headline)
    for headers, rows in (
        (report.headers, report.rows),
        (report.time_headers, report.time_rows),
    ):
        click.echo()
        print_table(headers, rows, right=headers[1:])
    click.echo()
    print_text(report.reading)
    by_hand = OneHeadReport(WORKED_EXAMPLE)
    click.echo()
    print_text(by_hand.headline)
    click.echo()
    print_table(by_hand.headers, by_hand.rows, right=by_hand.headers[1:])
    click.echo()
    print_text(by_hand.reading)


def _named(plugin: Plugin) -> dict[str, Any]:
    found: dict[str, Any] = plain(describe(plugin))
    return found


def _measured(generation: Generation) -> dict[str, Any]:
    return {
        "cache": generation.keeping,
        "token_projections": generation.projections,
        "step_seconds": generation.step_seconds,
        "step_kv_bytes": generation.step_bytes,
    }


def _worked(head: OneHead) -> dict[str, Any]:
    return {
        **attrs.asdict(head),
        "scores": head.scores,
        "exponentials": head.exponentials,
        "total": head.total,
        "weights": head.weights,
        "output": head.output,
    }
