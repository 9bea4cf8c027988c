"""Tests that the guide on losing policies quotes the page of the bundled trace correctly."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from helpers.browser import tab
from helpers.evictions import TraceBlocks

from kvcore_cli.main import run
from kvcore_replay.misses.explain import explain

GUIDE = Path(__file__).parents[2] / "docs/how-to/see-why-a-policy-loses.md"
COMMAND = re.compile(r"^\$ kvcore (.*)\n((?:(?!\$|```).*\n)*)", re.MULTILINE)
QUOTE = re.compile(r"^> (.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def guide(tmp_path_factory):
    """Run the commands of the guide; return the folder of their files and what they print.

    They replay the bundled trace twice, which takes some ten seconds.
    """
    folder = tmp_path_factory.mktemp("guide")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.chdir(folder)
        for command, _ in COMMAND.findall(GUIDE.read_text()):
            assert run(command.split()) == 0
    return folder, printed.getvalue()


@pytest.fixture
def folder(guide):
    """Return the folder of the files that the commands of the guide write."""
    return guide[0]


def test_the_commands_print_the_lines_of_the_guide(guide):
    """The commands of the guide print each line that is shown, with its spacing."""
    printed = guide[1].splitlines()
    shown = [
        line for _, output in COMMAND.findall(GUIDE.read_text()) for line in output.split("\n")
    ]
    assert [line for line in shown if line and line not in printed] == []


def test_the_page_has_each_quoted_sentence(browser, folder):
    """Each sentence that the guide quotes is on the page where the page opens."""
    with tab(browser) as found:
        page = found.open(folder / "page.html")
        text = page.evaluate("() => document.querySelector('main').textContent")
        assert (found.complaints, found.requests) == ([], [])
    quotes = QUOTE.findall(GUIDE.read_text())
    assert len(quotes) == 5
    for quote in quotes:
        assert quote in text


def test_the_quoted_numbers_are_those_of_the_trace(folder):
    """The quoted numbers of the eviction at 990 s are those of the block ids in the trace."""
    side = TraceBlocks(folder / "lru.jsonl.gz")
    explanation = explain(folder / "lru.jsonl.gz")
    (eviction,) = [
        eviction
        for eviction in side.evictions
        if eviction.line["for"] == 3003 and len(eviction.contents) == 215  # the quoted eviction
    ]
    line, users = eviction.line, side.users(eviction.row)
    assert (line["t"], line["age"]) == (990 * 10**9, 81 * 10**9)
    assert {users[content][0] for content in eviction.contents} == {4809}
    places = [users[content][1] for content in eviction.contents]
    assert side.hit[4809] <= min(places)
    held = explanation.requests[4809].optimum // side.size
    assert sum(place < held for place in places) == 214
    order = list(side.admissions)
    assert order.index(4809) - order.index(3003) - 1 == 1805
    admitted = side.lines[side.admissions[4809]]
    assert admitted["t"] - line["t"] == pytest.approx(546 * 10**9, abs=10**9)
    for row, cached in enumerate(side.cached()):
        if row == eviction.row:
            assert (len(cached), sum(each not in users for each in cached)) == (5785, 4107)
            break
