"""`kvcore simulate`: what a serving system would do with a workload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvcore.cli.config import config_option
from kvcore.cli.output import (
    emit_json,
    file_path,
    json_option,
    print_table,
    print_text,
    progress,
    watched,
)
from kvcore.cli.setup import Options, Setup
from kvcore.cli.values import plugin_option, size_option, slo_option
from kvcore.errors import InputError
from kvcore.model import KV_DTYPES
from kvcore.serving import Batching, Result
from kvcore.serving import simulate as run_simulation
from kvcore.serving.contiguous import Allocation, ContiguousCache
from kvcore.serving.result import REQUESTS, SUMMARY
from kvcore.trace import Trace
from kvcore.workloads import spare

SLO = "ttft=30,tpot=0.1"
"""What the authors of the bundled trace ask of their own system: Qin et al., "Mooncake: a
KVCache-centric disaggregated architecture for LLM serving", 2024, on real workloads."""

CAPS = Batching()
TRACE = "trace.jsonl.gz"


@click.command(context_settings={"show_default": True})
@click.argument("workload", required=False, type=click.UNPROCESSED)
@plugin_option("--eviction", default="lru", help="Who dies when the pool is full.")
@plugin_option("--scheduler", default="fcfs", help="Who runs in the next step.")
@plugin_option("--prefix", default="radix", help="What can be reused.")
@plugin_option("--latency", default="roofline", help="How long a step takes.")
@click.option("--model", default="llama-3-8b", help="What is served, as for `size`.")
@click.option("--device", default="h100", help="On what.")
@click.option("--tensor-parallel", type=int, default=4, help="On how many of them.")
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), default="fp16", help="Of the K/V.")
@click.option("--blocks", type=int, help="Of the pool.  [default: as many as fit]")
@size_option("--memory", help="Of the pool, such as 40GiB, instead of --blocks.")
@click.option("--block-size", type=int, default=16, help="Tokens in a block.")
@click.option("--max-tokens", type=int, default=CAPS.max_tokens, help="Tokens of a step.")
@click.option("--max-seqs", type=int, default=CAPS.max_seqs, help="Sequences of a step.")
@click.option(
    "--steps",
    type=click.Choice(["mixed", "prefill-first"]),
    default=CAPS.steps,
    help="Prefill and decode together, or apart.",
)
@click.option(
    "--chunked/--no-chunked", default=CAPS.chunked, help="Prefill a prompt over several steps."
)
@click.option(
    "--watermark", type=float, default=CAPS.watermark, help="Share of blocks kept for growth."
)
@click.option(
    "--allocation",
    type=click.Choice(["paged", "contiguous"]),
    default="paged",
    help="In blocks, or beside that as before paging, in pieces.",
)
@click.option("--rate-scale", type=float, default=1.0, help="Times as fast as recorded.")
@slo_option("--slo", default=SLO, help="Seconds, or `none`.")
@click.option("--seed", type=int, default=0, help="Of plugins that draw random numbers.")
@config_option
@click.option(
    "--trace", callback=file_path, metavar="FILE", help="Write every decision, as JSONL."
)
@click.option(
    "--out",
    callback=file_path,
    metavar="DIR",
    help="Write summary.json, requests.jsonl and trace.jsonl.gz.",
)
@json_option
@click.pass_context
def simulate(ctx: click.Context, /, **given: Any) -> None:
    """Simulate serving WORKLOAD: latency, throughput, goodput, hits, preemptions.

    WORKLOAD is a workload plugin with options, such as zipf:requests=1000,skew=1.5, or a
    file of any known format. Without it, it is the trace that comes with kvcore. Plugins
    take options likewise: --scheduler srpt:preemptive=false.

    The defaults are Llama 3 8B on four H100, which can carry that trace; one cannot.
    """
    from_file = {
        name for name in given if ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP
    }
    _one_of(given, "blocks", "memory", "both say how large the pool is", from_file)
    _one_of(given, "trace", "out", "both write a trace", from_file)
    options = Options(**given)
    setup = Setup(options, frozenset(from_file))
    with _outputs(options, setup) as trace:
        result, document = _run(setup, trace, options.allocation)
        if options.allocation == "contiguous":
            paged, asked = _run(setup, None, "paged")
            document |= {"config": asked["config"], "paged": paged.summary()}
        if options.out is not None:
            more = {name: document[name] for name in ("config", "paged") if name in document}
            result.write(options.out, **more)
    if options.as_json:
        emit_json(document)
    else:
        _print(setup, result, document)


def _run(
    setup: Setup, trace: Trace | None, allocation: Allocation
) -> tuple[Result, dict[str, Any]]:
    """Return the result of a run, and what there is to say of it in JSON."""
    source, scheduler = setup.workload, setup.scheduler()
    longest = None
    if allocation == "contiguous":
        longest = max((request.output for request in source), default=0)
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
        )
    cache = result.cache
    config = setup.config(scheduler, cache.eviction, cache.prefix, result.latency)
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


@contextmanager
def _outputs(options: Options, setup: Setup) -> Iterator[Trace | None]:
    """Open the trace to write, if any, and before it the directory that it goes to.

    If the body raises, no file is left of it, nor a directory that was made for it.
    """
    path, others = options.trace, []
    if options.out is not None:
        path, *others = (options.out / name for name in (TRACE, SUMMARY, REQUESTS))
        if options.allocation == "contiguous":
            path = None
    for written in filter(None, (path, *others)):
        spare(setup.workload, written)
    with ExitStack() as stack:
        if options.out is not None:
            stack.enter_context(_directory(options.out))
        yield None if path is None else stack.enter_context(Trace(path, **setup.header()))


@contextmanager
def _directory(path: Path) -> Iterator[None]:
    """Make a directory, if need be; if the body raises, not for good."""
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        msg = f"--out {path}: cannot be made a directory: {reason}; name another one"
        raise InputError(msg) from error
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):
                path.rmdir()
        raise


def _one_of(given: dict[str, Any], one: str, other: str, why: str, from_file: set[str]) -> None:
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
