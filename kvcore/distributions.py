"""What is installed: versions and entry points, as `importlib.metadata` finds them.

That module takes 20 ms to import, and as long to look at all that is installed. Where nothing
but directories is on `sys.path`, their lists of files say the same, and are kept until they
change; else it is asked.
"""

# Paths are texts here: there may be hundreds.
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
"""How the names of directories end that describe what is installed beside them."""


class Installed:
    """An installed distribution. What it lacks, that of `importlib.metadata` has.

    Attributes:
        folder: the directory that describes it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that `importlib.metadata` gives a distribution."""
        from importlib.metadata import Distribution  # noqa: PLC0415 - see above

        return getattr(Distribution.at(self.folder), name)

    @cached_property
    def name(self) -> str:
        """The name, as its metadata has it."""
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
        name, value, group: as the distribution has them.
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
        """Whether the value is dotted names alone, without extras or spaces."""
        return all(map(str.isidentifier, self.value.replace(":", ".", 1).split(".")))

    def load(self) -> Any:
        """Import what the value names, and return it."""
        module = import_module(self.module)
        return reduce(getattr, filter(None, self._names.split(".")), module)


def entry_points(group: str, of: str | None = None) -> list[EntryPoint | Point]:
    """Return the entry points of a group: of each distribution that is first of its name.

    `of` is the name of the one distribution that is asked for; None: of all.
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
    """Return the same of one place, which is read anew when it has changed."""
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
    """Return a name as it is compared: in lower case, `_` for any run of `-`, `_` and `.`."""
    name = name.lower().replace("-", "_").replace(".", "_")
    while "__" in name:
        name = name.replace("__", "_")
    return name


def _text(folder: str, name: str) -> str:
    """Return the text of a file; empty if there is none."""
    path = os.path.join(folder, name)
    try:
        return _read(path, os.stat(path).st_mtime_ns)
    except OSError:
        return ""


@cache
def _read(path: str, changed_ns: int) -> str:
    """Return the text of a file, which is read anew when it has changed."""
    del changed_ns
    with open(path, encoding="utf-8") as file:
        return file.read()
