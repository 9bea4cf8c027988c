"""Tests of the file that all pages are made of."""

import json
import shutil
import subprocess
import sys
from functools import partial
from importlib.resources import files

import pytest

from kvcore.errors import PluginError
from kvcore.units import format_number, format_seconds
from kvcore_pages import tour
from kvcore_pages.report import report_page
from kvcore_pages.view import view_page


@pytest.mark.parametrize(
    "make",
    [partial(view_page, ["none.jsonl"]), partial(report_page, ["none.jsonl"]), tour.tour_page],
    ids=["view", "report", "tour"],
)
def test_without_plotly_nothing_is_read_or_run(make, monkeypatch):
    """Without plotly a page is refused before a file is read or an example runs."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr(tour, "tour", pytest.fail)
    with pytest.raises(PluginError, match="a page with curves needs plotly"):
        make()


NUMBERS = {
    0: "0", -0.001: "0", 1: "1", 5.0: "5", 8.03: "8.03", 2.6: "2.6", 0.0049: "0", 9.999: "10",
    12.88: "12.9", 99.96: "100", 999.6: "1,000", 1234.5: "1,234", 12345: "12,345",
    0.125: "0.12", 0.375: "0.38", 12.25: "12.2", 12.75: "12.8", 100.5: "100", 101.5: "102",
    0.615: "0.61", 1.005: "1", -12345.6: "-12,346", 1e14: "100,000,000,000,000",
    1e15: "1e+15", 1.5e20: "1.5e+20", -1.05e16: "-1.05e+16", 1e300: "1e+300",
}  # fmt: skip
DURATIONS = {
    0: "0 ns", 1: "1 ns", 0.4: "0.4 ns", 999: "999 ns", 7_060: "7.06 us", 999_600: "1,000 us",
    31_200_000: "31.2 ms", 1_350_000_000: "1.35 s", 816 * 10**9: "816 s",
    123_456 * 10**9: "123,456 s", -20_000_000: "-20 ms", -2_500_000_000: "-2.5 s",
}  # fmt: skip
"""Texts of numbers, and of durations in ns, that pages and tables of kvcore share."""


@pytest.mark.parametrize(("value", "text"), NUMBERS.items())
def test_tables_have_numbers_as_pages(value, text):
    """The number of a table is that of the cases which pages have."""
    assert format_number(value) == text


@pytest.mark.parametrize(("ns", "text"), DURATIONS.items())
def test_tables_have_durations_as_pages(ns, text):
    """The duration of a table is that of the cases which pages have."""
    assert format_seconds(ns / 1e9) == text


NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs node, which runs JavaScript")
def test_pages_have_the_numbers_and_durations_of_tables():
    """The script of pages writes each number as Python does, and no zero below 0."""
    shell = (files("kvcore_pages") / "static" / "shell.js").read_text("utf-8")
    asked = json.dumps([[*NUMBERS], [*DURATIONS]])
    script = (
        "globalThis.matchMedia = () => ({ addEventListener() {} });\n"
        f"{shell}\nconst [numbers, durations] = {asked};\n"
        "console.log(JSON.stringify([numbers.map((v) => format.number(v)),"
        " durations.map((v) => format.duration(v)),"
        " [format.number(-0), format.count(-0.4), format.moment(-1e5)]]));"
    )
    done = subprocess.run(
        [NODE, "-"],
        input=script,
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    )
    zeros = ["0", "0", "0.000 s"]
    assert json.loads(done.stdout) == [[*NUMBERS.values()], [*DURATIONS.values()], zeros]
