"""`kvcore routers`: hits and latencies of each router, beside one cache for all servers."""

from __future__ import annotations

from typing import Any

import click

from kvcore_cli.options import (
    Numbers,
    batching_options,
    named_workload,
    names_from_file,
    part_options,
    policy_options,
    run_options,
    server_options,
    shared,
    traffic_options,
    workload_argument,
)
from kvcore_cli.output import emit_json, json_option, progress
from kvcore_cli.verb import echo, option, plugin_completion, verb
from kvcore_cluster.options import CLUSTER
from kvcore_lab.cli.lab_options import (
    executor_options,
    markup_options,
    print_report,
    search_executor,
    tell_model,
)
from kvcore_lab.report.routers import RoutersReport
from kvcore_lab.router_comparison import compare_routers
from kvcore_replay.cli.plot_option import plot_file, plot_option
from kvcore_replay.cli.trace_options import gpu_price_option


@verb(
    "kvcore routers --replicas 8 --tensor-parallel 1",
    "kvcore routers requests.jsonl --replicas 2,4,8 --routers round-robin,least-requests",
)
@workload_argument
@part_options
@option(
    "--routers",
    heading=CLUSTER,
    help="Routers, such as round-robin,least-requests.  [default: all that are installed]",
    **plugin_completion("router", "LIST"),
)
@click.option(
    "--replicas",
    type=Numbers("expected numbers, such as 2,4,8"),
    default="8",
    help="Numbers of servers that share the requests.",
)
@shared("view")
@shared("fail")
@policy_options
@server_options
@batching_options
@traffic_options
@gpu_price_option
@executor_options
@markup_options
@plot_option
@json_option
@click.pass_context
def routers(ctx: click.Context, /, **given: Any) -> None:
    """Compare routers: simulate serving WORKLOAD with several servers under each of them.

    One table has hits, the balance of load, latencies and goodput of each router, and the hits
    of one cache with the memory of all servers, under the same eviction policy and under the
    optimum. Several --replicas show how these change with the number of servers.
    """
    names_from_file(ctx, given)
    source = named_workload(given)
    options = run_options(given, "workload", "replicas")
    with plot_file(given["picture"], source.options().values()) as write_plot:
        comparison = compare_routers(
            source,
            given["routers"],
            given["replicas"],
            executor=search_executor(given, source),
            progress=progress,
            gpu_price=given["gpu_price"],
            **{name: value for name, value in options.items() if value is not None},
        )
        report = RoutersReport(comparison)
        write_plot(report.chart())
    if given["as_json"]:
        emit_json(report.document())
    else:
        print_report(report.sections, given["markup"])
    for note in comparison.notes:
        echo(f"kvcore: {note}", err=True)
    tell_model(source, comparison.config["model"])
