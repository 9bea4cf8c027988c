"""Options that are more than text or a number: a plugin, a size, an SLO."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import attrs
import click
from click.core import ParameterSource

from kvcore.cli.output import file_path, prometheus_option
from kvcore.errors import InputError, KvcoreError
from kvcore.files import refusal
from kvcore.models.catalogue import MODELS
from kvcore.plugins.manager import KINDS, Plugins
from kvcore.plugins.options import Spec, as_text, nearest, parse, takes_path
from kvcore.request import SLO
from kvcore.serving import Batching
from kvcore.units import parse_bytes, parse_seconds

EXPECTATIONS = ("ttft", "tpot", "deadline")
"""What an SLO may expect, in seconds."""


def read_plugin(text: str) -> Spec:
    """Read one plugin with its options, such as `lfu:half_life=300`.

    Raises:
        InputError: none, or several.
    """
    specs = parse(text)
    if len(specs) != 1:
        msg = f"{text!r} names {len(specs)} plugins where one is needed"
        raise InputError(msg)
    return specs[0]


def read_slo(text: str) -> SLO:
    """Read what clients expect, such as `ttft=30,tpot=0.1`; `none` is nothing.

    Raises:
        InputError: another name than those of `EXPECTATIONS`, or no seconds above 0.
    """
    if text == "none":
        return SLO()
    if "=" not in text.partition(",")[0]:
        msg = f"{text!r} is no SLO; write one such as ttft=30,tpot=0.1, or none"
        raise InputError(msg)
    expected = {}
    for name, seconds in read_plugin(f"slo:{text}").options.items():
        if name not in EXPECTATIONS:
            known = ", ".join(EXPECTATIONS)
            msg = f"an SLO has no {name!r}{nearest(name, EXPECTATIONS)}; it may have {known}"
            raise InputError(msg)
        expected[name] = parse_seconds(seconds)
    return SLO(**expected)


def _reading(read: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a callback that reads the text of an option; what is read already stays."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return read(value) if isinstance(value, str) else value
        except InputError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return callback


_option = partial(click.option, type=click.UNPROCESSED)


plugin_option = partial(_option, callback=_reading(read_plugin), metavar="PLUGIN")


size_option = partial(_option, callback=_reading(parse_bytes), metavar="SIZE")


slo_option = partial(_option, callback=_reading(read_slo), metavar="SLO")


Value: TypeAlias = str | Spec


GROUPS = {
    "batching": ("max_tokens", "max_seqs", "chunked", "steps", "watermark"),
    "slo": EXPECTATIONS,
}
"""Tables besides those of plugins: options that may be written together, parts of one."""


def load_config(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Take what the file at `value` gives as defaults of the command's other options."""
    path = file_path(ctx, param, value)
    if path is not None:
        options = {
            each.opts[0].lstrip("-").replace("-", "_"): each
            for each in ctx.command.params
            if each is not param and not getattr(each, "multiple", False)
        }
        ctx.default_map = ConfigFile(path, options).defaults(ctx)
    return path


config_option = click.option(
    "--config",
    callback=load_config,
    is_eager=True,
    metavar="FILE",
    help="Take options from a TOML file; those given here win.",
)
"""The `--config` option. Further options of the command need no mention of it."""


@attrs.frozen
class ConfigFile:
    """Options in TOML.

    A key is the name of an option without its dashes, `-` or `_` within it. A plugin is
    text, or a table of its name and options. Paths are relative to the file.

    Attributes:
        path: the file.
        options: what it may set, by key.
    """

    path: Path
    options: Mapping[str, click.Parameter]

    def defaults(self, ctx: click.Context) -> dict[str, Value]:
        """Return the values of options, by parameter, each tried out.

        Raises:
            InputError: no such file, no TOML, an unknown key, or a value that its option
                does not take; names the file and the key.
        """
        try:
            return self._defaults(ctx)
        except InputError as error:
            msg = f"{self.path}: {error}"
            raise InputError(msg) from error

    def _defaults(self, ctx: click.Context) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for key, value in self._entries():
            option = _known(key, self.options, "there is no option")
            if option.name in found:
                msg = f"{key!r} is given twice"
                raise InputError(msg)
            found[option.name] = self._tried(ctx, key, option, value)
        return found

    def _entries(self) -> Iterator[tuple[str, Any]]:
        """Yield keys and values, those of the table `batching` as if they stood above it."""
        for key, value in _entries_of(self._document()):
            if key == "batching" and isinstance(value, dict):
                yield from _group(key, value)
            else:
                yield key, value

    def _document(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.path.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            msg = f"is not TOML: {error}"
            raise InputError(msg) from error
        except OSError as error:
            msg = f"cannot be read: {refusal(self.path, error)}"
            raise InputError(msg) from error

    def _tried(
        self, ctx: click.Context, key: str, option: click.Parameter, value: Any
    ) -> Value:
        """Return a value as the command line would give it, after seeing that it is taken."""
        try:
            given = self._value(key, option, value)
            option.process_value(ctx, given)
        except (KvcoreError, click.BadParameter) as error:
            reason = error.message if isinstance(error, click.BadParameter) else error
            msg = f"{key}: {reason}"
            raise InputError(msg) from error
        return given

    def _value(self, key: str, option: click.Parameter, value: Any) -> Value:
        if key in KINDS:
            return self._plugin(key, value)
        if key == "slo" and isinstance(value, dict):
            return ",".join(f"{name}={_text(part)}" for name, part in _group(key, value))
        text = _text(value)
        is_path = option.callback is file_path or (key == "model" and self._is_file(text))
        return self._moved(text) if is_path else text

    def _moved(self, path: str) -> str:
        """Return a path as seen from the working directory."""
        return str(self.path.parent / path) if path else path

    def _is_file(self, model: str) -> bool:
        """Say whether a model is that of a file beside this one, and no well-known one."""
        return model not in MODELS and (self.path.parent / model).exists()

    def _plugin(self, kind: str, value: Any) -> Value:
        """Return a plugin whose paths are moved; or, of a workload, such a path itself."""
        plugins = Plugins()
        if isinstance(value, dict):
            options = {option: _text(each) for option, each in value.items()}
            if "name" not in options:
                msg = f"the table needs a name, such as name = {plugins.names(kind)[0]!r}"
                raise InputError(msg)
            spec = Spec(options.pop("name"), options)
        else:
            text = _text(value)
            if kind == "workload" and text.partition(":")[0].strip() not in plugins.names(kind):
                return self._moved(text)
            spec = read_plugin(text)
        cls = plugins.get(kind, spec.name)
        moved = {
            option: self._moved(text) if takes_path(cls, option) else text
            for option, text in spec.options.items()
        }
        return Spec(spec.name, moved)


def _entries_of(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key.replace("-", "_"), value) for key, value in table.items())


