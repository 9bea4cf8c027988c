"""Error texts for entry points that are missing or out of date, after a lookup failed."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from importlib.metadata import Distribution, EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvcore.distributions import Installed, Point
from kvcore.hookspecs import PROJECT


def missing() -> str:
    """Return the reason why kvcore's own entry points are missing, and the command to run."""
    try:
        dist = metadata.distribution(PROJECT)
    except metadata.PackageNotFoundError:
        return (
            "kvcore is not installed, so it has no plugins: they are found through entry "
            "points, which a checkout on PYTHONPATH does not have; run `pip install -e .` in "
            f"{Path(__file__).resolve().parents[2]}"
        )
    return _outdated([dist]) or (
        f"kvcore {dist.version} is installed without its entry points, so there are no "
        "plugins; install it again: `pip install --force-reinstall kvcore`, or "
        "`pip install -e .` in a checkout"
    )


def outdated(points: Iterable[EntryPoint | Point] | None) -> str | None:
    """Return an error text if an editable install is older than its checkout, or None.

    Entry points and folders are copied when a checkout is installed; editing pyproject.toml
    does not change the copy. Reads the distributions of `points`; None: all installed ones.
    """
    if points is None:
        return _outdated(metadata.distributions())
    return _outdated(point.dist for point in points if point.dist)


def _outdated(distributions: Iterable[Distribution | Installed]) -> str | None:
    for dist in distributions:
        checkout = _checkout(dist)
        declared = _declared(checkout / "pyproject.toml") if checkout else None
        if declared is None:
            continue
        installed = {p.name: p.value for p in dist.entry_points if p.group == PROJECT}
        changed = sorted({name for name, _ in declared.items() ^ installed.items()})
        packages = {re.split(r"\W", value)[0] for value in installed.values()}
        if changed or None in map(find_spec, packages - sys.modules.keys()):
            what = "entry points" if changed else "folders to import from"
            differences = f" (they differ in {', '.join(changed)})" if changed else ""
            return (
                f"the installed {what} of {dist.name} {dist.version} are older than "
                f"{checkout}/pyproject.toml{differences}; run `pip install -e .` again in "
                f"{checkout}"
            )
    return None


def _checkout(dist: Distribution | Installed) -> Path | None:
    """Return the checkout of an editable install, or None."""
    try:
        origin = json.loads(dist.read_text("direct_url.json") or "{}")
        editable = origin.get("dir_info", {}).get("editable", False)
        return Path(unquote(urlsplit(origin["url"]).path)) if editable else None
    except (ValueError, KeyError, AttributeError):
        return None


def _declared(pyproject: Path) -> dict[str, str] | None:
    """Return the plugin entry points in a pyproject.toml; None if it does not list them."""
    try:
        project: dict[str, Any] = tomllib.loads(pyproject.read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return None
    if "entry-points" in project.get("dynamic", ()):
        return None
    return dict(project.get("entry-points", {}).get(PROJECT, {}))
