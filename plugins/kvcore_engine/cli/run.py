"""`kvcore run`: serve a workload, or prompts, on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from kvcore.errors import InputError
from kvcore.files import refuse_overwrite
from kvcore.hookspecs import REQUESTS
from kvcore.sections import Section
from kvcore.units import format_bytes, format_seconds
from kvcore_cli.options import (
    batching_options,
    config_of,
    group_options,
    names_from_file,
    naming,
    output_options,
    policy_options,
    shared,
    traffic_options,
    workload_argument,
)
from kvcore_cli.output import file_option, json_option, optional_file
from kvcore_cli.report.simulation import report_of
from kvcore_cli.report.tables import counted
from kvcore_cli.served import opened
from kvcore_cli.verb import Count, echo, flag_of, option, verb
from kvcore_engine.config import OF_WORKLOADS, EngineParts
from kvcore_engine.engine import OUTPUTS, RunResult
from kvcore_engine.reads import AttentionReads
from kvcore_plugins.drafter.measured_acceptance import write_acceptance
from kvcore_plugins.latency.measured_steps import write_steps

OF_PROMPTS = ("max_output",)
OF_WALL = {"stop_at_eos": False, "step_times": None}
"""Options of prompts, and of `--clock wall` alone, these with their defaults."""

ANNOUNCED = 1 << 30
"""Size of weights in bytes from which on a notice is printed before they are drawn."""


@verb(
    "kvcore run --prompt 'the cat sat on the' --max-output 8",
    "kvcore run mooncake --limit 50 --clock wall --step-times steps.csv",
)
@workload_argument
@option(
    "--prompt",
    "prompts",
    heading=REQUESTS,
    multiple=True,
    metavar="TEXT",
    help="Text to continue, in place of WORKLOAD; may be given several times.",
)
@shared("generator")
@shared("backend")
@shared(
    "model",
    mode="run",
    text="Model of the generator.",
    otherwise="the generator's own, a tiny one",
)
@shared("dtype")
@shared(
    "codec",
    mode="run",
    text="Codec: how K/V is kept, such as int8 or kivi:bits=2.",
    otherwise="as in --dtype",
)
@shared("limit", otherwise="20")
@shared("window")
@shared(
    "shrink",
    otherwise="tokens of a key by those of a block",
)
@option(
    "--max-output",
    heading=REQUESTS,
    type=Count(0),
    help="Number of tokens to generate for a prompt.  [default: 16]",
)
@shared("clock")
@option(
    "--stop-at-eos",
    heading=REQUESTS,
    is_flag=True,
    help="End an output at its end-of-sequence token; --clock wall alone.",
)
@shared("threads")
@policy_options
@shared("device", text="GPU whose step times --clock model takes from --latency.")
@shared(
    "tensor_parallel",
    mode="run",
    text="Number of such GPUs that share the model, for --latency.",
)
@shared("blocks")
@shared(
    "memory",
    text="Bytes of K/V in the pool, in place of a number of blocks.",
    otherwise="256MiB",
)
@group_options
@batching_options
@traffic_options
@output_options
@file_option(
    "--step-times",
    help="CSV file for the time of every step, which `kvcore calibrate` reads; --clock wall "
    "alone.",
)
@file_option(
    "--acceptance",
    help="File for the numbers of accepted drafts, which the drafter `acceptance` reads.",
)
@json_option
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> None:
    """Serve WORKLOAD, or prompts, by computing them: real K/V in real blocks.

    Cache, scheduler and loop are those of `kvcore simulate`, and under --clock model so is
    every decision. A workload has no texts: token ids are drawn from its block keys, so that
    prompts with common keys have common tokens.

    The defaults finish in seconds on a CPU: a tiny model with random weights serves the
    first 20 requests, with their lengths divided so that a block key stands for one block
    (by 32 for the trace that comes with kvcore). --limit 0 --shrink 1 runs the whole workload.
    """
    from_file = names_from_file(ctx, given)
    _check(given, from_file)
    engine = EngineParts(
        config_of(given, "run", "max_output"),
        prompts=given["prompts"],
        max_output=given["max_output"],
        naming=naming(given["config"], from_file),
    )
    step_times, acceptance = given["step_times"], given["acceptance"]
    if acceptance is not None and engine.config.drafter is None:
        msg = "--acceptance is of drafts: give a --drafter, such as prompt-lookup"
        raise InputError(msg)
    out = given["out"]
    for path in (step_times, acceptance, out and out / OUTPUTS):
        if path is not None:
            refuse_overwrite(path, engine.workload.options().values())
    files = optional_file(step_times), optional_file(acceptance)
    with opened(engine, given) as run, files[0] as times, files[1] as accepted:
        _announce(engine)
        result = run.run("running")
        if times is not None:
            write_steps(times, result.steps)
        if accepted is not None and result.log.drafts is not None:
            write_acceptance(accepted, result.log.drafts.probabilities(), result.drafted)
        document = _document(engine, given["prompts"], result)
        run.end(result, document, "outputs")
    run.report(document, lambda _: _sections(engine, result, document))


def _check(options: dict[str, Any], from_file: set[str]) -> None:
    """Refuse options without an effect; ignore them if they come from the config file.

    Raises:
        InputError: an option of the command line has no effect beside the others.
    """
    texts, wall = bool(options["prompts"]), options["clock"] == "wall"
    unused = ("workload", *OF_WORKLOADS) if texts else OF_PROMPTS
    for name in from_file.intersection(unused if wall else (*unused, *OF_WALL)):
        options[name] = OF_WALL.get(name)
    msg = ""
    if texts and options["workload"] is not None:
        msg = "WORKLOAD and --prompt both say what is served: give one of them"
    others, needed = (OF_WORKLOADS, "a WORKLOAD") if texts else (OF_PROMPTS, "--prompt")
    for name in others:
        if options[name] is not None:
            msg = f"{flag_of(name)} is for {needed} alone: leave it out"
    for name in OF_WALL:
        if options[name] and not wall:
            msg = f"{flag_of(name)} needs --clock wall"
    if msg:
        raise InputError(msg)


def _announce(engine: EngineParts) -> None:
    """Print a notice before large weights are drawn, which takes a while."""
    weights = engine.generator.weight_bytes(engine.config.dtype)
    free = engine.backend.memory().free
    if weights >= ANNOUNCED and (free is None or weights <= free):
        size = format_bytes(weights)
        echo(f"kvcore: drawing {size} of weights for {engine.model.name}", err=True)


def _document(engine: EngineParts, prompts: Sequence[str], result: RunResult) -> dict[str, Any]:
    """Return the JSON document of a run."""
    document = engine.document(result)
    if engine.config.clock == "wall":
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
            for text, request in zip(prompts, engine.texts, strict=True)
            if request.id in result.outputs
        ]
        document["rejected_because"] = list(result.log.reasons.values())
    return document


def _sections(
    engine: EngineParts, result: RunResult, document: dict[str, Any]
) -> Sequence[Section]:
    """Return the texts that were generated, or the report of a workload."""
    if not engine.texts:
        clock = "measured" if engine.config.clock == "wall" else "simulated"
        about = _computed(engine, engine.workload.options(), document["requests"])
        report = report_of(result, document, clock=clock, done="computed", about=about)
        return [*report.sections, *_reads(result.reads)]
    tokens = counted(sum(len(output["tokens"]) for output in document["outputs"]), "token")
    steps = counted(document["steps"], "step")
    seconds = format_seconds(document["wall_s"])
    rejected = [f"Rejected: {reason}." for reason in document["rejected_because"]]
    return [
        *(f"> {output['prompt']}\n{output['text']}" for output in document["outputs"]),
        "\n".join([*rejected, f"{tokens} in {steps}, computed in {seconds}."]),
    ]


def _reads(reads: AttentionReads) -> list[str]:
    """Return a sentence on what attention has read, if that is not the whole texts."""
    if reads.bytes == reads.text_bytes:
        return []
    size, share = format_bytes(round(reads.bytes)), reads.bytes / reads.text_bytes
    tokens = counted(reads.tokens, "generated token")
    return [f"Attention of {tokens} read {size} of K/V, {share:.0%} of the texts so far."]


def _computed(engine: EngineParts, part: dict[str, Any], requests: int) -> str:
    """Return a sentence on the run: the model, the hardware, and the part of the workload."""
    limit, shrink = part["limit"], part["shrink"]
    lengths = f"lengths divided by {shrink}" if shrink > 1 else "in full length"
    complete = limit is None or requests < limit
    first = "the first request" if limit == 1 else f"the first {limit or 0:,} requests"
    which = "all requests" if complete else first
    return (
        f"Computed: {engine.generator.name} on {engine.backend.name} in "
        f"{engine.config.dtype}; {which}, {lengths}."
    )
