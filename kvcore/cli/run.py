"""`kvcore run`: serve a workload, or texts, by computing them on tensors."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import click

from kvcore.cli.engine import Engine, RunOptions
from kvcore.cli.options import (
    batching_options,
    names_from_file,
    one_of,
    output_options,
    plugin_option,
    policy_options,
    size_option,
    traffic_options,
)
from kvcore.cli.output import (
    STDOUT,
    emit_json,
    file_path,
    json_option,
    metrics_file,
    outputs,
    print_table,
    print_text,
    progress,
)
from kvcore.engine import RunResult
from kvcore.engine import run as run_engine
from kvcore.engine.backend import TENSOR_DTYPES
from kvcore.errors import InputError
from kvcore.files import refuse_overwrite, whole_file
from kvcore.progress import ticked
from kvcore.report.tables import counted
from kvcore.serving.calibration import write_steps
from kvcore.trace import Trace
from kvcore.units import format_seconds

OF_PROMPTS, OF_WORKLOADS = ("max_output",), ("limit", "shrink")
OF_WALL = ("stop_at_eos", "step_times")
"""Options that mean something for these alone."""


@click.command(context_settings={"show_default": True})
@click.argument("workload", required=False, type=click.UNPROCESSED)
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Instead of it.")
@plugin_option("--generator", default="transformer", help="What computes.")
@plugin_option("--backend", default="torch-cpu", help="Where K/V lies.")
@click.option("--model", help="That the generator takes.  [default: its own, a tiny one]")
@click.option(
    "--dtype", type=click.Choice(TENSOR_DTYPES), default="fp32", help="To compute in."
)
@click.option("--limit", type=int, help="First requests to serve, 0: all.  [default: 20]")
@click.option(
    "--shrink",
    type=int,
    help="Divide all lengths by this.  [default: so that a key is a block]",
)
@click.option("--max-output", type=int, help="Tokens for each prompt.  [default: 16]")
@click.option(
    "--clock",
    type=click.Choice(["model", "wall"]),
    default="model",
    help="A step takes as long as --latency says, or as it takes here.",
)
@click.option("--stop-at-eos", is_flag=True, help="Let a text end early; wall clock only.")
@policy_options
@click.option("--device", default="h100", help="That --latency and --clock model time.")
@click.option("--tensor-parallel", type=int, default=1, help="How many of them.")
@click.option("--blocks", type=int, help="Of the pool.")
@size_option("--memory", help="Of the pool, instead of --blocks.  [default: 256MiB]")
@batching_options
@traffic_options
@output_options
@click.option(
    "--step-times",
    callback=file_path,
    metavar="FILE",
    help="Write what each step took, for `calibrate`; wall clock only.",
)
@json_option
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> None:
    """Serve WORKLOAD, or prompts, by computing them: real K/V in real blocks.

    Cache, scheduler and loop are those of `kvcore simulate`, and under --clock model so is
    every decision. WORKLOAD is as there; without it, it is the trace that comes with kvcore.
    A trace has no texts: token ids are drawn from its block keys, so that what it shares is
    shared.

    The defaults finish in seconds on a CPU: a tiny model with random weights serves the
    first 20 requests, with their lengths divided so that a block key stands for one block
    (by 32 for the trace that comes with kvcore). --limit 0 --shrink 1 is the whole of it.
    """
    from_file = names_from_file(ctx, given)
    one_of(given, "blocks", "memory", "both say how large the pool is", from_file)
    one_of(given, "trace", "out", "both write a trace", from_file)
    _check(given, from_file)
    options = RunOptions.of(given)
    engine = Engine(options, frozenset(from_file))
    if options.step_times is not None:
        refuse_overwrite(options.step_times, engine.workload.options().values())
    as_json = options.as_json
    with ExitStack() as stack:
        trace, times = stack.enter_context(outputs(options, engine)), None
        write_metrics = stack.enter_context(
            metrics_file(options.prometheus, engine.workload, options.trace, as_json=as_json)
        )
        if options.step_times is not None:
            times = stack.enter_context(whole_file(options.step_times))
        result = _serve(engine, trace)
        if times is not None:
            write_steps(times, result.steps)
        document = _document(engine, result)
        if write_metrics is not None:
            write_metrics(_metrics(engine, result, document))
        if options.out is not None:
            names = ("config", "outputs")
            result.write(options.out, **{n: document[n] for n in names if n in document})
    if as_json:
        emit_json(document)
    elif options.prometheus == STDOUT:
        return
    elif engine.texts:
        _print_texts(document)
    else:
        _print_report(engine, result, document)


def _check(given: dict[str, Any], from_file: set[str]) -> None:
    """Refuse options that mean nothing beside the others, or leave out those of the file.

    Raises:
        InputError: says which, and beside what they do.
    """
    texts = bool(given["prompts"])
    for name in from_file.intersection(("workload", *OF_WORKLOADS) if texts else OF_PROMPTS):
        given[name] = None
    msg = ""
    if texts and given["workload"] is not None:
        msg = "WORKLOAD and --prompt both say what is served: give one of them"
    others, needed = (OF_WORKLOADS, "a WORKLOAD") if texts else (OF_PROMPTS, "--prompt")
    for name in others:
        if given[name] is not None:
            msg = f"--{name.replace('_', '-')} is for {needed} alone: leave it out"
    for name in OF_WALL:
        if given[name] and given["clock"] != "wall":
            msg = f"--{name.replace('_', '-')} needs --clock wall"
    if given["trace"] is not None and given["trace"] == given["step_times"]:
        msg = "--trace and --step-times name the same file: give each its own"
    if msg:
        raise InputError(msg)


def _serve(engine: Engine, trace: Trace | None) -> RunResult:
    source, options = engine.workload, engine.options
    with progress(f"running {source.name}", source.size) as tick:
        return run_engine(
            ticked(source, tick),
            cache=engine.cache(trace),
            generator=engine.generator,
            backend=engine.backend,
            dtype=options.dtype,
            scheduler=engine.scheduler(),
            latency=engine.latency(),
            batching=engine.batching,
            slo=engine.slo,
            rate_scale=options.rate_scale,
            clock=options.clock,
            stop_at_eos=options.stop_at_eos,
            seed=options.seed,
            residency=options.residency,
        )


def _document(engine: Engine, result: RunResult) -> dict[str, Any]:
    """Return what there is to say of a run in JSON."""
    cache = result.cache
    cache_plugins = (cache.eviction, cache.prefix, cache.retention)
    plugins = (result.scheduler, *cache_plugins, result.latency)
    document = {**result.summary(), "config": engine.config(*plugins)}
    if engine.options.clock == "wall":
        # The load is that of the latency model, which has not timed this.
        document["offered_load"] = None
    if engine.texts:
        decode = engine.generator.decode
        document["outputs"] = [
            {
                "prompt": text,
                "text": decode(result.outputs[request.id]),
                "tokens": result.outputs[request.id],
            }
            for text, request in zip(engine.options.prompts, engine.texts, strict=True)
            if request.id in result.outputs
        ]
        document["rejected_because"] = list(result.log.reasons.values())
    return document


def _metrics(engine: Engine, result: RunResult, document: dict[str, Any]) -> str:
    from kvcore.report import run_metrics  # noqa: PLC0415 - nobody else needs it

    return run_metrics(document | {"config": _named(engine, document)}, result.requests)


def _named(engine: Engine, document: dict[str, Any]) -> dict[str, Any]:
    """Return what was run, under the name of the workload that it is a part of."""
    name = engine.workload.options().get("workload", engine.workload.name)
    config: dict[str, Any] = document["config"]
    return config | {"workload": config["workload"] | {"name": name}}


def _print_texts(document: dict[str, Any]) -> None:
    for output in document["outputs"]:
        print_text(f"> {output['prompt']}")
        print_text(output["text"])
        click.echo()
    for reason in document["rejected_because"]:
        print_text(f"Rejected: {reason}.")
    tokens = counted(sum(len(output["tokens"]) for output in document["outputs"]), "token")
    steps = counted(document["steps"], "step")
    print_text(f"{tokens} in {steps}, computed in {format_seconds(document['wall_s'])}.")


def _print_report(engine: Engine, result: RunResult, document: dict[str, Any]) -> None:
    from kvcore.report import SimulationReport  # noqa: PLC0415 - JSON does without it

    options, load = engine.options, document["offered_load"]
    part = engine.workload.options()
    report = SimulationReport(
        document,
        _named(engine, document),
        refusal=next(iter(result.log.reasons.values()), None),
        remedies=[] if load is None or load <= 1 else list(engine.remedies(result)),
        clock="measured" if options.clock == "wall" else "simulated",
        done="computed",
    )
    if report.warning:
        print_text(report.warning)
        click.echo()
    print_text(report.headline)
    print_text(_computed(engine, part, document["requests"]))
    click.echo()
    print_table(["time", *report.columns], report.times, right=report.columns)
    click.echo()
    print_table(["quantity", "amount"], report.amounts)
    click.echo()
    if report.resting:
        print_table(["time of blocks", *report.columns], report.resting, right=report.columns)
        click.echo()
    if report.thrashing:
        print_text(report.thrashing)
        click.echo()
    print_text(report.closing)


def _computed(engine: Engine, part: dict[str, Any], requests: int) -> str:
    """Say what was computed, on what, and which part of the workload that is."""
    limit, shrink = part["limit"], part["shrink"]
    lengths = f"lengths divided by {shrink}" if shrink > 1 else "in full length"
    whole = limit is None or requests < limit
    which = "all requests" if whole else f"the first {counted(limit, 'request')}"
    return (
        f"Computed: {engine.generator.name} on {engine.backend.name} in "
        f"{engine.options.dtype}; {which}, {lengths}."
    )
