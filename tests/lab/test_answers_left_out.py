"""Answers that a replay by keys leaves out, and that are cached under a clock."""

import pytest
from helpers.requests import keyed

from kvcore import compare
from kvcore_lab.curves.mrc import curve
from kvcore_lab.report.mrc import CurvesReport


def requests():
    """Return a conversation of two turns, the second of which continues the answer."""
    first = keyed("first", "abc", output_tokens=9, output_keys=["d", "e"])
    return [first, keyed("second", "abcdef")]


@pytest.mark.parametrize(("accounting", "left_out", "hits"), [("keys", 1, 3), ("tokens", 0, 5)])
def test_a_comparison_says_which_answers_it_leaves_out(accounting, left_out, hits):
    """By keys the answer does not hit, and the report counts it; by tokens it is cached."""
    found = compare(requests(), "lru", 99, accounting=accounting)
    assert found.infinite.hit_blocks == hits
    assert found.infinite.answers_left_out == left_out
    assert ("1 answer with keys would be cached too" in " ".join(str(found).split())) is (
        left_out == 1
    )


def test_a_curve_says_which_answers_it_leaves_out():
    """The bound of a curve by keys is that of prompts alone, which its report says."""
    found = curve(requests(), "lru", blocks=[9])
    assert found.answers_left_out == 1
    report = CurvesReport(found)
    assert "1 answer with keys would be cached too" in report.reading
    assert report.document()["infinite"]["answers_left_out"] == 1
