"""The options that verbs share, and the file of `--config`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource

from kvcore.cache.pool import MOST_BLOCKS
from kvcore.config import RunConfig
from kvcore.config.options import (
    find_option,
    kind_of,
    known_modes,
    mode_options,
    option_default,
    option_named,
    read_option,
    renamed,
)
from kvcore.config.parts import BLOCK_SIZE
from kvcore.config.values import convert, slo_text
from kvcore.errors import InputError
from kvcore.hookspecs import OUTPUT, Mode
from kvcore.plugins.base import FAILURES
from kvcore.plugins.manager import KINDS, Plugins
from kvcore.plugins.options import as_text
from kvcore.request import SLO
from kvcore.serving.rules import CHOICES, Rules
from kvcore.units import INT64_LIMIT, parse_whole
from kvcore.workloads import Workload, find_workload
from kvcore_cli.output import file_option, file_or_stdout, file_path, input_file, trace_file
from kvcore_cli.verb import (
    Count,
    Time,
    complete_workload,
    flag_of,
    flags_of,
    option,
    plugin_completion,
)

Command = TypeVar("Command", bound=Callable[..., Any])


def _read(
    name: str, default: Any, ctx: click.Context, param: click.Parameter, value: Any
) -> Any:
    """Return the value that `RunConfig` reads from the text of an option, or its default.

    Text that it reads as None, such as `none`, stays text: in a verb that runs a trace again,
    None means that the option is as recorded.
    """
    if value is None or value == ():
        return None
    if value == _shown(default):  # as at most starts, whose time is spent on reading it
        return default
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
    toml = list[int]
    """The type of the value in a file."""

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
            numbers = [parse_whole(piece, 0) for piece in value.split(",")]
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
    mode: str = "simulate",
    text: str | None = None,
    default: Any = ...,
    otherwise: str | None = None,
) -> Callable[[Command], Command]:
    """Return the option of a verb that is an option of a run.

    Args:
        name: its name.
        mode: mode of the default.
        text: help text; None: that of the option.
        default: default of the option; if left out, that of the mode.
        otherwise: words for a default that is None, at the end of the help text.
    """
    declaration = option_named(name)
    if default is ...:
        default = option_default(name, mode)
    text = text or declaration.help
    if otherwise is not None:
        text = f"{text}  [default: {otherwise}]"
    more: dict[str, Any] = {"help": text, "default": _shown(default)}
    more["heading"] = declaration.heading
    kind = declaration.type
    kinds = (kind, *get_args(kind))  # of `float | None` too
    literal = next((member for member in kinds if get_origin(member) is Literal), None)
    flag = flag_of(name)
    if kind is bool:
        return option(f"{flag}/--no-{flag[2:]}", **more)
    if declaration.multiple:
        more |= {"multiple": True, "default": ()}
    if declaration.metavar:
        more |= {"metavar": declaration.metavar, "type": click.UNPROCESSED}
        more |= {"callback": partial(_read, name, default)}
        if kind_of(name) in KINDS:
            more |= plugin_completion(kind_of(name), declaration.metavar)
    elif declaration.choices or literal is not None:
        more |= {"type": click.Choice(declaration.choices or get_args(literal))}
    else:
        more |= {"type": float if float in kinds else Count(-INT64_LIMIT)}
    return option(flag, **more)


def added_options(verb: str, plugins: Plugins, command: click.Command) -> list[click.Parameter]:
    """Return the options that packages add to a verb, to `simulate` those of their modes too.

    One with a flag or a name that the verb has already is left out, and becomes a fault of
    `plugins`.
    """
    modes = known_modes().values() if verb == "simulate" else ()
    added = params_of(
        [shared(name) for mode in modes if mode.chosen_by for name in mode_flags(mode)]
    )
    taken = {*_names_of([*command.params, *added])}
    kinds = [one.kind for one in signature(command.callback or print).parameters.values()]
    takes_any = Parameter.VAR_KEYWORD in kinds
    for origin, decorator in plugins.options(verb):
        try:
            params = params_of([decorator])
        except FAILURES as error:
            plugins.refuse_option(origin, f"it cannot be made: {error!r}")
            continue
        for param in params:
            if param.expose_value and not takes_any:
                plugins.refuse_option(origin, f"`kvcore {verb}` takes none of packages")
            elif twice := sorted(taken.intersection(_names_of([param]))):
                plugins.refuse_option(origin, f"`kvcore {verb}` has {twice[0]} already")
            else:
                taken.update(_names_of([param]))
                added.append(param)
    return added


def _names_of(params: Sequence[click.Parameter]) -> list[str]:
    return [*flags_of(params), *(str(param.name) for param in params)]


def mode_flags(mode: Mode) -> list[str]:
    """Return the names of the options that a mode adds to a verb."""
    return [name for name, declaration in mode_options(mode).items() if declaration.heading]


def params_of(decorators: Iterable[Callable[[Any], Any]]) -> list[click.Parameter]:
    """Return the options that decorators such as `click.option` would give a command."""
    bare = click.Command(None)
    for decorate in decorators:
        decorate(bare)
    return bare.params


def all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that gives a command several options, in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(options):
            command = decorator(command)
        return command

    return decorate


poolwide_options = all_of(
    *map(shared, ("eviction", "scheduler", "prefix")),
    shared("retention", otherwise="none"),
    shared("latency"),
    shared("drafter", otherwise="none"),
)
"""The policies of a server without tiers below its pool."""

policy_options = all_of(poolwide_options, shared("tier"))

server_options = all_of(
    *map(shared, ("model", "device", "tensor_parallel", "codec", "weights_dtype")),
    shared("blocks", otherwise="as many as fit"),
    shared("memory"),
)
"""The options of a simulated server: its model, its GPUs, and the pool on them."""


def _former(name: str) -> Callable[[Command], Command]:
    """Return the flag that a choice of rules had in the release before: no help page has it."""
    flag = flag_of(name)
    if type(getattr(Rules(), name)) is bool:
        return option(f"{flag}/--no-{flag[2:]}", default=None, hidden=True)
    return option(flag, hidden=True)


batching_options = all_of(
    shared("block_size", otherwise=f"{BLOCK_SIZE}"),
    *map(shared, ("max_tokens", "max_seqs", "steps", "chunked", "watermark", "max_model_len")),
    shared("like"),
    *map(_former, CHOICES),
)
"""The limits of a step, and the rules by which engines differ."""


def load_config(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Make the values in the file at `value` defaults of the command's other options."""
    path = file_path(ctx, param, value)  # no pipe: its paths are relative to the file
    if path is not None:
        from kvcore.config.files import read_toml  # noqa: PLC0415 - for files alone

        options = toml_types(ctx.command)
        values = read_toml(path, {key: kind for key, (_, kind) in options.items()})
        ctx.default_map = {options[key][0]: value for key, value in values.items()}
    return path