def _group(name: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of one of `GROUPS`, which has no others."""
    for key, value in _entries_of(table):
        _known(key, dict.fromkeys(GROUPS[name]), f"[{name}] has no key")
        yield key, value


def _known(key: str, names: Mapping[str, Any], complaint: str) -> Any:
    if key not in names:
        known = ", ".join(sorted(names))
        msg = f"{complaint} {key!r}{nearest(key, names)}. There are: {known}"
        raise InputError(msg)
    return names[key]


def _text(value: Any) -> str:
    """Return a value of TOML as the command line would take it."""
    if isinstance(value, (str, bool, int, float)):
        return as_text(value)
    kind = {"dict": "table", "list": "list"}.get(type(value).__name__, "date or time")
    msg = f"expected text, a number, true or false, not a {kind}"
    raise InputError(msg)


Command = TypeVar("Command", bound=Callable[..., Any])


SLO_OPTION = "ttft=30,tpot=0.1"
"""What the authors of the bundled trace ask of their own system: Qin et al., "Mooncake: a
KVCache-centric disaggregated architecture for LLM serving", 2024, on real workloads."""


CAPS = Batching()


def _all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that gives a command several options, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


policy_options = _all_of(
    plugin_option("--eviction", default="lru", help="Who dies when the pool is full."),
    plugin_option("--scheduler", default="fcfs", help="Who runs in the next step."),
    plugin_option("--prefix", default="radix", help="What can be reused."),
    plugin_option("--retention", help="What a running sequence forgets.  [default: nothing]"),
    plugin_option("--latency", default="roofline", help="How long a step takes."),
)


batching_options = _all_of(
    click.option("--block-size", type=int, default=16, help="Tokens in a block."),
    click.option("--max-tokens", type=int, default=CAPS.max_tokens, help="Tokens of a step."),
    click.option("--max-seqs", type=int, default=CAPS.max_seqs, help="Sequences of a step."),
    click.option(
        "--steps",
        type=click.Choice(["mixed", "prefill-first"]),
        default=CAPS.steps,
        help="Prefill and decode together, or apart.",
    ),
    click.option(
        "--chunked/--no-chunked",
        default=CAPS.chunked,
        help="Prefill a prompt over several steps.",
    ),
    click.option(
        "--watermark",
        type=float,
        default=CAPS.watermark,
        help="Share of blocks kept for growth.",
    ),
)


traffic_options = _all_of(
    click.option("--rate-scale", type=float, default=1.0, help="Times as fast as recorded."),
    slo_option("--slo", default=SLO_OPTION, help="Seconds, or `none`."),
    click.option("--seed", type=int, default=0, help="Of plugins that draw random numbers."),
    config_option,
)


output_options = _all_of(
    click.option(
        "--residency/--no-residency", default=True, help="Measure how long blocks rest."
    ),
    click.option(
        "--trace", callback=file_path, metavar="FILE", help="Write every decision, as JSONL."
    ),
    click.option(
        "--out",
        callback=file_path,
        metavar="DIR",
        help="Write summary.json, requests.jsonl and trace.jsonl.gz.",
    ),
    prometheus_option,
)


def names_from_file(ctx: click.Context, given: dict[str, Any]) -> set[str]:
    """Return the names of the options that come from the configuration file."""
    source = ctx.get_parameter_source
    return {name for name in given if source(name) is ParameterSource.DEFAULT_MAP}


def one_of(given: dict[str, Any], one: str, other: str, why: str, from_file: set[str]) -> None:
    """Refuse two options that exclude one another, unless one of them is in the file alone.

    Raises:
        InputError: both are given in the same place.
    """
    if given[one] is None or given[other] is None:
        return
    weaker = {one, other} & from_file
    if len(weaker) != 1:
        msg = f"--{one} and --{other} {why}: give one of them"
        raise InputError(msg)
    given[weaker.pop()] = None
