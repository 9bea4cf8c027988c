"""Tests of the site that `tox -e docs` makes: links, search and widths, from a folder."""

from __future__ import annotations

import os
import re
from collections import deque
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote_plus, unquote, urldefrag

import pytest
from helpers.browser import NARROW, WIDE, tab

from kvcore.cli.main import known_verbs

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


def local_links(path):
    """Yield the target file and the anchor of each link of a page that is not external."""
    for link in parsed(path).links:
        if not re.match(r"\w+:", link):
            target, anchor = urldefrag(link)
            yield (path.parent / unquote(target)).resolve() if target else path, unquote(anchor)


def test_links_lead_to_pages_and_anchors(site):
    """Each link that stays on the site leads to a file there, and after `#` to an anchor."""
    broken = set()
    for page in site.rglob("*.html"):
        for target, anchor in local_links(page):
            reached = target.is_file() and site in target.parents
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
            if target.suffix == ".html" and target.is_file() and target not in clicks:
                clicks[target] = clicks[page] + 1
                queue.append(target)
    pages = {*site.rglob("*.html")} - {site / "search.html"}  # the form leads to that one
    assert {str(page) for page in pages if clicks.get(page, 4) > 3} == set()


@pytest.fixture(scope="module")
def results(site, browser):
    """Return a function that searches the site and returns the pages, the best first."""
    with tab(browser, WIDE) as opened:

        def search(query):
            page = opened.page
            page.goto(f"{(site / 'search.html').as_uri()}?q={quote_plus(query)}")
            page.wait_for_function("document.querySelector('#search-results p')?.innerText")
            page.wait_for_function("!document.querySelector('#search-progress')?.innerText")
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
