"""Tests of the site that `tox -e docs` makes: links, search and widths, from a folder."""

from __future__ import annotations

import os
import re
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cache, cached_property
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote_plus, unquote, urldefrag

import pytest
from helpers.browser import NARROW, WIDE, tab

from kvcore_cli.main import known_verbs

MIDDLE = (820, 1180)
"""A window of a tablet, in CSS pixels."""


@pytest.fixture(scope="module")
def site():
    """Return the folder of the site; skip the test if the run has made none."""
    made = os.environ.get("KVCORE_SITE")
    return Path(made).resolve() if made else pytest.skip("needs the site: tox run -e docs")


LOADED = re.compile(r"""(?:url\(|@import\s+)['"]?([^)'"]+)""")
"""What a style sheet loads."""


class Page(HTMLParser):
    """The links, anchors and loaded files of an HTML page.

    Attributes:
        links: targets of `<a>`.
        loaded: targets that a browser fetches when it shows the page.
        anchors: ids that a link can name.
    """

    def __init__(self, path):
        """Parse the file at `path`."""
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        """Record what a tag refers to."""
        values = dict(attrs)
        self.anchors.update(filter(None, (values.get("id"), values.get("name"))))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("index", "search", "next", "prev"):
            self.loaded.append(values["href"])
        elif tag in ("script", "img", "iframe", "source") and values.get("src"):
            self.loaded.append(values["src"])


@cache
def parsed(path):
    """Return the page of a file."""
    return Page(path)


@cache
def linked(folder, link):
    """Return the target file and the anchor of a link of the pages in a folder."""
    target, anchor = urldefrag(link)
    return (folder / unquote(target)).resolve() if target else None, unquote(anchor)


@cache
def is_file(path):
    """Return True if there is a file: pages have the same few hundred links."""
    return path.is_file()


def local_links(path):
    """Yield the target file and the anchor of each link of a page that is not external."""
    for link in parsed(path).links:
        if not re.match(r"\w+:", link):
            target, anchor = linked(path.parent, link)
            yield target or path, anchor


def test_links_lead_to_pages_and_anchors(site):
    """Each link that stays on the site leads to a file there, and after `#` to an anchor."""
    broken = set()
    for page in site.rglob("*.html"):
        for target, anchor in local_links(page):
            reached = is_file(target) and site in target.parents
            if not reached or (anchor and anchor not in parsed(target).anchors):
                broken.add(f"{page.relative_to(site)}: {target}#{anchor}")
    assert broken == set()


def test_nothing_is_loaded_from_elsewhere(site):
    """Scripts, styles, fonts and pictures of all pages are files of the site."""
    named = {(page, name) for page in site.rglob("*.html") for name in parsed(page).loaded}
    for style in site.rglob("*.css"):
        named |= {(style, name) for name in LOADED.findall(style.read_text("utf-8"))}
    missing = {
        (str(file.relative_to(site)), name)
        for file, name in named
        if not name.startswith(("data:", "#"))
        and not (file.parent / unquote(name.partition("?")[0])).is_file()
    }
    assert missing == set()


def test_every_page_is_three_clicks_away(site):
    """From the front page each other one is reached by three links at most."""
    clicks = {site / "index.html": 0}
    queue = deque(clicks)
    while queue:
        page = queue.popleft()
        for target, _ in local_links(page):
            if target not in clicks and target.suffix == ".html" and is_file(target):
                clicks[target] = clicks[page] + 1
                queue.append(target)
    pages = {*site.rglob("*.html")} - {site / "search.html"}  # the form leads to that one
    assert {str(page) for page in pages if clicks.get(page, 4) > 3} == set()


ROW = 5
"""Words in a row by which texts are compared."""


@dataclass
class Block:
    """A paragraph, an item of a list, a row of a table, or code.

    Attributes:
        page: the file of the page.
        kind: `text`, `field` (of a docstring: a parameter, an attribute, an error) or `code`.
        text: the text; of code without the lines that are commands.
        links: files that it links to.
        entry: the file that it begins with a link to, as in an index.
    """

    page: Path
    kind: str
    text: str = ""
    links: set[Path] = field(default_factory=set)
    entry: Path | None = None

    @cached_property
    def rows(self):
        """Return the words of the text, each with those behind it; none if it is short."""
        words = re.findall(r"\w+", self.text.lower())
        enough = range(len(words) - ROW + 1) if len(words) >= 12 else ()
        return {tuple(words[start : start + ROW]) for start in enough}


