"""Recorders: the lines that each method makes."""

from array import array
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


def test_the_growth_of_many_sequences_is_told_block_by_block():
    """Of blocks that sequences got, the last ones were a victim's, evicted for each in turn."""
    recorder = Lines()
    grown = [(3, 1, 4, 10), (5, 2, 6, 11), (7, 1, 5, 12)]
    recorder.grow(3, grown=grown, by="lru", victims=[(8, 2, 9, 1)], requesters=["b", "a"])
    lines = [(event, *fields.values()) for event, fields in recorder.lines]
    assert lines == [
        ("ALLOC", 1, 4, array("i", [10])),
        ("EVICT", 8, array("i", [11]), "lru", "b", 4, 9, "capacity", "cache"),
        ("ALLOC", 2, 6, array("i", [11])),
        ("EVICT", 8, array("i", [12]), "lru", "a", 6, 9, "capacity", "cache"),
        ("ALLOC", 1, 5, array("i", [12])),
    ]
