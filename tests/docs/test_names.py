"""Tests that modules, names and source files that the pages mention exist."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvcore_cli.main import known_verbs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = [folder.name for folder in (ROOT / "plugins").glob("kvcore_*")]
DOTTED = re.compile(
    rf"(?<![\w.'/\-])(?:kvcore|{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+(?![\w\-])"
)
FILE = re.compile(
    rf"`((?:kvcore|{'|'.join(PACKAGES)}|plugins|tests|examples)/[\w./]+)(?:::\w+)?`",
)
OWN = {"kvcore.toml"}
"""File names that look like module names."""


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_page_on_the_installation_names_every_extra():
    """The table of extras has a row for each optional dependency of the package."""
    page = ROOT / "docs/how-to/install.md"
    rows = re.findall(r"^\| `(\w+)` \| ", page.read_text("utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(PROJECT["optional-dependencies"])


def test_the_page_on_the_command_line_names_every_verb():
    """The table of verbs has a row for each verb of kvcore's packages, in order."""
    page = (ROOT / "docs/reference/cli.md").read_text("utf-8").partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE) == sorted(known_verbs())


def test_citations_are_of_this_version():
    """CITATION.cff and the BibTeX entry have the title, version and licence of the package."""
    entry = (ROOT / "docs/how-to/cite.md").read_text("utf-8")
    fields = dict(re.findall(r"^  (\w+) = \{(.*)\},?$", entry, re.MULTILINE))
    fields["author"] = fields["author"].strip("{}")
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    cited = dict(
        re.findall(r'^(?:  - )?(title|name|version|license): "?(.*?)"?$', text, re.MULTILINE)
    )
    cited["author"] = cited.pop("name")
    about = PROJECT["description"].removesuffix(".")
    assert cited == fields
    assert cited["title"] == f"kvcore: {about[0].lower()}{about[1:]}"
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])


def resolves(name):
    """Return True if a dotted name is a module or an attribute in one."""
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
def test_each_name_on_a_page_can_be_imported(page):
    """Each name such as `kvcore.room.Name` on a page can be imported."""
    names = set(DOTTED.findall(page.read_text("utf-8"))) - OWN
    assert sorted(name for name in names if not resolves(name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_source_file_on_a_page_exists(page):
    """Each path of a source file on a page exists."""
    paths = set(FILE.findall(page.read_text("utf-8")))
    places = (ROOT, ROOT / "plugins")
    missing = [path for path in paths if not any((place / path).exists() for place in places)]
    assert missing == []


def test_new_names_in_the_changelog_exist():
    """Each new name in the changelog's tables of unreleased renames can be imported."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    after = re.split("^## Unreleased\n", text, flags=re.MULTILINE)[1]
    unreleased = re.split("^## ", after, flags=re.MULTILINE)[0]
    new = re.findall(r"^\| .* \| (.*) \|$", unreleased, re.MULTILINE)
    names = {name for cell in new for name in DOTTED.findall(cell)}
    assert names
    assert sorted(name for name in names if not resolves(name)) == []
