"""The options that verbs share, and the file of `--config`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource

from kvcore.cache.pool import MOST_BLOCKS
from kvcore.cli.output import file_path, input_file, print_table, prometheus_option, trace_file
from kvcore.cli.verb import Count, Time, complete_workload, flag_of, plugin_completion
from kvcore.config import Mode, RunConfig, read_toml
from kvcore.config.options import (
    RULES,
    option_choices,
    option_default,
    option_help,
    option_names,
    option_type,
    read_option,
    slo_text,
)
from kvcore.config.parts import BLOCK_SIZE
from kvcore.errors import InputError
from kvcore.files import STDIN, is_copy
from kvcore.plugins.manager import KINDS, Plugins
from kvcore.plugins.options import as_text
from kvcore.request import SLO
from kvcore.units import INT64_LIMIT, parse_whole
from kvcore.workloads import Workload, find_workload

if TYPE_CHECKING:
    from kvcore.analysis.sweep.plan import Executor

Command = TypeVar("Command", bound=Callable[..., Any])

WHAT_IF = "What if: "

METAVARS = {
    "memory": "SIZE",
    "slo": "SLO",
    "limit": "INTEGER",
    "window": "START:END",
    "replicas": "INTEGER",
    "view": "VIEW",
    "fail": "FAILURE",
    "autoscale": "PLANNER",
    "disaggregate": "POOLS",
    "like": "ENGINE",
    **dict.fromkeys(KINDS, "PLUGIN"),
}

TEXT = ("model", "device", *METAVARS)
"""Options that are neither a number nor a choice: their text is read as in TOML."""

MULTIPLE = ("tier", "fail")
"""Options that may be given several times."""


def _read(name: str, ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Read the text of an option as `RunConfig` does; None stays, and so does text for None.

    In a verb that runs a trace again, None means that the option is as recorded.
    """
    if value is None or value == ():
        return None
    try:
        read = read_option(name, value)
    except InputError as error:
        reason = str(error).removeprefix(f"{name}: ")
        raise click.BadParameter(reason, ctx, param) from None
    return value if read is None else read


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic in new releases
    """A list of whole numbers with commas between them, such as `1000,3000`, or one of them.

    Args:
        hint: the end of an error about text that is none.
    """

    name = "list"

    def __init__(self, hint: str) -> None:
        self.hint = hint

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[Any]:
        """Return the numbers of a text; a list of a file as it is, all else of it as one item.

        Raises:
            InputError: no list of numbers, or one that only commas made a list of.
        """
        del ctx
        if not isinstance(value, str):
            return value if isinstance(value, list) else [value]
        msg = ""
        try:
            numbers = [parse_whole(number, 0) for number in value.split(",")]
        except InputError as error:
            msg = f"{error}; {self.hint}"
            numbers = []
        if max(numbers, default=0) > MOST_BLOCKS:
            msg = f"a pool has at most {MOST_BLOCKS} blocks"
        elif len(numbers) > 1 and not all(numbers):
            listed = list(map(str, numbers))
            msg = f"{value} is a list of {', '.join(listed[:-1])} and {listed[-1]}: write "
            grouped = re.fullmatch(r"[1-9][0-9]{0,2}(,[0-9]{3})+", value)
            msg += value.replace(",", "") if grouped else "numbers without commas, above 0"
        if msg:
            assert param is not None
            msg = f"{param.opts[0]} {value!r:.60}: {msg}"
            raise InputError(msg)
        return numbers


workload_argument = click.argument(
    "workload", required=False, type=click.UNPROCESSED, shell_complete=complete_workload
)
"""The workload of a verb; without it, the trace that comes with kvcore."""


def _shown(default: Any) -> Any:
    """Return a default in the form of the command line."""
    if isinstance(default, SLO):
        return slo_text(default)
    return default if default is None or isinstance(default, int | float) else as_text(default)


