"""The packages that the files of today will belong to, and the order of these packages."""

from fnmatch import fnmatch
from functools import cache

ORDER = [
    {"errors"},
    {"units"},
    {"compiled"},
    {"distributions", "extras", "files", "histogram", "host", "lazy", "moved", "progress"},
    {"sections"},
    {"notebook"},
    {"request"},
    {"plugins"},
    {"models", "workloads"},
    {"cache"},
    {"trace", "tiers"},
    {"serving"},
    {"cluster"},
    {"engine"},
    {"config"},
    {"report"},
    {"api"},
    {"cli"},
    {"__init__", "__main__"},
    # So far the rooms of the core.
    {"kvcore_plugins"},
    {"kvcore_tiers", "kvcore_events", "kvcore_hosting"},
    {"kvcore_cluster", "kvcore_engine"},
    {"kvcore_replay"},
    {"kvcore_lab"},
    {"kvcore_pages", "kvcore_online"},
    {"kvcore_testing", "kvcore_vllm"},
]
"""Rooms and packages: one imports itself and those above it."""

RANK = {package: rank for rank, packages in enumerate(ORDER) for package in packages}

FILES = {
    "kvcore_vllm": {"kvcore/serving": "vllm_steps"},
}
"""By package and folder, the names of the files of today that the package will have.

A name may be a glob; of two globs for a file the longer one counts. A file that is not named
will be of the core.
"""

GLOBS = {
    f"{folder}/{name}.py": package
    for package, folders in FILES.items()
    for folder, names in folders.items()
    for name in names.split()
}


@cache
def package_of(path):
    """Return the package that the file at `path`, such as `kvcore/api.py`, will be in.

    For a file of the core that is its room: a folder of `kvcore`, or a module there.
    """
    globs = [glob for glob in GLOBS if fnmatch(path, glob)]
    if globs:
        return GLOBS[max(globs, key=len)]
    folder, room, *_ = path.removesuffix(".py").split("/")
    if folder != "kvcore":
        return folder
    # `hookspecs` is at the root, where authors of plugins look for it.
    return "plugins" if room == "hookspecs" else room


def may_import(path, other):
    """Return True if the file at `path` may import that at `other`, by their packages."""
    package, imported = package_of(path), package_of(other)
    return package == imported or RANK[imported] < RANK[package]
