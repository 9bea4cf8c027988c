"""The digests of the code on which a result depends: kvcore's own, and that of a plugin."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from hashlib import blake2b
from modulefinder import ModuleFinder
from pathlib import Path

import kvcore
from kvcore.workloads.files import file_digest

CODE = {".py", ".json", ".gz"}
"""Suffixes of kvcore's code and tables. The core in C decides as Python does."""


@cache
def kvcore_digest() -> str:
    """Return the digest of the code and the tables of kvcore. About 0.1 s, once.

    A version stands for many commits of a checkout that is installed, and for its edits.
    """
    state = blake2b(digest_size=16)
    for package in _packages():
        for path in sorted(path for path in package.rglob("*") if path.suffix in CODE):
            name = path.relative_to(package.parent).as_posix()
            state.update(f"{name} {file_digest(path)}\n".encode())
    return state.hexdigest()


@cache
def plugin_digests(module: str) -> dict[str, str]:
    """Return the digests of the code of a plugin, by the name of the module or the file.

    They are those of its package; of a plugin in a file, of the file and all that it imports,
    which is found without running it. Kvcore itself, the standard library and `site-packages`
    are left out, and so is what a class that was typed in has in place of a file.
    """
    file = getattr(sys.modules[module], "__file__", None)
    packages = {package.name for package in _packages()}
    if file is None or module.partition(".")[0] in packages:
        return {}
    path = Path(file)
    above = module.count(".") - 1 + (path.name == "__init__.py")
    if module != file and above >= 0:
        folder = path.parents[above]
        return {
            path.relative_to(folder).as_posix(): file_digest(path)
            for path in sorted(folder.rglob("*.py"))
        }
    folders = [str(path.parent), *(set(sys.path) - {*sysconfig.get_paths().values()})]
    finder = ModuleFinder(folders, excludes=packages)
    finder.run_script(file)
    files = {name: vars(imported)["__file__"] for name, imported in finder.modules.items()}
    return {name: file_digest(Path(file)) for name, file in files.items() if file}


def _packages() -> list[Path]:
    """Return the folders of kvcore's packages, which lie beside that of this module."""
    return [Path(kvcore.__file__).parent, *sorted(Path(__file__).parents[2].glob("kvcore_*"))]
