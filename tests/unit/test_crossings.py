"""How far one must read: the files of a command, and the calls between files of a request."""

from __future__ import annotations

from helpers.crossings import SMALL, way_of_command, way_of_request

FILES_OF_SIMULATE = 45
CALLS_OF_A_REQUEST = 93
CROSSINGS_OF_A_REQUEST = 70
FILES_OF_A_REQUEST = 14


def test_files_that_simulate_enters():
    """`kvcore simulate` calls functions of at most FILES_OF_SIMULATE files."""
    way = way_of_command("simulate", SMALL)
    assert len(way.files) <= FILES_OF_SIMULATE


def test_crossings_of_a_request():
    """A request that hits needs few calls, few files, and few crossings between files."""
    way = way_of_request()
    assert way.calls <= CALLS_OF_A_REQUEST
    assert way.crossings <= CROSSINGS_OF_A_REQUEST
    assert len(way.files) <= FILES_OF_A_REQUEST