def shared(
    name: str,
    *,
    mode: Mode = "simulate",
    text: str | None = None,
    default: Any = ...,
    otherwise: str | None = None,
) -> Callable[[Command], Command]:
    """Return the option of a verb that `RunConfig` declares under `name`.

    Args:
        name: name of the field.
        mode: mode of the default.
        text: help text; None: that of the field.
        default: default of the option; if left out, that of the field.
        otherwise: words for a default that is None, at the end of the help text.
    """
    if default is ...:
        default = option_default(name, mode)
    text = text or option_help(name)
    if otherwise is not None:
        text = f"{text}  [default: {otherwise}]"
    more: dict[str, Any] = {"help": text, "default": _shown(default)}
    kind, choices = option_type(name), option_choices(name)
    kinds = (kind, *get_args(kind))  # of `float | None` too
    literal = next((each for each in kinds if get_origin(each) is Literal), None)
    flag = flag_of(name)
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", **more)
    if name in MULTIPLE:
        more |= {"multiple": True, "default": ()}
    if name in TEXT:
        more |= {"metavar": METAVARS.get(name, "TEXT"), "type": click.UNPROCESSED}
        more |= {"callback": partial(_read, name)}
        more |= plugin_completion(name) if name in KINDS else {}
    elif choices or literal is not None:
        more |= {"type": click.Choice(choices or get_args(literal))}
    else:
        more |= {"type": float if float in kinds else Count(-INT64_LIMIT)}
    return click.option(flag, **more)


