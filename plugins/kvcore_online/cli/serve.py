"""`kvcore serve`: a server with an OpenAI-style API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import click

from kvcore.cli.options import (
    batching_options,
    config_of,
    config_option,
    names_from_file,
    naming,
    shared,
)
from kvcore.cli.output import file_path, warn_if_open
from kvcore.cli.verb import Count, Seconds, echo, option, verb
from kvcore.config.run_config import RunConfig, built_rules
from kvcore.hookspecs import OUTPUT
from kvcore.plugins.options import Spec
from kvcore.workloads import ClientWorkload
from kvcore_engine.config import EngineParts

if TYPE_CHECKING:
    from kvcore_online.server import Server


@verb(
    "kvcore serve --port 8001",
    "kvcore serve --generator huggingface:model=./my-model --kv-events tcp://127.0.0.1:5557",
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
    metavar="SECONDS",
    help="Longest time in which a client sends a request, or takes a part of an answer.",
)
@click.option(
    "--grace",
    type=Seconds(),
    default="10",
    metavar="SECONDS",
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
@shared("generator")
@shared("backend")
@shared("model", mode="run", text="Model of the generator.", otherwise="a tiny one")
@shared("dtype")
@shared("codec", mode="run", text="Codec: how K/V is kept.", otherwise="as in --dtype")
@shared("threads")
@shared("scheduler")
@shared("eviction")
@shared("prefix")
@shared("tier")
@shared("blocks")
@shared("memory", text="Bytes of K/V in the pool.", otherwise="256MiB")
@batching_options
@shared("seed")
@config_option
@option(
    "--trace",
    heading=OUTPUT,
    callback=file_path,
    metavar="FILE",
    help="JSONL file to write every decision to; compressed if it ends in .gz or .zst.",
)
@click.pass_context
def serve(ctx: click.Context, /, **given: Any) -> None:
    """Serve a model to clients of an OpenAI-style API, streamed or not.

    Cache, scheduler and engine are those of `kvcore run`, by the clock on the wall: a small
    server for demonstrations and tests, and to record the requests of one's own clients. There
    is no access control: any client that reaches the address can use it.
    """
    from kvcore_online.server import ServeConfig, run  # noqa: PLC0415 - a slow room

    given["out"] = None
    from_file = names_from_file(ctx, given)
    names = ("host", "port", "name", "requests", "body", "client_timeout", "grace")
    listening = {name: given.pop(name) for name in names}
    sent = {name: given.pop(name) for name in ("kv_events", "kv_replay", "trace")}
    config = ServeConfig(**listening, **sent)
    workload = ClientWorkload(given["block_size"])
    options = {**given, "workload": workload, "limit": 0, "clock": "wall"}
    made = _planned_late(config_of(options, "run"))
    parts = EngineParts(made, naming=naming(given["config"], from_file))

    def ready(server: Server) -> None:
        warn_if_open(config.host)
        echo(f"kvcore: {server.model} at {server.url}; Ctrl-C ends", err=True)

    run(parts, config, ready)


def _planned_late(config: RunConfig) -> RunConfig:
    """Return the options with lag=0, unless one was given: a step is planned after another."""
    like = config.like
    if isinstance(like, Spec) and "lag" not in like.options and built_rules(like).lag:
        changes: dict[str, Any] = {"like": Spec(like.name, {**like.options, "lag": "0"})}
        return attrs.evolve(config, **changes)
    return config
