"""`kvcore demo`: demonstrations of a KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvcore.plugins import Plugins, describe
from kvcore.trace.fields import plain
from kvcore_cli.options import (
    all_of,
    batching_options,
    config_of,
    names_from_file,
    naming,
    part_options,
    server_options,
    shared,
    traffic_options,
    workload_argument,
)
from kvcore_cli.output import emit_json, json_option, print_sections, progress
from kvcore_cli.served import ServedRun
from kvcore_cli.verb import SHOWN, Count, VerbCommand
from kvcore_lab.cli.search import paged_fields
from kvcore_lab.demo.caching import CachingReport, with_and_without_cache
from kvcore_lab.demo.one_head import WORKED_EXAMPLE, head_sections
from kvcore_lab.report.paging import report_of
from kvcore_replay.cli.plot_option import plot_file, plot_option

GENERATIONS = 3


@click.group(invoke_without_command=True)
@click.pass_context
def demo(ctx: click.Context) -> None:
    """Watch what a KV cache does, on a model small enough to follow."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@demo.command(cls=VerbCommand, context_settings={"show_default": True})
@click.option(
    "--prompt-tokens", type=Count(), default=10, help="Number of tokens of the prompt."
)
@click.option("--output", type=Count(), default=100, help="Number of tokens to generate.")
@click.option("--block-size", type=Count(), default=16, help="Number of tokens in a KV block.")
@click.option("--seed", type=Count(0), default=0, help="Seed of the weights and the prompt.")
@shared("threads")
@plot_option
@json_option
def cache(
    *,
    prompt_tokens: int,
    output: int,
    block_size: int,
    seed: int,
    threads: int | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Generate the same tokens without a cache and with two kinds of it.

    One cache is dense, one is paged. Counts how often a token is projected to keys and
    values, times every step, and works out the attention of one head. Needs torch.
    """
    plugins = Plugins()
    generator = plugins.build("generator", "transformer", {"seed": seed})
    backend = plugins.build("backend", "torch-cpu")
    with plot_file(picture) as write_plot:
        with progress("generating", GENERATIONS * output) as done:
            generations = with_and_without_cache(
                generator,
                backend,
                prompt_tokens=prompt_tokens,
                output=output,
                block_size=block_size,
                seed=seed,
                threads=threads,
                done=done,
            )
        report = CachingReport(
            generations, generator.spec, generator.dtype, prompt_tokens, block_size
        )
        write_plot(report.chart())
    if as_json:
        emit_json(
            {
                "schema": 1,
                "prompt_tokens": prompt_tokens,
                "output": output,
                "block_size": block_size,
                "seed": seed,
                "generator": plain(describe(generator)),
                "backend": plain(describe(backend)),
                **report.document(),
                "one_head": WORKED_EXAMPLE.as_dict(),
            }
        )
        return
    print_sections(*report.sections, *head_sections(WORKED_EXAMPLE))


@demo.command(cls=VerbCommand, context_settings=SHOWN)
@workload_argument
@part_options
@server_options
@shared("max_output", text="Tokens of output to reserve.", otherwise="those of the longest")
@all_of(*map(shared, ("eviction", "scheduler", "prefix", "latency")))
@batching_options
@traffic_options
@json_option
@click.pass_context
def paging(ctx: click.Context, /, **given: Any) -> None:
    """Serve WORKLOAD in contiguous memory, and in blocks.

    Both memories have one size. Before paging, a request reserved its prompt and the longest
    output in one piece, and shared nothing.
    """
    named = naming(given["config"], names_from_file(ctx, given))
    config = config_of(given, "simulate").changed(allocation="contiguous")
    parts = config.build(naming=named)
    run = ServedRun(parts, {**given, "residency": True}, None, (), [], [])
    result = run.run("simulating")
    document = parts.document(result) | paged_fields(parts)
    run.report(document, lambda _: report_of(result, document).sections)
