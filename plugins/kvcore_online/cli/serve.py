"""`kvcore serve`: a server with an OpenAI-style API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvcore.config import RunParts
from kvcore.config.parts import BLOCK_SIZE
from kvcore.config.run_config import RunConfig, built_rules
from kvcore.errors import InputError
from kvcore.hookspecs import MODEL
from kvcore.plugins.options import Spec
from kvcore_cli.options import (
    batching_options,
    config_of,
    config_option,
    group_options,
    names_from_file,
    naming,
    shared,
)
from kvcore_cli.output import file_option
from kvcore_cli.verb import Count, Seconds, flag_of, option, verb
from kvcore_engine.config import EngineParts
from kvcore_online.cli.options import log_option
from kvcore_online.clients import ClientWorkload

if TYPE_CHECKING:
    from kvcore_online.server import Server


OF_TENSORS = ("generator", "backend", "dtype", "threads")
OF_SIMULATIONS = ("device", "tensor_parallel", "weights_dtype", "latency", "speed_up")
"""Options without --simulate, and beside it, alone."""


@verb(
    "kvcore serve --port 8001",
    "kvcore serve --generator huggingface:model=./my-model --kv-events tcp://127.0.0.1:5557",
    "kvcore serve --simulate --model llama-3-70b --device h100 --like vllm",
    more="Ctrl-C, SIGTERM and SIGHUP let open requests end, check the cache, and make the "
    "trace whole. A second signal does not wait for open requests.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen at.")
@click.option(
    "--port",
    type=Count(0),
    default=8001,
    help="Port to listen at; 0 takes a free one.",
)
@click.option("--name", help="Name of the model for clients.  [default: the model's own]")
@click.option(
    "--requests",
    type=Count(),
    default=1024,
    help="Largest number of requests that run or wait; more are answered with 503.",
)
@click.option(
    "--body",
    type=Count(),
    default=1 << 20,
    help="Largest size of a request in bytes.",
)
@click.option(
    "--client-timeout",
    type=Seconds(),
    default="30",
    help="Longest time in which a client sends a request, or takes a part of an answer.",
)
@click.option(
    "--grace",
    type=Seconds(),
    default="10",
    help="Longest time that open requests may take when the server ends.",
)
@click.option(
    "--kv-events",
    metavar="ADDRESS",
    help="Address at which KV events are published over ZMQ, such as tcp://127.0.0.1:5557.",
)
@click.option(
    "--kv-replay", metavar="ADDRESS", help="Address at which missing KV events are sent again."
)
@option(
    "--simulate",
    heading=MODEL,
    is_flag=True,
    help="Compute nothing: steps take the time that --latency says of --model on --device, and "
    "answers are words drawn at random. Needs no torch.",
)
@option(
    "--speed-up",
    heading=MODEL,
    type=float,
    default=1.0,
    help="Times as fast as the wall clock that --simulate runs.",
)
@shared("generator")
@shared("backend")
@shared(
    "model",
    mode="run",
    text="Model of the generator, or the simulated one.",
    otherwise="a tiny one; llama-3.1-8b beside --simulate",
)
@shared("dtype")
@shared("codec", mode="run", text="Codec: how K/V is kept.", otherwise="as in --dtype")
@shared("threads")
@shared("device", text="GPU of --simulate.")
@shared("tensor_parallel", text="Number of such GPUs that share the model.")
@shared("weights_dtype")
@shared("latency", text="Latency model: how long a step of --simulate takes.")
@shared("scheduler")
@shared("eviction")
@shared("prefix")
@shared("tier")
@shared("blocks")
@shared(
    "memory",
    text="Bytes of K/V in the pool.",
    otherwise="256MiB; what is free on the GPUs beside --simulate",
)
@batching_options
@group_options
@shared("seed")
@config_option
@file_option(
    "--trace",
    help="JSONL file to write every decision to; compressed if it ends in .gz or .zst.",
)
@log_option
@click.pass_context
def serve(ctx: click.Context, /, **given: Any) -> None:
    """Serve a model to clients of an OpenAI-style API, streamed or not.

    Cache, scheduler and engine are those of `kvcore run`, by the clock on the wall: a small
    server for demonstrations and tests, and to record the requests of one's own clients. With
    --simulate it pretends to be a large one: the same API, cache and loop, in real time at the
    times of a latency model. There is no access control: any client that reaches the address
    can use it.
    """
    from kvcore_online.server import ServeConfig, run  # noqa: PLC0415 - a slow room
    from kvcore_online.supervision import announce, log_as_json  # noqa: PLC0415 - as above

    given["out"] = None
    from_file = names_from_file(ctx, given)
    names = ("host", "port", "name", "requests", "body", "client_timeout", "grace")
    listening = {name: given.pop(name) for name in names}
    sent = {name: given.pop(name) for name in ("kv_events", "kv_replay", "trace")}
    simulated, speed_up = given.pop("simulate"), given.pop("speed_up")
    config = ServeConfig(**listening, **sent, speed_up=speed_up if simulated else None)
    others = _unused(ctx, simulated=simulated)
    options = {**given, "workload": ClientWorkload(BLOCK_SIZE)}
    if not simulated:
        options |= {"limit": 0, "clock": "wall"}
    made = _planned_late(config_of(options, "simulate" if simulated else "run", *others))
    made = made.changed(workload=ClientWorkload(made.block_size or BLOCK_SIZE))
    named = naming(given["config"], from_file)
    parts = (RunParts if simulated else EngineParts)(made, naming=named)

    def ready(server: Server) -> None:
        about = ""
        if simulated:
            about = f" (simulated: {parts.deployment.devices} x {parts.device.name})"
        announce(f"{server.model}{about} at {server.url}", config.host)

    log_as_json(as_json=given["log_json"])
    run(parts, config, ready)


def _unused(ctx: click.Context, *, simulated: bool) -> list[str]:
    """Return the options that have no effect; beside --simulate those with defaults too.

    Raises:
        InputError: one of them is given on the command line.
    """
    unused = OF_TENSORS if simulated else OF_SIMULATIONS
    for name in unused:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            msg = f"{flag_of(name)} is not for --simulate: leave it out"
            if not simulated:
                msg = f"{flag_of(name)} is for --simulate alone: give that too"
            raise InputError(msg)
    if not simulated:
        return list(unused)
    # Defaults of the help are those of tensors.
    source = ctx.get_parameter_source
    defaulted = [name for name in ctx.params if source(name) is ParameterSource.DEFAULT]
    return [*unused, *defaulted]


def _planned_late(config: RunConfig) -> RunConfig:
    """Return the options with lag=0, unless one was given: a step is planned after another."""
    like = config.like
    if isinstance(like, Spec) and "lag" not in like.options and built_rules(like).lag:
        return config.changed(like=Spec(like.name, {**like.options, "lag": "0"}))
    return config