class Blocks(HTMLParser):
    """The blocks of the article of a page.

    Attributes:
        found: the blocks.
    """

    KINDS: ClassVar = {"p": "text", "li": "text", "tr": "text", "pre": "code"}

    def __init__(self, path):
        """Parse the file at `path`."""
        super().__init__()
        self.found = []
        self._path, self._open, self._fields, self._article = path, [], 0, False
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        """Begin a block, unless it is a cell's or an item's own paragraph; record a link."""
        values = dict(attrs)
        self._article |= tag == "article"
        if tag == "dl" and (self._fields or "field-list" in (values.get("class") or "")):
            self._fields += 1
        inside_row = any(block_tag == "tr" for block_tag, _ in self._open)
        if tag in self.KINDS and self._article and not inside_row:
            kind = "field" if self._fields and tag != "pre" else self.KINDS[tag]
            self._open.append((tag, Block(self._path, kind)))
        elif tag == "a" and self._open:
            block = self._open[-1][1]
            address = unquote(urldefrag(values.get("href", "")).url)
            target = (self._path.parent / address).resolve()
            if not block.text.strip():
                block.entry = target
            block.links.add(target)

    def handle_endtag(self, tag):
        """End a block."""
        self._article &= tag != "article"
        if tag == "dl" and self._fields:
            self._fields -= 1
        if self._open and self._open[-1][0] == tag:
            block = self._open.pop()[1]
            if block.kind == "code":
                block.text = re.sub(r"(?m)^\s*(\$ |kvcore |--).*$", "", block.text)
            self.found.append(block)

    def handle_data(self, data):
        """Add text to the innermost block."""
        if self._open:
            self._open[-1][1].text += data


def same(block, other):
    """Return True if a block says what another one says, or nearly so.

    That is no fault of one that links to the page of the other, nor of two that begin with a
    link to the same page.
    """
    kinds = {block.kind, other.kind}
    if block.page == other.page or kinds == {"field"} or ("code" in kinds and len(kinds) > 1):
        return False
    if other.page in block.links or block.page in other.links:
        return False
    if block.entry and block.entry == other.entry:
        return False
    return len(block.rows & other.rows) >= 0.8 * min(len(block.rows), len(other.rows))


def test_no_page_says_what_another_says(site):
    """No two pages share a paragraph, a row or code of a dozen words, by four fifths or more.

    Left out are the README, which is a summary, and the changelog, which is history; commands,
    which make a page work by itself. Functions may describe a parameter in the same words.
    """
    pages = set(site.rglob("*.html"))
    pages -= {site / f"{name}.html" for name in ("README", "index", "CHANGELOG", "search")}
    by_row = defaultdict(list)
    for block in (block for page in sorted(pages) for block in Blocks(page).found):
        for row in block.rows:
            by_row[row].append(block)
    repeated = {
        (str(block.page.relative_to(site)), str(other.page.relative_to(site)), block.text)
        for blocks in by_row.values()
        for block, other in combinations(blocks, 2)
        if same(block, other)
    }
    assert repeated == set()


FIVE_RESULTS = """() => document.querySelectorAll("#search-results li").length >= 5
    || document.querySelector("#search-results p")?.innerText
    && !document.querySelector("#search-progress")?.innerText"""
"""Whether the best five are shown, or all: hundreds may follow, one every few milliseconds."""


@pytest.fixture(scope="module")
def results(site, browser):
    """Return a function that searches the site and returns the pages, the best first."""
    with tab(browser, WIDE) as opened:

        def search(query):
            page = opened.page
            page.goto(f"{(site / 'search.html').as_uri()}?q={quote_plus(query)}")
            page.wait_for_function(FIVE_RESULTS)
            links = page.locator("#search-results li a").all()[:5]
            pages = [link.get_attribute("href").partition("?")[0] for link in links]
            assert (opened.complaints, opened.requests) == ([], [])
            return [page.partition("#")[0] for page in pages]

        yield search


def test_commands_are_found_by_their_names(results):
    """The search for a verb has its page among the first five results, in a folder."""
    missing = [
        verb
        for verb in known_verbs()
        if f"build/interface/kvcore-{verb}.html" not in results(f"kvcore {verb}")
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("size gemma 3", "docs/how-to/serve-a-hybrid-model.html"),
        ("why a request missed", "docs/how-to/why-did-it-miss.html"),
        ("how to write a router", "docs/how-to/write-a-router.html"),
        ("what --like vllm changes", "docs/reference/engine-rules.html"),
        ("cite kvcore", "docs/how-to/cite.html"),
        ("EvictionPolicy", "build/interface/kvcore.cache.EvictionPolicy.html"),
        ("scheduler", "docs/how-to/write-a-scheduler.html"),
        ("goodput", "docs/reference/glossary.html"),
        ("hit_ratio", "build/interface/kvcore.serving.Result.html"),
    ],
)
def test_questions_are_answered_by_the_search(results, query, page):
    """The search for a question has the page that answers it among the first five results."""
    assert page in results(query)


@pytest.mark.parametrize("size", [NARROW, MIDDLE, WIDE], ids=["phone", "tablet", "laptop"])
@pytest.mark.parametrize(
    "name",
    [
        "index.html",
        "docs/reference/cli.html",
        "docs/reference/policies.html",
        "build/interface/kvcore-simulate.html",
        "build/interface/kvcore.cache.KVCache.html",
        "build/interface/map.html",
    ],
)
def test_pages_fit_the_window(site, browser, name, size):
    """No page is wider than the window of a phone, a tablet or a laptop."""
    with tab(browser, size) as opened:
        opened.page.goto((site / name).as_uri())
        width = opened.page.evaluate("document.documentElement.scrollWidth")
        assert width <= size[0]
        assert (opened.complaints, opened.requests) == ([], [])
