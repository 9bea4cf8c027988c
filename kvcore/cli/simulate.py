"""`kvcore simulate`: what a serving system would do with a workload."""

from __future__ import annotations

from typing import Any

import click

from kvcore.cli.options import (
    batching_options,
    names_from_file,
    one_of,
    output_options,
    policy_options,
    size_option,
    traffic_options,
)
from kvcore.cli.output import (
    STDOUT,
    emit_json,
    json_option,
    metrics_file,
    outputs,
    print_table,
    print_text,
    progress,
    watched,
)
from kvcore.cli.setup import Options, Setup
from kvcore.models.spec import KV_DTYPES
from kvcore.serving import Result
from kvcore.serving import simulate as run_simulation
from kvcore.serving.contiguous import Allocation, ContiguousCache
from kvcore.trace import Trace


@click.command(context_settings={"show_default": True})
@click.argument("workload", required=False, type=click.UNPROCESSED)
@policy_options
@click.option("--model", default="llama-3-8b", help="What is served, as for `size`.")
@click.option("--device", default="h100", help="On what.")
@click.option("--tensor-parallel", type=int, default=4, help="On how many of them.")
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), default="fp16", help="Of the K/V.")
@click.option("--blocks", type=int, help="Of the pool.  [default: as many as fit]")
@size_option("--memory", help="Of the pool, such as 40GiB, instead of --blocks.")
@batching_options
@click.option(
    "--allocation",
    type=click.Choice(["paged", "contiguous"]),
    default="paged",
    help="In blocks, or beside that as before paging, in pieces.",
)
@traffic_options
@output_options
@json_option
@click.pass_context
def simulate(ctx: click.Context, /, **given: Any) -> None:
    """Simulate serving WORKLOAD: latency, throughput, goodput, hits, preemptions.

    WORKLOAD is a workload plugin with options, such as zipf:requests=1000,skew=1.5, or a
    file of any known format. Without it, it is the trace that comes with kvcore. Plugins
    take options likewise: --scheduler srpt:preemptive=false.

    The defaults are Llama 3 8B on four H100, which can carry that trace; one cannot.
    """
    from_file = names_from_file(ctx, given)
    one_of(given, "blocks", "memory", "both say how large the pool is", from_file)
    one_of(given, "trace", "out", "both write a trace", from_file)
    options = Options(**given)
    setup = Setup(options, frozenset(from_file))
    as_json = options.as_json
    with (
        outputs(options, setup) as trace,
        metrics_file(
            options.prometheus, setup.workload, options.trace, as_json=as_json
        ) as write_metrics,
    ):
        result, document = _run(setup, trace, options.allocation)
        if write_metrics is not None:
            write_metrics(_metrics(result, document))
        if options.allocation == "contiguous":
            paged, asked = _run(setup, None, "paged")
            document |= {"config": asked["config"], "paged": paged.summary()}
        if options.out is not None:
            more = {name: document[name] for name in ("config", "paged") if name in document}
            result.write(options.out, **more)
    if as_json:
        emit_json(document)
    elif options.prometheus != STDOUT:
        _print(setup, result, document)


def _metrics(result: Result, document: dict[str, Any]) -> str:
    from kvcore.report import run_metrics  # noqa: PLC0415 - nobody else needs it

    return run_metrics(document, result.requests)


def _run(
    setup: Setup, trace: Trace | None, allocation: Allocation
) -> tuple[Result, dict[str, Any]]:
    """Return the result of a run, and what there is to say of it in JSON."""
    source, scheduler = setup.workload, setup.scheduler()
    longest = None
    if allocation == "contiguous":
        longest = max((request.output_tokens for request in source), default=0)
    with progress(f"simulating {source.name}", source.size) as tick:
        result = run_simulation(
            watched(source, tick),
            cache=setup.cache(trace),
            scheduler=scheduler,
            latency=setup.latency(),
            batching=setup.batching,
            slo=setup.slo,
            rate_scale=setup.options.rate_scale,
            allocation=allocation,
            max_output=longest,
            fragmentation=setup.options.allocation == "contiguous",
            residency=setup.options.residency,
        )
    cache = result.cache
    plugins = (scheduler, cache.eviction, cache.prefix, cache.retention, result.latency)
    config = setup.config(*plugins)
    return result, {**result.summary(), "config": config}


def _print(setup: Setup, result: Result, document: dict[str, Any]) -> None:
    from kvcore.report import SimulationReport  # noqa: PLC0415 - JSON does without it

    load = document["offered_load"]
    report = SimulationReport(
        document,
        document["config"],
        refusal=next(iter(result.log.reasons.values()), None),
        remedies=[] if load is None or load <= 1 else list(setup.remedies(result)),
    )
    if report.warning:
        print_text(report.warning)
        click.echo()
    print_text(report.headline)
    click.echo()
    if "paged" in document:
        _print_paging(result, document)
        return
    print_table(["time", *report.columns], report.times, right=report.columns)
    click.echo()
    print_table(["quantity", "amount"], report.amounts)
    if report.resting:
        click.echo()
        print_table(["time of blocks", *report.columns], report.resting, right=report.columns)
    if report.thrashing:
        click.echo()
        print_text(report.thrashing)
    click.echo()
    print_text(report.closing)


def _print_paging(result: Result, document: dict[str, Any]) -> None:
    """Print what paging buys."""
    from kvcore.report import PagingReport  # noqa: PLC0415 - as above

    assert isinstance(result.cache, ContiguousCache)
    report = PagingReport(document, document["paged"], result.cache.max_output)
    print_text(report.headline)
    click.echo()
    print_table(report.headers, report.rows, right=report.headers[1:])
    click.echo()
    print_text(report.reading)
