"""The files that a command and a request enter, and the crossings between them."""

from __future__ import annotations

import os

from helpers.crossings import SMALL, count_calls_of_command, count_calls_of_request


def test_print_calls_of_a_command_and_of_a_request() -> None:
    """Print the path of `kvcore simulate` and of one request, with the calls by file."""
    ways = {
        "simulate": count_calls_of_command("simulate", SMALL),
        "a request": count_calls_of_request(),
    }
    for name, way in ways.items():
        print(f"\n{name}: {way}")
        for file, calls in sorted(way.files.items()):
            print(f"  {calls:7,} {os.path.relpath(file)}")
