"""The digests of the code on which a result depends: kvcore's own, and that of a plugin."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from hashlib import blake2b
from importlib.machinery import PathFinder
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any
from uuid import uuid4

import kvcore
from kvcore.errors import InputError
from kvcore.workloads.files import file_digest

CODE = {".py", ".json", ".gz"}
"""Suffixes of kvcore's code and tables. The core in C decides as Python does."""

PACKAGE = 5
"""The mark of packages for `ModuleFinder`."""


@cache
def kvcore_digest() -> str:
    """Return the digest of the code and the tables of kvcore. About 0.1 s, once.

    A version stands for many commits of a checkout that is installed, and for its edits.
    """
    state = blake2b(digest_size=16)
    for package in _packages():
        files = (path for path in package.rglob("*") if path.suffix in CODE and path.is_file())
        for path in sorted(files):
            name = path.relative_to(package.parent).as_posix()
            state.update(f"{name} {file_digest(path)}\n".encode())
    return state.hexdigest()


@cache
def class_digests(cls: type) -> dict[str, str]:
    """Return what the cells of a journal have of the code of a plugin's class.

    A class that was typed in, read from a pipe or made by a function is told by no file: it has
    a name that no other class gets, so that a journal returns no figures of another.

    Raises:
        InputError: as `plugin_digests` does.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or not Path(file).is_file() or "<locals>" in cls.__qualname__:
        return {cls.__qualname__: uuid4().hex}
    return plugin_digests(cls.__module__)


@cache
def plugin_digests(module: str) -> dict[str, str]:
    """Return the digests of the code of a plugin, by the name of the module or the file.

    They are those of its package; of a plugin in a file, of the file and all that it imports,
    which is found without running it. Kvcore itself, the standard library and `site-packages`
    are left out.

    Raises:
        InputError: a file was edited after this process had loaded it, and so is not what runs.
    """
    loaded = vars(sys.modules[module])
    file, ours = loaded["__file__"], {package.name for package in _packages()}
    if module.partition(".")[0] in ours:
        return {}
    path = Path(file)
    above = module.count(".") - 1 + (path.name == "__init__.py")
    if module != file and above >= 0:
        folder = path.parents[above]
        return {
            path.relative_to(folder).as_posix(): file_digest(path)
            for path in sorted(folder.rglob("*.py"))
            if path.is_file()
        }
    folders = [str(path.parent), *(set(sys.path) - {*sysconfig.get_paths().values()})]
    finder = _Finder(folders, excludes=ours)
    finder.run_script(file)
    sources = {name: vars(imported)["__file__"] for name, imported in finder.modules.items()}
    files = {name: Path(source) for name, source in sources.items() if source}
    for source in files.values():
        if source.stat().st_mtime_ns > loaded.get("__loaded__", sys.maxsize):
            msg = (
                f"{source} was edited after this process had loaded {file}, which runs as it "
                "was: start a new process (in a notebook, restart the kernel)"
            )
            raise InputError(msg)
    return {name: file_digest(source) for name, source in files.items()}


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
    """Return the folders of kvcore's packages, which lie beside that of this module."""
    return [Path(kvcore.__file__).parent, *sorted(Path(__file__).parents[2].glob("kvcore_*"))]