def all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that gives a command several options, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def policies_option(policies: str) -> Callable[[Command], Command]:
    """Return the option of the policies to compare: by default `policies` and the optimum."""
    return click.option(
        "--eviction",
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


poolwide_options = all_of(
    *map(shared, ("eviction", "scheduler", "prefix")),
    shared("retention", otherwise="none"),
    shared("latency"),
    shared("drafter", otherwise="none"),
)

policy_options = all_of(poolwide_options, shared("tier"))

server_options = all_of(
    *map(shared, ("model", "device", "tensor_parallel", "codec", "weights_dtype")),
    shared("blocks", otherwise="as many as fit"),
    shared("memory"),
)
"""The options of a simulated server: its model, its GPUs, and the pool on them."""

batching_options = all_of(
    shared("block_size", default=BLOCK_SIZE),
    *map(shared, ("max_tokens", "max_seqs", "steps", "chunked", "watermark", "like", *RULES)),
)
"""The limits of a step, and the rules by which engines differ."""


def load_config(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Take the values in the file at `value` as defaults of the command's other options."""
    path = file_path(ctx, param, value)  # no pipe: its paths are relative to the file
    if path is not None:
        options = toml_types(ctx.command)
        found = read_toml(path, {key: kind for key, (_, kind) in options.items()})
        ctx.default_map = {options[key][0]: value for key, value in found.items()}
    return path


def toml_types(command: click.Command) -> dict[str, tuple[str, Any]]:
    """Return the keys of a command's configuration file: its parameters, and their types."""
    return {
        each.opts[0].lstrip("-").replace("-", "_"): (str(each.name), _type(each))
        for each in command.params
        if each.callback is not load_config
        and (each.name in MULTIPLE or not getattr(each, "multiple", False))
    }


config_option = click.option(
    "--config",
    callback=load_config,
    is_eager=True,
    metavar="FILE",
    help="TOML file with options; those on the command line win.",
)
"""The `--config` option. It has the other options of its command as keys."""

replica_option = click.option(
    "--replica",
    metavar="NUMBER[:LIFE]",
    help="Number of a replica in the trace of a cluster; if it failed and returned, also the "
    "number of its life, such as 1:2.",
)

part_options = all_of(shared("limit", otherwise="all"), shared("window"))
"""The options of the part of a workload that is read."""

cluster_options = all_of(
    *map(shared, ("replicas", "router", "view", "fail", "autoscale", "disaggregate"))
)
"""The options of several servers that share the requests."""

traffic_options = all_of(*map(shared, ("rate_scale", "slo", "seed")), config_option)

output_options = all_of(
    click.option(
        "--residency/--no-residency",
        default=True,
        help="Measure how long blocks rest in the cache between uses.",
    ),
    click.option(
        "--trace",
        callback=file_path,
        metavar="FILE",
        help="JSONL file to write every decision to.",
    ),
    click.option(
        "--out",
        callback=file_path,
        metavar="DIR",
        help="Directory for summary.json, requests.jsonl and trace.jsonl.gz.",
    ),
    click.option(
        "--live",
        is_flag=True,
        help="Show pool and queue on stderr during the run, as `kvcore watch` shows a trace.",
    ),
    prometheus_option,
)


PRICED = ("anthropic", "openai", "gemini", "deepseek", "xai")
"""Providers of `kvcore.models.pricing`, which is imported with `--price` alone."""


def _price(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """Return the prices that the text of `--price` names; for `list` print all, and exit."""
    if value is None or ctx.resilient_parsing:
        return None
    from kvcore.models.pricing import PRICES, find_price  # noqa: PLC0415 - for prices alone

    if value == "list":
        from kvcore.report.billing import PRICE_HEADERS, price_rows  # noqa: PLC0415 - as above

        print_table(PRICE_HEADERS, price_rows(PRICES.values()), right=PRICE_HEADERS[1:6])
        ctx.exit()
    try:
        return find_price(value)
    except InputError as error:
        raise click.BadParameter(str(error), ctx, param) from None


price_option = click.option(
    "--price",
    callback=_price,
    is_eager=True,
    metavar="PRICE",
    help=f"Prices by which to bill the workload: those of {', '.join(PRICED)}, or of one of "
    "their models (`list` shows all); or figures in USD per million tokens and a TTL in "
    "seconds, such as input=3.00,cached=0.30,write=3.75,write_1h=6.00,ttl=300.",
)
"""The option that bills a workload by the prices of an API."""


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
    from kvcore.analysis.sweep.plan import executor_for  # noqa: PLC0415 - for searches alone

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


def named_workload(given: Mapping[str, Any]) -> Workload:
    """Return the workload that a command line or its configuration file names.

    Raises:
        InputError: as `find_workload`.
    """
    named = given["workload"]
    return find_workload(None if named is None else str(named), Plugins(), given["seed"])


def what_if(name: str, text: str | None = None) -> Callable[[Command], Command]:
    """Return the option `name` of a verb that runs a trace again; None: as recorded."""
    text = text or option_help(name)
    return shared(name, text=f"{WHAT_IF}{text[0].lower()}{text[1:]}", default=None)


def run_options(given: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return the options that `RunConfig` has too, except `others`, in its order.

    Beside an engine, options that are not given are those of that engine, and left out.
    """
    names = (name for name in option_names() if name in given and name not in others)
    options = {name: given[name] for name in names}
    if options.get("like") is None:
        return options
    source = click.get_current_context().get_parameter_source
    default = ParameterSource.DEFAULT
    return {name: value for name, value in options.items() if source(name) != default}


def config_of(given: dict[str, Any], mode: Mode) -> RunConfig:
    """Return the configuration of a mode from the options of a command line.

    Raises:
        InputError: an option has an invalid value.
    """
    options = run_options(given)
    if options.get("workload") is None:
        options.pop("workload", None)
    return RunConfig.of(mode, **options)


def naming(path: Path | None, from_file: set[str]) -> Callable[[str], str]:
    """Return a function from an option to the beginning of its errors: its flag, or its key."""
    return partial(_option_label, path, from_file)


def _option_label(path: Path | None, from_file: set[str], option: str) -> str:
    if option in from_file:
        return f"{path}: {option}: "
    return "WORKLOAD: " if option == "workload" else f"{flag_of(option)}: "


EXCLUSIVE = (
    ("blocks", "memory", "both say how large the pool is"),
    ("trace", "out", "both write a trace"),
)


def names_from_file(ctx: click.Context, given: dict[str, Any]) -> set[str]:
    """Return the names of the options that come from the configuration file.

    If two options exclude one another, that of the command line removes that of the file.

    Raises:
        InputError: both are given on the command line, or both in the file.
    """
    source = ctx.get_parameter_source
    from_file = {name for name in given if source(name) is ParameterSource.DEFAULT_MAP}
    for one, other, why in EXCLUSIVE:
        if given[one] is None or given[other] is None:
            continue
        weaker = {one, other} & from_file
        if len(weaker) != 1:
            both = (
                f"{given['config']}: {one} and {other}" if weaker else f"--{one} and --{other}"
            )
            msg = f"{both} {why}: give one of them"
            raise InputError(msg)
        given[weaker.pop()] = None
    return from_file


def _type(option: click.Parameter) -> Any:
    """Return the type of an option's value in TOML."""
    if isinstance(option.type, Numbers):
        return list[int]
    if isinstance(option.type, Time):
        return Any
    if option.name in option_names():
        return option_type(str(option.name))
    if option.callback in (file_path, input_file, trace_file):
        return Path
    if isinstance(option.type, click.Choice):
        return Literal[tuple(option.type.choices)]
    return {"integer": int, "float": float, "boolean": bool}.get(option.type.name, str)
