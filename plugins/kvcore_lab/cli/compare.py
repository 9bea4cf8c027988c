"""`kvcore compare`: eviction policies and the optimum on one workload, by pool size."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvcore.config import RunConfig, RunParts, find_workload
from kvcore.config.options import option_default
from kvcore.errors import InputError
from kvcore.files import refuse_overwrite
from kvcore.hookspecs import OUTPUT, REQUESTS
from kvcore.hookspecs import POLICIES as POLICIES_HEADING
from kvcore.models.catalogue import find_device, load_model
from kvcore.models.cost import PrefillCost
from kvcore.models.memory import KVLayout
from kvcore.plugins import describe
from kvcore.plugins.manager import Plugins
from kvcore.progress import ticked
from kvcore.units import format_bytes, parse_bytes
from kvcore.workloads import Workload, checked, part_of
from kvcore_cli.options import Numbers, naming, part_options, shared, workload_argument
from kvcore_cli.output import (
    STDOUT,
    emit_json,
    file_option,
    json_option,
    optional_file,
    print_notes,
    progress,
)
from kvcore_cli.report.tables import counted
from kvcore_cli.verb import Count, Unrecorded, option, plugin_completion, verb
from kvcore_lab.cli.lab_options import (
    block_size_option,
    markup_options,
    plan_groups,
    policies_option,
    print_report,
    tell_model,
    tokens_of,
)
from kvcore_lab.cli.metrics import metrics_file, prometheus_option
from kvcore_lab.comparison import SHARING, Comparison, compare_policies
from kvcore_lab.report.comparison import ComparisonReport, write_csv
from kvcore_lab.report.policies import block_bytes, memory_fields
from kvcore_lab.report.prometheus import comparison_metrics
from kvcore_replay.cli.plot_option import plot_file, plot_option
from kvcore_replay.cli.trace_options import price_option

if TYPE_CHECKING:
    from kvcore_plugins.cache_groups import GroupPlan

POLICIES = "lru,fifo,lfu,slru,cost,random"
MODEL, CODEC, DEVICE = map(option_default, ("model", "codec", "device"))

AS_GIVEN = ("checkpoint", "block_size", "accounting", "seed", "trace", "price", "jobs")
"""Options with the names of arguments of `compare_policies`."""


@verb(
    "kvcore compare",
    "kvcore compare requests.jsonl.gz --memory 40GiB,80GiB --model llama-3-70b",
    "zcat requests.gz | kvcore compare - --eviction lru,lfu:half_life=300 --blocks 5000",
)
@workload_argument
@part_options
@policies_option(POLICIES)
@click.option(
    "--blocks",
    type=Numbers("several are a list, such as 1000,3000"),
    help="Numbers of KV blocks in the pool, such as 1000,3000.",
)
@click.option("--memory", metavar="LIST", help="Bytes of K/V in the pool, such as 40GiB,80GiB.")
@shared(
    "model",
    default=None,
    text="Model whose K/V is cached; `kvcore size --help` lists all.",
    otherwise=MODEL,
)
@shared("codec", default=None, otherwise=str(CODEC))
@block_size_option
@shared("accounting", default="keys")
@shared("disable_hybrid_kv_cache_manager", mode="simulate")
@option(
    "--checkpoint",
    heading=POLICIES_HEADING,
    help="Checkpoint policies of a hybrid model, such as default,marconi,sparse:budget=4.",
    **plugin_completion("checkpoint", "LIST"),
)
@shared("tier")
@click.option(
    "--prefix",
    help=f"Prefix cache: which cached blocks a prompt can reuse.  [default: {SHARING}]",
    **plugin_completion("prefix"),
)
@shared("seed", default=None)
@option(
    "--check",
    heading=REQUESTS,
    is_flag=True,
    help="Check all keys, ids and times of the workload first. Without it, the keys of the "
    "first 4000 requests are checked.",
)
@file_option("--trace", help="JSONL file to write every decision to.")
@file_option("--csv", help="CSV file to write the rows to.")
@option(
    "--residency",
    heading=OUTPUT,
    is_flag=True,
    help="Measure how long blocks rest in the cache between uses.",
)
@option(
    "--savings",
    heading=OUTPUT,
    is_flag=True,
    help="Show the prefill that hits save, and the microseconds that a request takes.",
)
@option(
    "--jobs",
    cls=Unrecorded,
    type=Count(),
    default=1,
    help="Number of processes that replay policies and pool sizes.",
)
@price_option
@markup_options
@plot_option
@prometheus_option
@json_option
def compare(workload: str | None, **given: Any) -> None:
    """Compare eviction policies on WORKLOAD, by pool size.

    Requests are replayed one after another, without a clock. The optimum is the most that
    any eviction can hit; it is known in `keys` counting, for prefixes shared as `radix` does.
    What a --tier holds is loaded in no time.
    """
    plugins = Plugins()
    source = part_of(find_workload(workload, plugins), given["limit"], given["window"])
    _refuse(source, given)
    spec = load_model(MODEL if given["model"] is None else given["model"])
    recompute = PrefillCost.for_model(spec, find_device(DEVICE))
    sizes, labels, layout, plan = given["blocks"], None, None, None
    if given["memory"] is not None:
        codec = plugins.build("codec", given["codec"] or CODEC)
        layout = KVLayout(spec, codec, tokens_of(source, given))
        plan = plan_groups(layout, given, source.key_tokens)
        pools = _pools(given["memory"], layout, plan)
        labels = {pool["blocks"]: format_bytes(pool["bytes"]) for pool in pools}
        sizes = list(labels)
    below = _below(source, given, plugins, plan) if given["tier"] else None
    if given["check"]:
        with progress(f"checking {source.name}", source.size) as tick:
            deque(ticked(checked(source), tick), maxlen=0)
    prefix = SHARING if given["prefix"] is None else given["prefix"]
    policies = given["eviction"]
    if policies is None:
        policies = _candidates(given, prefix, plan)
    csv, prometheus, as_json = given["csv"], given["prometheus"], given["as_json"]
    with (
        optional_file(csv) as rows,
        metrics_file(prometheus, source, as_json=as_json) as metrics,
        plot_file(given["picture"], source.options().values()) as write_plot,
    ):
        comparison = compare_policies(
            source,
            policies,
            sizes,
            groups=() if plan is None else plan.groups,
            prefix=prefix,
            recompute=recompute,
            residency=given["residency"] or prometheus is not None,
            tiers=None if below is None else below.add_tiers,
            plugins=plugins,
            progress=progress,
            **{name: given[name] for name in AS_GIVEN},
        )
        if rows is not None:
            write_csv(comparison, rows)
        if metrics is not None:
            metrics(comparison_metrics(comparison))
        tiers = () if below is None else tuple(map(describe, below.tiers()))
        report = ComparisonReport(
            comparison,
            labels,
            prefix,
            recompute,
            tiers,
            layout=layout if plan is None else None,
            residency=given["residency"],
            savings=given["savings"],
            grouped=plan is not None,
            apart=given["markup"] is not None,
        )
        write_plot(report.chart())
    if as_json:
        document = _document(comparison)
        if layout is not None:
            document["memory"] = memory_fields(layout, plan) | {"budgets": pools}
        if given["prefix"] is not None:
            document["prefix"] = prefix
        emit_json(document)
    elif prometheus != STDOUT:
        print_report(report.sections, given["markup"], compact=True)
    print_notes(source)
    tell_model(source, spec.name)


def _document(comparison: Comparison) -> dict[str, Any]:
    """Return the JSON document of a comparison, without bills or tiers if it has none."""
    fields = attrs.asdict(comparison)
    left_out = set() if comparison.bills else {"bill"}
    if all(row.checkpoint is None for row in comparison.rows):
        left_out.add("checkpoint")
    if all(row.reuse_ratio is None for row in comparison.rows):
        left_out |= {"reused_blocks", "reuse_ratio", "tiers"}
    rows = [{k: v for k, v in row.items() if k not in left_out} for row in fields["rows"]]
    source = comparison.workload
    document = {"schema": 1, "workload": source.as_dict(), **source.told()}
    document |= {"count": fields["accounting"], "rows": rows, "infinite": fields["infinite"]}
    return document if comparison.bills is None else document | {"bill": fields["bills"]}


def _pools(memory: str, layout: KVLayout, plan: GroupPlan | None) -> list[dict[str, int]]:
    """Return the bytes and the blocks of each pool of `--memory`.

    Raises:
        InputError: a pool is smaller than a block, or two sizes are the same number of blocks.
    """
    pools: dict[int, int] = {}
    found = []
    for size in map(parse_bytes, memory.split(",")):
        blocks = layout.blocks_in(size) if plan is None else size // plan.bytes_per_block
        if not blocks:
            block = block_bytes(layout)
            if plan is not None:
                block = (
                    f"A block of any cache group of {layout.model.name} takes "
                    f"{format_bytes(plan.bytes_per_block)}."
                )
            msg = f"--memory: {format_bytes(size)} is less than a block. {block}"
            raise InputError(msg)
        if (other := pools.setdefault(blocks, size)) != size:
            same = f"{other:,} and {size:,} bytes are both {counted(blocks, 'block')}"
            msg = f"--memory: {same}, one pool: leave one of them out"
            raise InputError(msg)
        found.append({"bytes": size, "blocks": blocks})
    return found


def _refuse(source: Workload, given: dict[str, Any]) -> None:
    """Refuse options that exclude or need one another, and a CSV file over the workload's."""
    blocks, memory, trace, csv = (given[name] for name in ("blocks", "memory", "trace", "csv"))
    one_row = {"--eviction NAME": given["eviction"], "--blocks N": blocks or memory}
    missing = " ".join(option for option, value in one_row.items() if value is None)
    msg = ""
    if blocks is not None and memory is not None:
        msg = "--blocks and --memory both say how large the pool is: give one of them"
    elif given["codec"] is not None and memory is None and not given["tier"]:
        msg = "--codec says what a token takes of --memory, or of a --tier: give one of them"
    elif trace is not None and missing:
        msg = f"a trace is of one policy in a pool of one size: add `{missing}`"
    if msg:
        raise InputError(msg)
    if csv is not None:
        refuse_overwrite(csv, source.options().values())


def _below(
    source: Workload, given: dict[str, Any], plugins: Plugins, plan: GroupPlan | None
) -> RunParts:
    """Return the parts of a run that make the tiers below the cache of each row."""
    names = ("model", "codec", "block_size", "accounting", "seed", "tier")
    options = {name: given[name] for name in names if given[name] is not None}
    # The pool has a block here: the sizes are those of the rows.
    config = RunConfig("compare", blocks=1, **options)
    parts = RunParts
    if plan is not None:
        from kvcore_lab.api import GroupedParts  # noqa: PLC0415 - hybrid models alone

        parts = GroupedParts
    return parts(config, plugins, workload=source, naming=naming(None, set()))


def _candidates(given: dict[str, Any], prefix: str, plan: GroupPlan | None) -> str:
    """Return the default policies that can serve, with the optimum if it is a bound."""
    sizes = () if plan is None else {group.block_size for group in plan.groups}
    if given["checkpoint"] is not None or len(sizes) > 1:  # of which others see one alone
        return "lru"
    bounded = given["accounting"] == "keys" and prefix.partition(":")[0].strip() == SHARING
    return f"{POLICIES},optimum" if bounded else POLICIES
