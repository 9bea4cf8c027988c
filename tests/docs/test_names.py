"""Modules, names and files of the source that the pages mention exist."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOTTED = re.compile(r"(?<![\w.'/\-])kvcore(?:_plugins)?(?:\.[A-Za-z_]\w*)+(?![\w\-])")
FILE = re.compile(
    r"`((?:kvcore|kvcore_plugins|plugins|tests|examples)/[\w./]+)(?:::\w+)?`",
)
OWN = {"kvcore.toml"}
"""Names of files that look like names of modules."""


def resolves(name):
    """Return True if a dotted name is a module, or an attribute in one."""
    module, rest = name, []
    while True:
        try:
            found = find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if found:
            break
        module, _, last = module.rpartition(".")
        rest.insert(0, last)
    value = import_module(module)
    for part in rest:
        known = hasattr(value, part) or part in getattr(value, "__annotations__", {})
        if not known:
            return False
        value = getattr(value, part, None)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_exist(page):
    """What is written as `kvcore.room.Name` can be imported."""
    names = set(DOTTED.findall(page.read_text("utf-8"))) - OWN
    assert sorted(name for name in names if not resolves(name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_exist(page):
    """What is written as the path of a source file is there."""
    paths = set(FILE.findall(page.read_text("utf-8")))
    places = (ROOT, ROOT / "plugins")
    missing = [path for path in paths if not any((place / path).exists() for place in places)]
    assert missing == []
