"""`kvcore route`: a proxy in front of several servers, with a router plugin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvcore.errors import InputError
from kvcore_cli.output import file_option, input_option
from kvcore_cli.report.tables import counted
from kvcore_cli.verb import Count, plugin_completion, verb
from kvcore_online.cli.options import log_option

if TYPE_CHECKING:
    from kvcore_online.proxy import Proxy


@verb(
    "kvcore route http://127.0.0.1:8001 http://127.0.0.1:8002 --router lmetric",
    "kvcore route --config replicas.toml --trace day.jsonl.gz",
    more="Ctrl-C and SIGTERM let requests in flight end, and make the trace whole; SIGHUP "
    "begins the next one, as `day-000001.jsonl.gz`, and so does a restart. "
    "Limits and time-outs are keys of the file: see docs/reference/cli.md.",
)
@click.argument("urls", nargs=-1, metavar="[URL]...")
@input_option(
    "--config", help="TOML file with servers and options; those on the command line win."
)
@click.option(
    "--router",
    help="Router: which of several servers gets a request.  [default: round-robin]",
    **plugin_completion("router"),
)
@click.option(
    "--view",
    help="Source of the router's knowledge of caches: an index of the prompts sent to each "
    "server (index), or the KV events of the servers (events).  [default: index]",
)
@click.option("--host", help="Address to listen at.  [default: 127.0.0.1]")
@click.option(
    "--port", type=Count(0), help="Port to listen at; 0 takes a free one.  [default: 8000]"
)
@file_option(
    "--trace", help="JSONL file for requests, and for the server that each was sent to."
)
@input_option(
    "--trace-key",
    help="File with the key by which names in the trace are hashed.  [default: one is drawn]",
)
@log_option
def route(
    *, urls: tuple[str, ...], config: Path | None, log_json: bool, **options: Any
) -> None:
    """Route the requests of an OpenAI-style API to several servers.

    URL is the address of a server's API, such as http://127.0.0.1:8001. Completions and chats,
    with and without streaming, go to the server that the router picks. If that server dies
    before its answer has begun, the request goes to another one.
    """
    from kvcore_online.proxy import run  # noqa: PLC0415 - a slow room
    from kvcore_online.route_config import RouteConfig  # noqa: PLC0415 - as above
    from kvcore_online.supervision import announce, log_as_json  # noqa: PLC0415 - as above

    fields = {name: value for name, value in options.items() if value is not None}
    if urls:
        fields["replicas"] = list(urls)
    if config is not None:
        route_config = RouteConfig.from_toml(config, **fields)
    elif urls:
        route_config = RouteConfig.from_options(**fields)
    else:
        msg = "name the servers: kvcore route http://127.0.0.1:8001 http://127.0.0.1:8002"
        raise InputError(msg)

    def ready(proxy: Proxy) -> None:
        servers = counted(len(route_config.replicas), "server")
        announce(f"{servers} at {proxy.url}", route_config.host)

    log_as_json(as_json=log_json)
    run(route_config, ready)
