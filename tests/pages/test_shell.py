"""Tests of the file that all pages are made of."""

import sys
from functools import partial

import pytest

from kvcore.errors import PluginError
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
