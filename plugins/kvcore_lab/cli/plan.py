"""`kvcore plan`: the smallest fleets that meet an SLO, and the limit of smaller ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvcore.files import atomic_file, make_directory, refuse_overwrite
from kvcore.plugins.options import Spec
from kvcore_cli.options import (
    Numbers,
    batching_options,
    named_workload,
    part_options,
    poolwide_options,
    run_options,
    shared,
    traffic_options,
    workload_argument,
)
from kvcore_cli.output import emit_json, file_option, json_bytes, json_option, progress
from kvcore_cli.verb import Count, echo, verb
from kvcore_lab.cli.lab_options import (
    executor_options,
    markup_options,
    print_report,
    search_executor,
    tell_model,
)
from kvcore_lab.plans.devices import devices_of, plan_devices
from kvcore_lab.plans.planning import DEGREES, HOST, MOST_GPUS, ROUTER
from kvcore_lab.plans.planning import plan as make_plan
from kvcore_lab.report.plan import DevicePlansReport, PlanReport
from kvcore_lab.sweep import Journal
from kvcore_replay.cli.plot_option import plot_file, plot_option
from kvcore_replay.cli.trace_options import gpu_price_option

NONE_FOUND = 1
"""The exit code if no fleet meets the SLO."""

RESULTS = Path("plan-results")
"""The default directory of the journal and the plan."""


HINT = "expected numbers, such as 1,2,4"


@verb(
    "kvcore plan --device h100 --slo ttft=2,tpot=0.05",
    "kvcore plan --device h100,h200,b200 --gpu-price h100=2.5 --slo ttft=2,tpot=0.05",
    "kvcore plan requests.jsonl --model llama-3-70b --slo ttft=5 --percentile 95 --tier none",
)
@workload_argument
@part_options
@poolwide_options
@shared(
    "tier",
    text="Tier below the pool of a replica: the memory of `host` is the upper bound of the "
    f"search, other tiers are taken as given; `none` leaves tiers out.  [default: {HOST}, "
    "or none below pools of layers]",
)
@shared("model")
@shared(
    "device",
    text="GPU that the model is served on, as for simulate; or several, such as "
    "h100,h200,b200, whose fleets are compared.",
)
@shared("codec")
@shared("weights_dtype")
@shared(
    "memory",
    text="Largest size of a replica's pool in bytes of K/V.",
    otherwise="as much as fits",
)
@batching_options
@traffic_options
@click.option(
    "--percentile",
    type=float,
    default=99.0,
    help="Percentage of the requests that must meet the SLO.",
)
@click.option(
    "--tensor-parallel",
    type=Numbers(HINT),
    default=",".join(map(str, DEGREES)),
    help="Numbers of GPUs that share the model, each of which is tried.",
)
@click.option(
    "--replicas",
    type=Numbers(HINT),
    help="Numbers of replicas of the model to try.  [default: the fewest that meet the SLO]",
)
@click.option(
    "--max-gpus", type=Count(), default=MOST_GPUS, help="Largest number of GPUs of a fleet."
)
@shared("router", default=Spec(ROUTER))
@shared("view")
@file_option(
    "--out",
    metavar="DIR",
    help="Directory for plan.json, and for the journal from which an interrupted search goes "
    f"on.  [default: {RESULTS}]",
)
@gpu_price_option
@executor_options
@markup_options
@plot_option
@json_option
@click.pass_context
def plan(ctx: click.Context, /, **given: Any) -> None:
    """Find the fewest GPUs, and the least K/V memory and host RAM, for the SLO of WORKLOAD.

    Fleets of replicas are simulated, with a router that divides the requests among them, until
    the smallest ones that meet the SLO are found. Simulations of a smaller fleet with ideal
    parts, such as an endless pool, then show its limit: the policy, the capacity of its
    memory, the content of the prompts, or compute. Finished simulations are kept: after an
    interruption the same command goes on with the rest.
    """
    source = named_workload(given)
    out = given["out"] or RESULTS
    written = out / "plan.json"
    refuse_overwrite(written, source.options().values())
    not_given = ctx.get_parameter_source("tier") is ParameterSource.DEFAULT
    options = run_options(given, "workload", "tier", "tensor_parallel", "replicas", "device")
    devices = devices_of(given["device"])
    try:
        with plot_file(given["picture"], source.options().values()) as write_plot:
            search = partial(
                make_plan if len(devices) == 1 else partial(plan_devices, devices),
                source,
                percentile=given["percentile"],
                tensor_parallel=given["tensor_parallel"],
                replicas=given["replicas"],
                max_gpus=given["max_gpus"],
                tier=None if not_given else given["tier"],
                journal=partial(_journal, out),
                executor=search_executor(given, source),
                progress=progress,
                gpu_price=given["gpu_price"],
                **options,
            )
            report: PlanReport | DevicePlansReport
            if len(devices) == 1:
                plans = search(device=devices[0])
                report = PlanReport(plans.as_dict())
                document = {"schema": 1, **report.plan}
                limit = document["limit"]
                document["limit"] = {"verdict": limit["verdict"], "why": report.limit} | limit
            else:
                plans = search()
                report = DevicePlansReport(plans.as_dict())
                document = {"schema": 1, **report.plans}
            with atomic_file(written) as file:
                file.buffer.write(json_bytes(document))
            write_plot(report.chart())
    except KeyboardInterrupt:
        if out.is_dir():
            echo(f"kvcore: what is finished is in {out}; run it again to go on", err=True)
        raise
    if given["as_json"]:
        emit_json(document)
    else:
        print_report(report.sections, given["markup"])
        echo(f"kvcore: the plan is in {written}", err=True)
    printed = []
    if isinstance(report, DevicePlansReport) and not given["as_json"]:
        printed = report.left_out
    for note in (*plans.notes, *plans.workload_notes):
        if note not in printed:
            echo(f"kvcore: {note}", err=True)
    tell_model(source, str(given["model"]))
    if plans.best is None:
        ctx.exit(NONE_FOUND)


def _journal(out: Path) -> Journal:
    """Make the directory of a plan, and return the journal in it."""
    make_directory(out)
    return Journal(out / "journal.jsonl", "--out")
