"""Tests that links between pages lead to files and headings that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "kvcore", "plugins")
PAGES = sorted([*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.+?)\s*$", re.MULTILINE)


def prose(page):
    """Return the text of a page without its fenced blocks."""
    return FENCED.sub("", page.read_text("utf-8"))


@cache
def anchors(page):
    """Return the anchors that GitHub gives the headings of a page."""
    found = set()
    for heading in HEADING.findall(prose(page)):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        same = [each for each in found if re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", each)]
        found.add(f"{anchor}-{len(same)}" if same else anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    """Each relative link on a page leads to a file, and after `#` to a heading of it."""
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_linked_from_the_index():
    """docs/README.md links to every page of the docs."""
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text("utf-8")
    linked = {(docs / link.partition("#")[0]).resolve() for link in LINK.findall(index)}
    pages = {page.resolve() for page in docs.rglob("*.md")} - {(docs / "README.md").resolve()}
    assert pages <= linked


def test_the_readme_is_a_first_screen():
    """README has at most 9 kB: what is longer belongs to a page that it links to."""
    assert (ROOT / "README.md").stat().st_size <= 9000
