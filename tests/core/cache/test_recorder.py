"""Recorders: the lines that each method makes."""

from inspect import Parameter, signature

import pytest
from helpers.caches import Lines

from kvcore.cache import Recorder

WITHOUT_A_LINE = {"begin", "request", "describe", "describe_keys"}
WITH_LINES_OF_OTHERS = {"admission", "missed", "grow"}
METHODS = {name for name, method in vars(Recorder).items() if callable(method)}


@pytest.mark.parametrize("method", sorted(METHODS - WITHOUT_A_LINE - WITH_LINES_OF_OTHERS))
def test_a_line_has_its_time_and_no_number(method):
    """A line has the time of its call, and 0 in place of the number that a writer sets."""
    recorder, lines = Lines(), []
    recorder.write = lines.append
    write = getattr(recorder, method)
    parameters = signature(write).parameters.values()
    fields = [field.name for field in parameters if field.kind is Parameter.KEYWORD_ONLY]
    write(77, **dict.fromkeys(fields, 1))
    assert [(line["n"], line["t"]) for line in lines] == [(0, 77)]