def toml_types(command: click.Command) -> dict[str, tuple[str, Any]]:
    """Return the keys of a command's configuration file: its parameters, and their types."""
    return {
        param.opts[0].lstrip("-").replace("-", "_"): (str(param.name), _type(param))
        for param in command.params
        if param.callback is not load_config
        and (find_option(str(param.name)) or not getattr(param, "multiple", False))
    }


group_options = all_of(shared("disable_hybrid_kv_cache_manager"), shared("checkpoint"))
"""The options of cache groups."""

config_option = click.option(
    "--config",
    callback=load_config,
    is_eager=True,
    metavar="FILE",
    help="TOML file with options; those on the command line win.",
)
"""The `--config` option. It has the other options of its command as keys."""

part_options = all_of(shared("limit", otherwise="all"), shared("window"))
"""The options of the part of a workload that is read."""

traffic_options = all_of(*map(shared, ("rate_scale", "slo", "seed")), config_option)

output_options = all_of(
    option(
        "--residency/--no-residency",
        heading=OUTPUT,
        default=True,
        help="Measure how long blocks rest in the cache between uses.",
    ),
    file_option("--trace", help="JSONL file to write every decision to."),
    file_option(
        "--out",
        metavar="DIR",
        help="Directory for summary.json, requests.jsonl and trace.jsonl.gz.",
    ),
)


def named_workload(given: Mapping[str, Any]) -> Workload:
    """Return the workload that a command line or its configuration file names.

    Raises:
        InputError: as `find_workload`.
    """
    named = given["workload"]
    return find_workload(None if named is None else str(named), Plugins(), given["seed"])


def run_options(given: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return the options that `RunConfig` has too, except `others`.

    Beside an engine, options that are not given are those of that engine, and left out.
    """
    names = (name for name in given if name not in others and find_option(name) is not None)
    options = {name: given[name] for name in names}
    like = options.get("like")
    if former := {name: given[name] for name in CHOICES if given.get(name) is not None}:
        options["like"] = renamed({"like": like} | former)["like"]
    if like is None:
        return options
    source = click.get_current_context().get_parameter_source
    default = ParameterSource.DEFAULT
    return {name: value for name, value in options.items() if source(name) != default}


def config_of(given: dict[str, Any], mode: str, *others: str) -> RunConfig:
    """Return the configuration of a mode from the options of a command line except `others`.

    Raises:
        InputError: an option has an invalid value.
    """
    options = run_options(given, *others)
    if options.get("workload") is None:
        options.pop("workload", None)
    return RunConfig(mode, **options)


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
"""Pairs of options that exclude one another, and why."""


def names_from_file(ctx: click.Context, given: dict[str, Any]) -> set[str]:
    """Return the names of the options that come from the configuration file.

    If two options exclude one another, that of the command line removes that of the file.

    Raises:
        InputError: both are given on the command line, or both in the file.
    """
    source = ctx.get_parameter_source
    from_file = {name for name in given if source(name) is ParameterSource.DEFAULT_MAP}
    for one, other, why in EXCLUSIVE:
        if given.get(one) is None or given.get(other) is None:
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


def _flag_value(value: Any, given: object) -> Any:
    """Return the value that a flag stands for, if it is given as true."""
    return value if convert(given, bool) else None


def _type(param: click.Parameter) -> Any:
    """Return the type of an option's value in TOML."""
    if (known := getattr(param.type, "toml", None)) is not None:
        return known
    kinds = {"integer": int, "float": float, "boolean": bool}
    kind: Any = kinds.get(param.type.name, str)
    if isinstance(param, click.Option) and param.is_flag and kind is not bool:
        kind = Annotated[bool, partial(_flag_value, param.flag_value)]
    if isinstance(param.type, Time) or (param.name in CHOICES and kind is not bool):
        return Any
    if declaration := find_option(str(param.name)):
        return declaration.type
    if param.callback in (file_path, file_or_stdout, input_file, trace_file):
        return Path
    if isinstance(param.type, click.Choice):
        return Literal[tuple(param.type.choices)]
    return kind
