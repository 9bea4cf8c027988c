"""`kvcore curve`: hit ratios by pool size, and with a tier, by the sizes of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvcore.config import find_workload
from kvcore.errors import InputError
from kvcore.files import refuse_overwrite
from kvcore.hookspecs import POOL
from kvcore.models.catalogue import find_device, load_model
from kvcore.models.cost import PrefillCost
from kvcore.models.memory import KVLayout
from kvcore.plugins.manager import Plugins
from kvcore.plugins.options import Spec, parse
from kvcore.workloads import Workload, part_of
from kvcore_cli.options import Numbers, part_options, shared, workload_argument
from kvcore_cli.output import (
    emit_json,
    file_option,
    json_bytes,
    json_option,
    optional_file,
    print_notes,
    progress,
)
from kvcore_cli.verb import Count, Unrecorded, option, plugin_completion, verb
from kvcore_lab.cli.compare import CODEC, DEVICE, MODEL
from kvcore_lab.cli.lab_options import (
    block_size_option,
    markup_options,
    plan_groups,
    policies_option,
    print_report,
    tell_model,
    tokens_of,
)
from kvcore_lab.curves.mrc import POINTS
from kvcore_lab.curves.mrc import curve as make_curves
from kvcore_lab.curves.plane import plane as make_plane
from kvcore_lab.report.mrc import CurvesReport
from kvcore_lab.report.plane import PlaneReport
from kvcore_plugins.host import cpus
from kvcore_replay.cli.plot_option import drawn, plot_file, plot_option
from kvcore_replay.report.figure import FORMS, matplotlib

if TYPE_CHECKING:
    from kvcore_plugins.cache_groups import GroupPlan

POLICIES = "lru,lfu"
MOST_POINTS = 100_000
SIDE, FINE = 7, 25
"""Default numbers of sizes with a tier: in tables, and in plots."""
KINDS = (*FORMS, "csv", "json")
"""Suffixes of files for `--out`."""


@verb(
    "kvcore curve --out curve.svg",
    "kvcore curve requests.jsonl --eviction lru,s3fifo --sizes 1000,2000,4000",
    "kvcore curve --tier host:memory=4TiB --model llama-3.1-8b --out plane.svg",
)
@workload_argument
@part_options
@policies_option(POLICIES)
@option(
    "--sizes",
    heading=POOL,
    type=Numbers(f"expected a number of sizes, such as {POINTS}, or blocks, such as 1000,3000"),
    metavar="N|LIST",
    help="Number of pool sizes, or a list of sizes in blocks, such as 1000,3000.  "
    f"[default: {POINTS}; with --tier {SIDE}, and {FINE} in a plot]",
)
@click.option(
    "--tier",
    multiple=True,
    help="Tier below the pool, such as host:memory=4TiB: show hits by the sizes of both, pool "
    "and tier, up to that memory.",
    **plugin_completion("tier"),
)
@click.option("--exact", is_flag=True, help="With --tier: replay both at each pair of sizes.")
@block_size_option
@shared("accounting", default="keys")
@shared("model", default=None, text="Model whose K/V gives pool sizes in bytes, too.")
@shared(
    "codec",
    default=None,
    text="Codec: how the K/V of --model is kept, such as int8.",
    otherwise=str(CODEC),
)
@shared("seed", default=None)
@option(
    "--jobs",
    cls=Unrecorded,
    type=Count(),
    help="Number of processes that replay.  [default: one a CPU]",
)
@file_option("--out", help=f"File for a plot, or for the numbers: .{', .'.join(KINDS)}.")
@markup_options
@plot_option
@json_option
def curve(workload: str | None, **given: Any) -> None:
    """Show the hit ratios of eviction policies on WORKLOAD, by pool size.

    The largest pool holds every block of the workload. Requests are replayed one after
    another, without a clock. In `keys` counting LRU takes one pass for all sizes, and the
    optimum next to nothing for each; other policies are replayed once for each size.

    With --tier, the share of blocks that hit in the pool or in that tier, and the share of
    prefill that this saves: in one pass for LRU, or by a replay of both for each pair of sizes
    (--exact).
    """
    plugins = Plugins()
    given["tier"] = _one_tier(given["tier"])
    source = part_of(find_workload(workload, plugins), given["limit"], given["window"])
    out, model = given["out"], given["model"]
    kind, inputs = _kind(out), source.options().values()
    if out is not None:
        refuse_overwrite(out, inputs)
    _refuse(given)
    spec = load_model(MODEL if model is None else model)
    layout, groups = None, None
    if model is not None or given["tier"] is not None:
        codec = plugins.build("codec", given["codec"] or CODEC)
        layout = KVLayout(spec, codec, tokens_of(source, given))
        groups = plan_groups(layout, given, source.key_tokens)
    if kind in FORMS:
        matplotlib()
    search = {
        "recompute": PrefillCost.for_model(spec, find_device(DEVICE)),
        "seed": given["seed"],
        "jobs": cpus() if given["jobs"] is None else given["jobs"],
        "plugins": plugins,
        "progress": progress,
    }
    with optional_file(out) as file, plot_file(given["picture"], inputs) as write_plot:
        if given["tier"] is None:
            report: CurvesReport | PlaneReport = _curves(source, given, layout, groups, search)
        else:
            report = _plane(source, given, layout, search)
        plot = report.chart() if isinstance(report, CurvesReport) else report.contours
        if file is not None and kind == "csv":
            report.write_csv(file)
        elif file is not None and kind == "json":
            file.buffer.write(json_bytes({"schema": 1, **report.document()}))
        elif file is not None:
            file.buffer.write(drawn(plot, kind))
        write_plot(plot)
    if given["as_json"]:
        emit_json({"schema": 1, **report.document()})
    elif out is None:
        print_report(report.sections, given["markup"], compact=given["tier"] is None)
    print_notes(source)
    tell_model(source, spec.name)


def _one_tier(given: Sequence[str]) -> Spec | None:
    """Return the tier of a plane; None for curves."""
    specs = [spec for text in given if text != "none" for spec in parse(text)]
    if len(specs) > 1:
        msg = f"--tier: {len(specs)} were given, and a plane has one; see `kvcore compare`"
        raise InputError(msg)
    return specs[0] if specs else None


def _refuse(given: dict[str, Any]) -> None:
    """Raise InputError if an option needs another one that is not given."""
    msg, plane = "", given["tier"] is not None
    if given["exact"] and not plane:
        msg = "--exact is for a plane: give --tier too"
    elif given["codec"] is not None and given["model"] is None and not plane:
        msg = "--codec says what a token takes of the K/V of --model: give that too"
    elif plane and given["accounting"] != "keys":
        msg = "--accounting: a plane counts by keys alone"
    if msg:
        raise InputError(msg)


def _curves(
    source: Workload,
    given: dict[str, Any],
    layout: KVLayout | None,
    groups: GroupPlan | None,
    search: dict[str, Any],
) -> CurvesReport:
    """Return the report on the curves of policies over the sizes of a pool."""
    points, blocks = _sizes(given["sizes"], POINTS)
    policies = given["eviction"]
    if policies is None:  # the optimum where it is known
        policies = f"{POLICIES},optimum" if given["accounting"] == "keys" else POLICIES
    curves = make_curves(
        source,
        policies,
        blocks,
        points=points,
        block_size=given["block_size"],
        accounting=given["accounting"],
        groups=() if groups is None else groups.groups,
        **search,
    )
    return CurvesReport(curves, layout, groups)


def _plane(
    source: Workload, given: dict[str, Any], layout: Any, search: dict[str, Any]
) -> PlaneReport:
    """Return the report on the plane over the sizes of a pool and a tier."""
    drawn = given["picture"] is not None or _kind(given["out"]) in FORMS
    points, pools = _sizes(given["sizes"], FINE if drawn else SIDE)
    plane_of_sizes = make_plane(
        source,
        given["tier"],
        layout,
        pools=pools,
        points=points if pools is None else len(pools),
        eviction=given["eviction"] or "lru",
        exact=given["exact"],
        **search,
    )
    return PlaneReport(plane_of_sizes, layout)


def _kind(out: Path | None) -> str:
    """Return the suffix of `--out`; empty without it."""
    kind = "" if out is None else out.suffix[1:].lower()
    if out is not None and kind not in KINDS:
        msg = f"--out {out}: a name says what is written; end it with .{', .'.join(KINDS)}"
        raise InputError(msg)
    return kind


def _sizes(given: list[int] | None, points: int) -> tuple[int, list[int] | None]:
    """Return the number of sizes that `--sizes` asks for, or the sizes that it lists.

    Without it the number is `points`; of a list the number is not used.
    """
    if given is None:
        return points, None
    if len(given) > 1:
        return points, given
    if given[0] > MOST_POINTS:
        msg = f"--sizes {given[0]}: that many points are too many; give {MOST_POINTS} or fewer"
        raise InputError(msg)
    return given[0], None
