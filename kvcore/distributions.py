"""Versions and entry points of installed distributions, as in `importlib.metadata`.

That module takes 20 ms to import, and 20 ms to read all distributions. If `sys.path` has
directories alone, their lists of files give the same results, and are cached until they
change; otherwise `importlib.metadata` is used.
"""

# Paths are plain strings here, since there may be hundreds.
# ruff: noqa: PTH100, PTH113, PTH116, PTH118, PTH122, PTH123, PTH208

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, cached_property, reduce
from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

FOLDERS = (".dist-info", ".egg-info")
"""Suffixes of the directories with the metadata of a distribution."""


class Installed:
    """An installed distribution. Other attributes are read from `importlib.metadata`.

    Attributes:
        folder: the directory with its metadata.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the `importlib.metadata.Distribution` in the same folder."""
        from importlib.metadata import Distribution  # noqa: PLC0415 - see above

        return getattr(Distribution.at(self.folder), name)

    @cached_property
    def name(self) -> str:
        """The name in its metadata."""
        return self._header("name")

    @cached_property
    def version(self) -> str:
        """The version."""
        return self._header("version")

    def points(self, group: str) -> list[EntryPoint | Point]:
        """Return the entry points of a group."""
        found: list[Point] = []
        section = None
        for line in map(str.strip, _text(self.folder, "entry_points.txt").splitlines()):
            if line.startswith("[") and line.endswith("]"):
                section = line.strip("[]")
            elif line and not line.startswith("#") and section == group:
                name, _, value = map(str.strip, line.partition("="))
                found.append(Point(name, value, group, self))
        if all(point.plain for point in found):
            return [*found]
        return list(self.__getattr__("entry_points").select(group=group))

    def _header(self, name: str) -> str:
        text = _text(self.folder, "METADATA") or _text(self.folder, "PKG-INFO")
        for line in text.splitlines():
            if not line:
                break
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip()
        return str(self.__getattr__(name))


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
    def plain(self) -> bool:
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
    if not _only_directories():
        from importlib import metadata  # noqa: PLC0415 - see above

        if of is None:
            return list(metadata.entry_points(group=group))
        with suppress(metadata.PackageNotFoundError):
            return list(metadata.distribution(of).entry_points.select(group=group))
        return []
    first: dict[str, str] = {}
    for name, folder in _folders():
        first.setdefault(name, folder)
    wanted = first if of is None else {_normal(of)} & first.keys()
    return [
        point
        for name in wanted
        if f"[{group}]" in _text(first[name], "entry_points.txt")
        for point in Installed(first[name]).points(group)
    ]


def version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    if not _only_directories():
        from importlib import metadata  # noqa: PLC0415 - see above

        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
        return None
    wanted = _normal(name)
    found = next((folder for each, folder in _folders() if each == wanted), None)
    return None if found is None else Installed(found).version


def _folders() -> Iterator[tuple[str, str]]:
    """Yield the normal name of each distribution on `sys.path`, and its directory."""
    for place in sys.path:
        with suppress(OSError):
            full = os.path.abspath(place)
            yield from _described(full, os.stat(full).st_mtime_ns)


@cache
def _described(place: str, changed_ns: int) -> list[tuple[str, str]]:
    """Return the same for one directory, which is read again after it has changed."""
    del changed_ns
    found = ((os.path.splitext(entry), entry) for entry in os.listdir(place))
    return [
        (_normal(stem.partition("-")[0]), os.path.join(place, entry))
        for (stem, end), entry in found
        if end.lower() in FOLDERS
    ]


def _only_directories() -> bool:
    """Return False if there may be distributions elsewhere: in archives, or behind a hook."""
    hooks = (finder for finder in sys.meta_path if hasattr(finder, "find_distributions"))
    return all(hook is PathFinder for hook in hooks) and not any(
        place.lower().endswith(".egg") or os.path.isfile(place) for place in sys.path
    )


def _normal(name: str) -> str:
    """Return a name in the form that is compared: lower case, `_` for runs of `-`, `_`, `.`."""
    name = name.lower().replace("-", "_").replace(".", "_")
    while "__" in name:
        name = name.replace("__", "_")
    return name


def _text(folder: str, name: str) -> str:
    """Return the text of a file, or an empty text if there is no such file."""
    path = os.path.join(folder, name)
    try:
        return _read(path, os.stat(path).st_mtime_ns)
    except OSError:
        return ""


@cache
def _read(path: str, changed_ns: int) -> str:
    """Return the text of a file, which is read again after it has changed."""
    del changed_ns
    with open(path, encoding="utf-8") as file:
        return file.read()
