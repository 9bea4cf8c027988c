"""Versions and entry points of distributions, as in `importlib.metadata`.

That module takes 20 ms to import, and 20 ms to read all distributions. If `sys.path` has
directories alone, their lists of files give the same results, and are cached until they
change; otherwise `importlib.metadata` is used.
"""

# Paths are plain strings here, since there may be hundreds.
# ruff: noqa: PTH100, PTH113, PTH116, PTH118, PTH122, PTH123, PTH208

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import cache, cached_property, reduce
from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Installed:
    """An installed distribution, whose metadata are in the directory `folder`.

    Other attributes are read from `importlib.metadata`.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @cached_property
    def name(self) -> str:
        """The name in its metadata."""
        return self._field("name")

    @cached_property
    def version(self) -> str:
        """The version in its metadata."""
        return self._field("version")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the `importlib.metadata.Distribution` in the same folder."""
        from importlib.metadata import Distribution  # noqa: PLC0415 - see above

        return getattr(Distribution.at(self.folder), name)

    def _field(self, name: str) -> str:
        """Return a field of the metadata."""
        text = _text(self.folder, "METADATA") or _text(self.folder, "PKG-INFO")
        fields = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
        found = [value.strip() for key, _, value in fields if key.lower() == name]
        return (found or [self.metadata[name]])[0]

    def points(self, group: str) -> list[Point]:
        """Return the entry points of a group."""
        points, section = [], ""
        text = _text(self.folder, "entry_points.txt")
        for line in map(str.strip, text.splitlines() if group in text else ()):
            if line.startswith("[") and line.endswith("]"):
                section = line.strip("[]")
            elif section == group and line and not line.startswith("#"):
                name, _, value = line.partition("=")
                points.append(Point(name.strip(), value.strip(), group, self))
        return points


class Point:
    """An entry point, `package.module` or `package.module:name`, of an installed distribution.

    Attributes:
        name, value, group: the fields of the entry point.
        dist: the distribution.
    """

    def __init__(self, name: str, value: str, group: str, dist: Installed) -> None:
        self.name = name
        self.value = value
        self.group = group
        self.dist = dist
        self.module, _, self._names = value.partition(":")

    @property
    def is_dotted(self) -> bool:
        """Whether the value consists of dotted names, without extras or spaces."""
        return all(map(str.isidentifier, self.value.replace(":", ".", 1).split(".")))

    def load(self) -> Any:
        """Import the object that the value names, and return it."""
        module = import_module(self.module)
        return reduce(getattr, filter(None, self._names.split(".")), module)


def entry_points(group: str, of: str | None = None) -> list[EntryPoint | Point]:
    """Return the entry points of a group, in the first distribution of each name on `sys.path`.

    `of` is the name of a distribution to read alone; None: all.
    """
    installed = _installed()
    if installed is not None:
        wanted = installed if of is None else {_normal(of)} & installed.keys()
        points = [point for name in wanted for point in installed[name].points(group)]
        if all(point.is_dotted for point in points):
            return [*points]
    from importlib import metadata  # noqa: PLC0415 - see above

    if of is None:
        return list(metadata.entry_points(group=group))
    with suppress(metadata.PackageNotFoundError):
        return list(metadata.distribution(of).entry_points.select(group=group))
    return []


def version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    installed = _installed()
    if installed is not None:
        name = _normal(name)
        return installed[name].version if name in installed else None
    from importlib import metadata  # noqa: PLC0415 - see above

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _installed() -> dict[str, Installed] | None:
    """Return the first distribution of each normal name on `sys.path`.

    None if there may be distributions elsewhere: in archives, or behind a hook.
    """
    hooks = (finder for finder in sys.meta_path if hasattr(finder, "find_distributions"))
    if any(hook is not PathFinder for hook in hooks):
        return None
    first: dict[str, Installed] = {}
    for entry in map(os.fsdecode, sys.path):
        if entry.lower().endswith(".egg") or os.path.isfile(entry):
            return None
        with suppress(OSError):
            full = os.path.abspath(entry)
            for name, folder in _folders(full, os.stat(full).st_mtime_ns):
                first.setdefault(name, Installed(folder))
    return first


@cache
def _folders(parent: str, changed_ns: int) -> list[tuple[str, str]]:
    """Return the normal names of the distributions in a directory, and their directories."""
    del changed_ns  # for the cache
    return [
        (_normal(os.path.splitext(entry)[0].partition("-")[0]), os.path.join(parent, entry))
        for entry in os.listdir(parent)
        if entry.lower().endswith((".dist-info", ".egg-info"))
    ]


def _normal(name: str) -> str:
    """Return a name in the form that is compared: lower case, `_` for runs of `-`, `_`, `.`."""
    return re.sub(r"[-_.]+", "_", name).lower()


def _text(folder: str, name: str) -> str:
    """Return the text of a file, or an empty text if there is no such file."""
    path = os.path.join(folder, name)
    with suppress(OSError):
        return _read(path, os.stat(path).st_mtime_ns)
    return ""


@cache
def _read(path: str, changed_ns: int) -> str:
    """Return the text of a file, which is read again after it has changed."""
    del changed_ns  # for the cache
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
