"""The options that experiments share: policies to compare, and where simulations run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

import kvcore
from kvcore.cli.options import Command, all_of, shared
from kvcore.cli.output import print_sections, print_table
from kvcore.cli.verb import Count, echo, option, plugin_completion
from kvcore.errors import InputError
from kvcore.files import STDIN, is_copy
from kvcore.hookspecs import OUTPUT, POLICIES
from kvcore.models.memory import KVLayout, check_pool, is_pooled
from kvcore.sections import Section
from kvcore.units import format_dollars
from kvcore.workloads import Workload

if TYPE_CHECKING:
    from kvcore_lab.sweep.executors import Executor
    from kvcore_plugins.cache_groups import GroupPlan


def policies_option(policies: str) -> Callable[[Command], Command]:
    """Return the option of the policies to compare: by default `policies` and the optimum."""
    return option(
        "--eviction",
        heading=POLICIES,
        metavar="LIST",
        help="Eviction policies, such as lru,lfu:half_life=300,optimum.  "
        f"[default: {policies},optimum]",
        **plugin_completion("eviction"),
    )


block_size_option = shared("block_size", otherwise="as in a key")
"""The block size of a verb without a clock; None: the tokens of a key of the workload."""


def tokens_of(source: Workload, given: dict[str, Any]) -> int:
    """Return the tokens of a block: those of the option, or else of a key of `source`."""
    size: int | None = given["block_size"]
    return source.key_tokens if size is None else size


def plan_groups(
    layout: KVLayout, given: Mapping[str, Any], key_tokens: int
) -> GroupPlan | None:
    """Return the cache groups of pools of a model, whose blocks are counted in tokens.

    None: its layers keep the same, blocks are counted in keys, or one group was asked for.

    Raises:
        InputError: a pool cannot keep the K/V of the model, or its blocks do not fit keys of so
            many tokens.
    """
    model, in_tokens = layout.model, given["accounting"] == "tokens"
    one = given.get("disable_hybrid_kv_cache_manager")
    if in_tokens and not model.uniform and not one:
        plan = kvcore.groups_of(model, layout.block_size, layout.codec)
        plan.check_keys(model.name, key_tokens)
        return plan
    if not (in_tokens or one or is_pooled(model)):
        msg = (
            f"{model.name} keeps more than K/V of tokens, in cache groups whose blocks are "
            "counted in tokens: give --accounting tokens"
        )
        raise InputError(msg)
    check_pool(model)
    return None


def _gpu_price(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """Return the prices that `--gpu-price` gives; for `list` print those known, and exit."""
    if value is None or ctx.resilient_parsing:
        return {}
    from kvcore_lab.gpu_cost import PRICES, read_gpu_prices  # noqa: PLC0415 - if any are given

    if value == "list":
        rows = [
            (name, format_dollars(price.usd), price.source) for name, price in PRICES.items()
        ]
        print_table(("device", "USD an hour", "source"), rows, right=("USD an hour",))
        ctx.exit()
    try:
        return read_gpu_prices(value)
    except InputError as error:
        raise click.BadParameter(str(error), ctx, param) from None


gpu_price_option = option(
    "--gpu-price",
    heading=OUTPUT,
    callback=_gpu_price,
    is_eager=True,
    metavar="PRICES",
    help="Dollars for an hour of a GPU, such as h100=2.5,b200=5, or 2.5 for every device.  "
    "[default: those of a table, which `list` shows]",
)
"""The option of the prices by which a deployment is costed."""

markup_options = all_of(
    option(
        "--markdown",
        "markup",
        heading=OUTPUT,
        flag_value="markdown",
        help="Print the report as Markdown.",
    ),
    option(
        "--latex",
        "markup",
        heading=OUTPUT,
        flag_value="latex",
        help="Print the report as LaTeX, with tables of booktabs.",
    ),
)
"""The options of a report for pages and papers."""


def print_report(
    sections: Sequence[Section], markup: str | None, *, compact: bool = False
) -> None:
    """Print a report: for the terminal, perhaps `compact`, or as `markdown` or `latex`."""
    if markup is None:
        print_sections(*sections, compact=compact)
        return
    from kvcore_lab.report.markup import MARKUPS  # noqa: PLC0415 - few reports

    echo(MARKUPS[markup](sections))


executor_options = all_of(
    click.option(
        "--jobs", type=Count(), help="Number of runs at a time.  [default: one a CPU]"
    ),
    click.option(
        "--executor",
        metavar="WHERE",
        help="Machines for the runs: local, ray, or ray:HOST:PORT.  [default: local]",
    ),
)
"""The options for the number and the place of the runs of a search or sweep."""


def search_executor(given: Mapping[str, Any], source: Workload) -> Executor:
    """Return the executor for the simulations of a search over a workload.

    Each simulation opens the workload by its name, so that of a pipe is `-` alone, and this
    process runs all simulations of it.

    Raises:
        InputError: the workload is another pipe, or other processes are to read it.
    """
    from kvcore_lab.sweep.executors import executor_for  # noqa: PLC0415 - for searches alone

    where, jobs = given["executor"], given["jobs"]
    pipes = [str(value) for value in source.options().values() if is_copy(value)]
    if any(name != STDIN for name in pipes):
        msg = f"WORKLOAD {pipes[0]}: a pipe is read from {STDIN} alone: name that, or a file"
        raise InputError(msg)
    if pipes:
        if where not in (None, "local") or jobs not in (None, 1):
            msg = "WORKLOAD -: other processes cannot read it: name a file, or give --jobs 1"
            raise InputError(msg)
        jobs = 1
    return executor_for(where, jobs)
