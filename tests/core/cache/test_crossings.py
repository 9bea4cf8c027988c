"""How far one must read: the files of a command, and the calls between files of a request."""

from __future__ import annotations

from helpers.crossings import SMALL, count_calls_of_command, count_calls_of_request

FILES_OF_SIMULATE = 57
CALLS_OF_A_REQUEST = 97
CROSSINGS_OF_A_REQUEST = 94
FILES_OF_A_REQUEST = 15


def test_simulate_enters_few_files():
    """`kvcore simulate` calls functions of at most FILES_OF_SIMULATE files."""
    way = count_calls_of_command("simulate", SMALL)
    assert 0 < len(way.files) <= FILES_OF_SIMULATE


def test_a_request_crosses_few_files():
    """A request that hits needs few calls, few files, and few crossings between files."""
    way = count_calls_of_request()
    assert 0 < way.calls <= CALLS_OF_A_REQUEST
    assert 0 < way.crossings <= CROSSINGS_OF_A_REQUEST
    assert 0 < len(way.files) <= FILES_OF_A_REQUEST
