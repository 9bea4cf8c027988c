"""The sentence on a search for options with which a queue does not grow."""

import pytest

from kvcore_lab.report.capacity import holding


def test_the_options_that_sustain_the_load_are_listed():
    """The options are listed as on the command line."""
    text = holding({"rate_scale": 0.47, "tensor_parallel": 4})
    assert "with --rate-scale 0.47 or --tensor-parallel 4:" in text


@pytest.mark.parametrize(("many", "begin"), [(False, "Neither a"), (True, "No number")])
def test_a_search_without_success_says_so(many, begin):
    """A search of one server, or of a number of servers, says that it has found nothing."""
    assert holding({}, many=many).startswith(begin)
