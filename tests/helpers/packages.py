"""The order of the rooms of the core, and of the packages."""

ORDER = [
    {"blake2", "errors"},
    {"record", "units", "untrusted"},
    {"distributions", "files", "histogram", "lazy", "moved", "native", "progress"},
    {"sections"},
    {"notebook"},
    {"request"},
    {"plugins"},
    {"models", "workloads"},
    {"cache"},
    {"trace"},
    {"serving"},
    {"engine"},
    {"config"},
    {"api"},
    {"__init__", "__main__"},
    # So far the rooms of the core.
    {"kvcore_plugins"},
    {"kvcore_cli"},
    {"kvcore_events", "kvcore_hosting"},
    {"kvcore_tiers"},
    {"kvcore_cluster", "kvcore_engine"},
    {"kvcore_replay"},
    {"kvcore_lab"},
    {"kvcore_pages", "kvcore_online"},
    {"kvcore_testing"},
    {"kvcore_judge"},
]
"""Rooms and packages: one imports itself and those above it."""

RANK = {package: rank for rank, packages in enumerate(ORDER) for package in packages}


def package_of(path):
    """Return the package of the file at `path`, such as `kvcore/api.py`.

    For a file of the core that is its room: a folder of `kvcore`, or a module there.
    """
    package, room, *_ = path.removesuffix(".py").split("/")
    if package != "kvcore":
        return package
    # `hookspecs` is at the root, where authors of plugins look for it.
    return "plugins" if room == "hookspecs" else room


def may_import(path, other):
    """Return True if the file at `path` may import that at `other`, by their packages."""
    package, imported = package_of(path), package_of(other)
    return package == imported or RANK[imported] < RANK[package]
