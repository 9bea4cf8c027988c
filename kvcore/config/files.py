"""Options from TOML files: keys, tables, lists, and paths relative to the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from kvcore.config.options import (
    check_names,
    earlier_names,
    find_option,
    kind_of,
    option_named,
    option_names,
    read_option,
    renamed,
)
from kvcore.config.values import as_bytes, convert, read_plugin, shown
from kvcore.errors import InputError, PluginError
from kvcore.files import unreadable_reason
from kvcore.models.catalogue import MODELS
from kvcore.plugins.manager import KINDS, installed
from kvcore.plugins.options import Spec, takes_path
from kvcore.serving.rules import CHOICES
from kvcore.serving.scheduler import LIMITS
from kvcore.trace.fields import EXPECTATIONS
from kvcore.untrusted import load_toml
from kvcore.workloads.selection import with_path

GROUPS: Mapping[str, tuple[str, ...]] = {
    "batching": (*LIMITS, *CHOICES),
    "slo": EXPECTATIONS,
}
"""Tables besides those of plugins: options that may be written together, parts of one."""


def read_toml(
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    *,
    lists: bool = False,
) -> dict[str, Any]:
    """Return the options that a TOML file gives, by name, as their types have them.

    A key is the name of an option, with `-` or `_` in it. A plugin is text, or a table of
    its name and options; tiers may be a list of them. Paths are relative to the file.

    Args:
        path: path of the file.
        options: the types of the options that the file may give; None: those of
            `RunConfig`.
        lists: whether an option may have a list of values; all are tuples then.

    Raises:
        InputError: no such file, no TOML, an unknown key, or a value that its option cannot
            have; names the file and the key.
        PluginError: a plugin, or a package that may have the key, is broken or outdated.
    """
    if options is None:
        options = {name: option_named(name).type for name in option_names()}
        options |= dict.fromkeys(CHOICES, Any)  # keys of the release before
    file = _ConfigFile(Path(path), options, lists)
    try:
        return file.options()
    except (InputError, PluginError) as error:
        msg = f"{path}: {error}"
        raise type(error)(msg) from error


class _ConfigFile(NamedTuple):
    path: Path
    types: Mapping[str, Any]
    lists: bool

    def options(self) -> dict[str, Any]:
        """Return the options by name."""
        read: dict[str, Any] = {}
        for key, value in self._entries():
            (name,) = (
                renamed({key: value}) if earlier_names().get(key) in self.types else (key,)
            )
            check_names([name], self.types)
            if name in read:
                msg = f"{key!r} is given twice"
                raise InputError(msg)
            read[name] = self._values(name, value) if self.lists else self._value(name, value)
        return read

    def _entries(self) -> Iterator[tuple[str, Any]]:
        """Yield keys and values, with those of the table `batching` at the top level."""
        for key, value in _entries_of(self._document()):
            if key == "batching" and isinstance(value, dict):
                yield from _group(key, value)
            else:
                yield key, value

    def _document(self) -> dict[str, Any]:
        try:
            return load_toml(self.path)
        except ValueError as error:
            msg = f"is not TOML: {error}"
            raise InputError(msg) from error
        except OSError as error:
            msg = f"cannot be read: {unreadable_reason(self.path, error)}"
            raise InputError(msg) from error

    def _values(self, name: str, value: Any) -> tuple[Any, ...]:
        values = value if isinstance(value, list) else [value]
        return tuple(self._value(name, entry) for entry in values)

    def _value(self, name: str, value: Any) -> Any:
        if name == "slo" and isinstance(value, dict):
            value = dict(_group(name, value))
        kind = self.types[name]
        if isinstance(value, int) and _reader(kind) is as_bytes:
            value = shown(value)  # in a file a size must have a unit
        if kind == list[int] and _is_list(value):
            return value if isinstance(value, str) else self._converted(name, value)
        if find_option(name) is not None:
            return self._placed(name, read_option(name, value))
        converted = self._converted(name, value)
        return self.path.parent / converted if isinstance(converted, Path) else converted

    def _converted(self, name: str, value: Any) -> Any:
        try:
            return convert(value, self.types[name])
        except InputError as error:
            msg = f"{name}: {error}"
            raise InputError(msg) from error

    def _placed(self, name: str, value: Any) -> Any:
        """Return a value with its paths as seen from the working directory."""
        if name == "tier":
            return tuple(self._placed_plugin(name, tier) for tier in value)
        if kind_of(name) in KINDS:
            return self._placed_plugin(kind_of(name), value)
        if isinstance(value, tuple) and value and isinstance(value[0], Mapping):
            tables = (table.items() for table in value)  # of options
            return tuple({key: self._placed(key, entry) for key, entry in t} for t in tables)
        # A name of the catalogue goes before a file of that name.
        if name == "model" and value and isinstance(value, str) and value not in MODELS:
            path = self.path.parent / value
            return str(path) if path.exists() else value
        return value

    def _placed_plugin(self, kind: str, value: Any) -> Any:
        plugins = installed()
        if isinstance(value, str):  # a workload: a plugin, or else a file
            if value.partition(":")[0].strip() not in plugins.names(kind):
                return str(self.path.parent / value) if value else value
            cls = plugins.get(kind, value.partition(":")[0].strip())
            value = read_plugin(with_path(value, cls) if kind == "workload" else value)
        if not isinstance(value, Spec) or value.name not in plugins.names(kind):
            return value
        cls = plugins.get(kind, value.name)
        placed = {
            option: str(self.path.parent / text) if text and takes_path(cls, option) else text
            for option, text in value.options.items()
        }
        return Spec(value.name, placed)


def _is_list(value: Any) -> bool:
    """Return True for text, and for a list without tables: numbers of several runs."""
    is_list = isinstance(value, list) and not any(isinstance(entry, dict) for entry in value)
    return is_list or isinstance(value, str)


def _reader(kind: Any) -> Any:
    """Return the function that reads an annotated type, which may be None besides."""
    for member in (kind, *get_args(kind)):
        if get_origin(member) is Annotated:
            return get_args(member)[1]
    return None


def _entries_of(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key.replace("-", "_"), value) for key, value in table.items())


def _group(name: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of one of `GROUPS`, which has no others."""
    for key, value in _entries_of(table):
        check_names([key], GROUPS[name], f"[{name}] has no key")
        yield key, value
