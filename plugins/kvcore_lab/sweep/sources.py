"""The digests of the code on which a result depends: kvcore's own, and that of a plugin."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any
from uuid import uuid4

import kvcore
from kvcore.errors import InputError
from kvcore.hookspecs import PROJECT
from kvcore.workloads.files import file_digest

CODE = {".py", ".json", ".gz"}
"""Suffixes of kvcore's code and tables. The core in C decides as Python does."""

SITES = {"site-packages", "dist-packages"}
"""The names of folders of packages that are installed, for a user or for all."""

PACKAGE = 5
"""The mark of packages for `ModuleFinder`."""


@cache
def kvcore_digest() -> str:
    """Return the digest of the code and the tables of kvcore. About 0.1 s, once.

    A version stands for many commits of a checkout that is installed, and for its edits.
    """
    state = blake2b(digest_size=16)
    for package in _packages():
        for name, path in _files(package):
            if path.suffix in CODE:
                state.update(f"{package.name}/{name} {file_digest(path)}\n".encode())
    return state.hexdigest()


def class_digests(cls: type) -> dict[str, str]:
    """Return what the cells of a journal have of the code of a plugin's class.

    A class that was typed in, read from a pipe or made by a function is told by no file: it has
    a name that no other class gets, so that a journal returns no figures of another. A class of
    a file has the digests of what it consists of, by the names of modules or files: the files
    of its package (data only beside an `__init__.py`); of a plugin in a file, the file and all
    that it imports, which is found without running it. Kvcore itself, the standard library and
    `site-packages` are left out.

    Code is read once, and data again when they have changed, as a plugin may do.

    Raises:
        InputError: code was edited after this process had loaded it, and so is not what runs.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or not Path(file).is_file() or "<locals>" in cls.__qualname__:
        return _name_of_its_own(cls)
    if cls.__module__.partition(".")[0] in {ours.name for ours in _packages()}:
        return {}
    loaded_ns: int = cls.__loaded__  # type: ignore[attr-defined]  # as `Plugin` has noted it
    # The module of a plugin in a file is named by its path, which has points of its own.
    package = None if cls.__module__ == file else _package(cls.__module__, Path(file))
    if package is None:
        return _imported(file, loaded_ns)
    digests = {}
    # A folder without `__init__.py` may hold anything: traces, results, the journal itself.
    has_data = (package / "__init__.py").is_file()
    for name, path in _files(package):
        if path.suffix == ".py":
            digests[name] = _code_digest(path, loaded_ns)
        elif has_data:
            digests[name] = _data_digest(path, path.stat().st_mtime_ns)
    return digests


@cache
def _name_of_its_own(cls: type) -> dict[str, str]:
    """Return a name and a digest that are only those of this class in this process."""
    return {cls.__qualname__: uuid4().hex}


def _package(module: str, file: Path) -> Path | None:
    """Return the folder of the package of a module in `file`; None: it is in no package."""
    above = module.count(".") - 1 + (file.name == "__init__.py")
    return file.parents[above] if above >= 0 else None


def _files(package: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a package by name: all but hidden ones and caches, in their order.

    Compiled modules are among them, since they may do another thing than before.
    """
    for path in sorted(package.rglob("*")):
        parts = path.relative_to(package).parts
        is_left_out = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if not is_left_out and path.is_file():
            yield "/".join(parts), path


@cache
def _code_digest(path: Path, loaded_ns: int) -> str:
    """Return the digest of a file of code that was loaded at a time.

    Raises:
        InputError: it was edited after that.
    """
    if path.stat().st_mtime_ns > loaded_ns:
        msg = (
            f"{path} was edited after this process had loaded what it belongs to, which runs "
            "as it was: start a new process (in a notebook, restart the kernel)"
        )
        raise InputError(msg)
    return file_digest(path)


@cache
def _data_digest(path: Path, changed_ns: int) -> str:
    """Return the digest of a file, which is read again after it has changed."""
    del changed_ns  # for the cache
    return file_digest(path)


@cache
def _imported(file: str, loaded_ns: int) -> dict[str, str]:
    """Return the digests of a file and of all that it imports, by the names of modules."""
    folders = [str(Path(file).parent), *(path for path in sys.path if not _installed(path))]
    finder: Any = _Finder(folders, excludes={package.name for package in _packages()})
    finder.run_script(file)
    return {
        name: _code_digest(Path(imported.__file__), loaded_ns)
        for name, imported in finder.modules.items()
        if imported.__file__
    }


def _installed(folder: str) -> bool:
    """Return True for a folder of the standard library, or of packages that are installed."""
    library = map(sysconfig.get_path, ("stdlib", "platstdlib"))
    path = Path(folder)
    return path.name in SITES or any(map(path.is_relative_to, library))


class _Finder(ModuleFinder):
    """Finds what a file imports, also in folders without `__init__.py`.

    For these `ModuleFinder` raises AttributeError, since no loader belongs to their specs.
    """

    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        """Return where a module is; for a folder without `__init__.py`, its paths."""
        try:
            return super().find_module(name, path, parent)
        except AttributeError:
            spec: Any = PathFinder.find_spec(name, self.path if path is None else path)
            return None, spec.submodule_search_locations, ("", "", PACKAGE)

    def load_package(self, fqname: str, pathname: Any) -> Any:
        """Return the module of a package, which is run unless it is paths alone."""
        if isinstance(pathname, str):
            return super().load_package(fqname, pathname)
        package: Any = self.add_module(fqname)
        package.__path__ = [*pathname]
        return package


def _packages() -> list[Path]:
    """Return the folders of kvcore's packages."""
    return [Path(kvcore.__file__).parent, *_beside()]


@cache
def _beside() -> list[Path]:
    """Return the folders of kvcore's packages that lie beside that of this module.

    In `site-packages` there may be others of such names, which are not in the list of files of
    kvcore's distribution. One that is installed from a checkout lists none, and lies alone.
    """
    inits = sorted(Path(__file__).parents[2].glob("kvcore_*/__init__.py"))
    listed = set()
    with suppress(PackageNotFoundError):
        listed = {file.parts[0] for file in distribution(PROJECT).files or ()}
    found = [init.parent for init in inits]
    return [package for package in found if package.name in listed] or found
