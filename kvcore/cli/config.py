"""`--config run.toml`: the options of a command from a file; those of the command line win."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import click

from kvcore.catalogue import MODELS
from kvcore.cli.output import file_path
from kvcore.cli.values import EXPECTATIONS, read_plugin
from kvcore.errors import InputError, KvcoreError
from kvcore.files import refusal
from kvcore.plugins import KINDS, Plugins
from kvcore.specs import Spec, as_text, nearest, takes_path

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
