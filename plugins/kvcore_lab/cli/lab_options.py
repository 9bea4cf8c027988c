"""The options that experiments share: policies to compare, and where simulations run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import kvcore
from kvcore.errors import InputError
from kvcore.files import STDIN, is_copy
from kvcore.hookspecs import POLICIES
from kvcore.models.catalogue import MODELS
from kvcore.models.memory import KVLayout, check_pool, is_pooled
from kvcore.sections import Section
from kvcore.workloads import Workload
from kvcore_cli.options import Command, all_of, shared
from kvcore_cli.output import output_option, print_sections
from kvcore_cli.verb import Count, Unrecorded, echo, option, plugin_completion

if TYPE_CHECKING:
    from kvcore_lab.sweep.executors import Executor
    from kvcore_plugins.cache_groups import GroupPlan


def policies_option(policies: str) -> Callable[[Command], Command]:
    """Return the option of the policies to compare: by default `policies` and the optimum."""
    return option(
        "--eviction",
        heading=POLICIES,
        help="Eviction policies, such as lru,lfu:half_life=300,optimum.  "
        f"[default: {policies},optimum]",
        **plugin_completion("eviction", "LIST"),
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
    disabled = given.get("disable_hybrid_kv_cache_manager")
    if in_tokens and not model.uniform and not disabled:
        plan = kvcore.groups_of(model, layout.block_size, layout.codec)
        plan.check_keys(model.name, key_tokens)
        return plan
    if not (in_tokens or disabled or is_pooled(model)):
        msg = (
            f"{model.name} keeps more than K/V of tokens, in cache groups whose blocks are "
            "counted in tokens: give --accounting tokens"
        )
        raise InputError(msg)
    check_pool(model)
    return None


markup_options = all_of(
    output_option(
        "--markdown",
        "markup",
        flag_value="markdown",
        help="Print the report as Markdown.",
    ),
    output_option(
        "--latex",
        "markup",
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


def known_model(workload: Workload) -> str | None:
    """Return the model of the catalogue that the file of `workload` names; None: none."""
    name = (workload.served_model or "").rpartition("/")[2].lower().replace("_", "-")
    name = re.sub(r"^meta-|-(instruct|chat|it|hf|base)(?=-|$).*", "", name)
    return name if name in MODELS else None


def tell_model(workload: Workload, model: str, option: str = "--model") -> None:
    """Print on stderr that the file of `workload` names another model than the default `model`.

    `option` is how another one is given.
    """
    chosen = click.get_current_context().get_parameter_source("model")
    named = None if chosen not in (None, ParameterSource.DEFAULT) else workload.served_model
    if named is None:
        return
    known = known_model(workload)
    if model not in (named, known):
        remedy = f"{known} takes it" if known else "takes a name, or the path of a config.json"
        echo(
            f"kvcore: {workload.name}: the file names the model {named}, and times and memory "
            f"are those of {model}: {option} {remedy}",
            err=True,
        )


executor_options = all_of(
    option(
        "--jobs",
        cls=Unrecorded,
        type=Count(),
        help="Number of runs at a time.  [default: one a CPU]",
    ),
    option(
        "--executor",
        cls=Unrecorded,
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

    place_to_run, jobs = given["executor"], given["jobs"]
    pipes = [str(value) for value in source.options().values() if is_copy(value)]
    if any(name != STDIN for name in pipes):
        msg = f"WORKLOAD {pipes[0]}: a pipe is read from {STDIN} alone: name that, or a file"
        raise InputError(msg)
    if pipes:
        if place_to_run not in (None, "local") or jobs not in (None, 1):
            msg = "WORKLOAD -: other processes cannot read it: name a file, or give --jobs 1"
            raise InputError(msg)
        jobs = 1
    return executor_for(place_to_run, jobs)
