"""Tests of the page of `kvcore report` in a real browser."""

import json
from itertools import pairwise

import pytest
from helpers.browser import NARROW, tab
from helpers.commands import run_here
from helpers.pages import data_of

MARKUP = "</script><script>document.title='got it'</script><b>\"&amp;<img src=x onerror=boom()>"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return a page of two runs, a comparison whose strings are markup, and a plan."""
    folder = tmp_path_factory.mktemp("page")
    work = ("zipf:requests=120,rate=40", "--blocks", 400)
    for policy in ("lru", "lfu"):
        run_here("simulate", *work, "--eviction", policy, "--out", policy, cwd=folder)
    compare = run_here("compare", "zipf:requests=80", "--blocks", "100,400", "--json")
    document = json.loads(compare.stdout)
    document["workload"]["name"] = MARKUP
    for row in document["rows"][:2]:
        row["eviction"] = MARKUP
    (folder / "compare.json").write_text(json.dumps(document))
    fleet = ("--device", "h100", "--slo", "ttft=2", "--max-gpus", 1, "--jobs", 1)
    run_here("plan", "zipf:requests=20", *fleet, "--out", "plan", cwd=folder)
    names = ("lru", "lfu", "compare.json", "plan")
    run = run_here("report", *names, "-o", "page.html", "--title", MARKUP, cwd=folder)
    assert run.returncode == 0, run.stderr
    return folder / "page.html"


def drawn(opened, page):
    """Open the page, wait until its charts are drawn, and return the tab."""
    opened.open(page).wait_for_selector("body[data-drawn]", timeout=60_000)
    return opened


@pytest.fixture(scope="module")
def light(browser, page):
    """Yield the page on a laptop, in light colours."""
    with tab(browser) as opened:
        yield drawn(opened, page)


@pytest.fixture(scope="module")
def dark(browser, page):
    """Yield the page on a phone, in dark colours."""
    with tab(browser, NARROW, scheme="dark") as opened:
        yield drawn(opened, page)


@pytest.mark.parametrize("kind", ["light", "dark"])
def test_the_page_opens_offline_and_fits(request, kind):
    """The page opens without requests or errors, and nothing is wider than the window."""
    opened = request.getfixturevalue(kind)
    assert (opened.complaints, opened.requests) == ([], [])
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    wide = """[...document.querySelectorAll(".chart, pre, figure, .scroll")].filter(
        (each) => each.getBoundingClientRect().right > innerWidth + 0.5).length"""
    assert opened.page.evaluate(wide) == 0


def test_tables_and_charts_are_those_of_the_data(light, page):
    """Every cell of the tables and every line and bar of the charts is that of the data."""
    data = data_of(page.read_bytes(), "report")
    parts = [part for section in data["sections"] for part in section["parts"]]
    shown = light.page
    cells = """[...document.querySelectorAll("main section table")].filter(
        (table) => !table.closest("details")).map((table) => [...table.tBodies[0].rows].map(
        (row) => [...row.cells].map((cell) => cell.textContent)))"""
    assert shown.evaluate(cells) == [
        part["rows"] for part in parts if part["kind"] == "table" and not part.get("folded")
    ]
    lines = """[...document.querySelectorAll(".chart")].map((chart) => chart.data.map(
        (trace) => [...(trace.type === "bar" ? trace.x : trace.y)]))"""
    charts = [part for part in parts if part["kind"] in ("chart", "bars")]
    assert shown.evaluate(lines) == [
        [line["y"] for line in part["lines"]]
        if part["kind"] == "chart"
        else [series["values"] for series in part["series"]]
        for part in charts
    ]
    labels = [f"{part['title']}. {part['about']}" for part in charts]
    named = '[...document.querySelectorAll("[role=img]")].map((each) => each.ariaLabel)'
    assert shown.evaluate(named) == labels
    assert shown.locator("figure details table").count() == len(charts)


def test_the_page_begins_with_the_answers(light):
    """The share in time, the cost and the fleet to take stand before all else."""
    first = light.page.locator("main > .first.answer")
    told = first.text_content()
    assert "of the requests were served within the SLO" in told
    assert "Cost: $" in told
    assert "Take 1 replica on 1 x h100" in told
    before = """document.querySelector(".first.answer").compareDocumentPosition(
        document.querySelector("nav"))"""
    assert light.page.evaluate(before) == 4  # Node.DOCUMENT_POSITION_FOLLOWING


def test_settings_are_folded(light):
    """All settings of a run are there, and open when they are asked for."""
    folded = light.page.locator("section > details:has(summary:text-is('All settings'))")
    assert folded.count() == 2
    assert not folded.first.locator("table").is_visible()


def test_markup_in_results_stays_text(light):
    """Markup in titles, tables and charts is shown as text."""
    shown = light.page
    assert shown.title() == MARKUP
    assert shown.locator("h1").text_content() == MARKUP
    assert shown.locator("main img, main b, main script").count() == 0
    assert shown.locator("main").text_content().count(MARKUP) > 3
    texts = '[...document.querySelectorAll(".chart text")].map((each) => each.textContent)'
    assert MARKUP in shown.evaluate(texts)


def test_headings_contents_and_header_cells_are_in_order(light):
    """Headings are in order, contents link to them, and header cells have a scope."""
    shown = light.page
    levels = '[...document.querySelectorAll("h1, h2, h3")].map((each) => +each.tagName[1])'
    found = shown.evaluate(levels)
    assert found[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(found))
    links = shown.evaluate('[...document.querySelectorAll("nav a")].map((a) => a.hash)')
    assert len(links) == found.count(2) - 1 + found.count(3)
    assert all(shown.locator(link).count() == 1 for link in links)
    assert shown.evaluate('document.querySelectorAll("th:not([scope])").length') == 0
    shown.locator("summary").first.focus()
    shown.keyboard.press("Enter")
    assert shown.locator("figure details").first.locator("table").is_visible()


WIDTHS = """[...document.querySelectorAll(".chart svg.main-svg")].map(
    (each) => +each.getAttribute("width"))"""


def test_charts_follow_the_window(dark):
    """Charts are redrawn to fit when the window gets wider or narrower."""
    shown, expect = dark.page, pytest.importorskip("playwright.sync_api").expect
    before = shown.evaluate(WIDTHS)
    last = shown.locator(".chart svg.main-svg").last
    shown.set_viewport_size({"width": 700, "height": 800})
    expect(last).not_to_have_attribute("width", str(before[-1]))
    assert before[-1] < shown.evaluate(WIDTHS)[-1] < 700
    shown.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
    expect(last).to_have_attribute("width", str(before[-1]))


@pytest.mark.slow
def test_the_page_prints_in_light_colours_as_wide_as_paper(dark):
    """A dark page prints in light colours at the width of paper, and is restored afterwards."""
    shown, expect = dark.page, pytest.importorskip("playwright.sync_api").expect
    ground = "getComputedStyle(document.body).backgroundColor"
    before = shown.evaluate(ground), shown.evaluate(WIDTHS)
    last = shown.locator(".chart svg.main-svg").last
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    expect(last).to_have_attribute("width", "680")
    assert set(shown.evaluate(WIDTHS)) == {680}
    assert shown.evaluate(ground) == "rgb(255, 255, 255)"
    shown.evaluate("dispatchEvent(new Event('afterprint'))")
    expect(last).to_have_attribute("width", str(before[1][-1]))
    assert (shown.evaluate(ground), shown.evaluate(WIDTHS)) == before
    assert dark.complaints == []
