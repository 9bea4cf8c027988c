"""Options from TOML files: keys, tables, lists, and paths relative to the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from kvcore.config.options import (
    Option,
    check_names,
    earlier_names,
    find_option,
    kind_of,
    option_named,
    option_names,
    renamed,
)
from kvcore.config.values import as_bytes, read_plugin, shown
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
    document = read_tables(Path(path))
    try:
        entries = _entries(document, options)
        check_names(entries, options)
        for name, value in entries.items():
            values = value if lists and isinstance(value, list) else [value]
            read = (_read(name, each, options[name]) for each in values)
            placed = tuple(_placed(name, each, Path(path).parent) for each in read)
            entries[name] = placed if lists else placed[0]
    except (InputError, PluginError) as error:
        msg = f"{path}: {error}"
        raise type(error)(msg) from error
    return entries


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file of options.

    Raises:
        InputError: it cannot be read, or is not TOML; names the file.
    """
    try:
        return load_toml(path)
    except ValueError as error:
        msg = f"{path}: is not TOML: {error}"
        raise InputError(msg) from error
    except OSError as error:
        msg = f"{path}: cannot be read: {unreadable_reason(path, error)}"
        raise InputError(msg) from error


def _entries(document: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file gives, by present names; the table `batching` is several options."""
    entries: dict[str, Any] = {}
    for key, value in _flat(document):
        entry = {key: value}
        if earlier_names().get(key) in types:
            entry = renamed(entry)
        if entry.keys() & entries.keys():
            msg = f"{key!r} is given twice"
            raise InputError(msg)
        entries |= entry
    return entries


def _flat(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in _underscored(document):
        if key == "batching" and isinstance(value, dict):
            yield from _group(key, value)
        else:
            yield key, value


def _group(name: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of one of `GROUPS`, which has no others."""
    for key, value in _underscored(table):
        check_names([key], GROUPS[name], f"[{name}] has no key")
        yield key, value


def _underscored(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key.replace("-", "_"), value) for key, value in table.items())


def _read(name: str, value: Any, kind: Any) -> Any:
    """Return the value of a key as its option has it."""
    if name == "slo" and isinstance(value, dict):
        value = dict(_group(name, value))
    if isinstance(value, int) and _reader(kind) is as_bytes:
        value = shown(value)  # in a file a size must have a unit
    option = find_option(name)
    if kind == list[int]:  # the numbers of several runs
        if isinstance(value, str):
            return value  # such as 1000,3000, which the command line reads
        if isinstance(value, list) and not any(isinstance(entry, dict) for entry in value):
            option = None
    option = option or Option(None, "", "", name=name, type=kind)  # of the command alone
    return option.read(value)


def _reader(kind: Any) -> Any:
    """Return the function that reads an annotated type, which may be None besides."""
    for member in (kind, *get_args(kind)):
        if get_origin(member) is Annotated:
            return get_args(member)[1]
    return None


def _placed(name: str, value: Any, folder: Path) -> Any:
    """Return a value with its paths as seen from the working directory."""
    if isinstance(value, Path):
        return folder / value
    if type(value) is tuple:
        return tuple(_placed(name, entry, folder) for entry in value)
    if isinstance(value, Mapping):  # the options of some replicas
        return {key: _placed(key, entry, folder) for key, entry in value.items()}
    # A name of the catalogue goes before a file of that name.
    if name == "model" and value and isinstance(value, str) and value not in MODELS:
        path = folder / value
        return str(path) if path.exists() else value
    return _placed_plugin(kind_of(name), value, folder) if kind_of(name) in KINDS else value


def _placed_plugin(kind: str, value: Any, folder: Path) -> Any:
    plugins = installed()
    if isinstance(value, str):  # a workload: a plugin, or else a file
        if (name := value.partition(":")[0].strip()) not in plugins.names(kind):
            return value if value in ("", "-") else str(folder / value)
        value = read_plugin(with_path(value, plugins.get(kind, name)))
    if not isinstance(value, Spec):
        return value
    file, py, _ = value.name.partition(".py")
    if py and (folder / f"{file}.py").is_file():
        value = Spec(str(folder / value.name), value.options)
    elif value.name not in plugins.names(kind):
        return value
    cls = plugins.get(kind, value.name)
    placed = {
        option: str(folder / text) if text and takes_path(cls, option) else text
        for option, text in value.options.items()
    }
    return Spec(value.name, placed)
