"""Measured steps of a real server, read from and written to CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import TextIO

import attrs

from kvcore.errors import InputError
from kvcore.units import LIMIT, NANOSECONDS, PICOSECONDS, picoseconds
from kvcore.workloads import lines

COUNTS = ("prefill_tokens", "decode_sequences", "context_tokens")
"""Columns that say what a step computed."""

SECONDS = "seconds"
"""The column that says how long it took."""

SHORTEST, LONGEST = 1e-12, 1e6


@attrs.frozen
class MeasuredStep:
    """A row of a CSV file: what a step computed, and how long that took.

    Attributes:
        line: where it stands, from 1.
        prefill: prompt tokens.
        decode: sequences that generated a token.
        context: tokens these attended to, of all sequences together.
        time: picoseconds.
    """

    line: int
    prefill: int
    decode: int
    context: int
    time: int

    @property
    def counts(self) -> tuple[int, int, int]:
        """What it computed, in the order of `COUNTS`."""
        return self.prefill, self.decode, self.context


def read_steps(path: Path) -> list[MeasuredStep]:
    """Read a CSV file with the columns of `COUNTS` and `SECONDS`, in any order.

    Other columns are skipped, blank lines too. The file may be compressed.

    Raises:
        InputError: the file cannot be read, a column is missing or named twice, or a cell
            holds what cannot be used: names file, line and column.
    """
    source = lines(path)
    number, line = next(source)
    header = [name.strip() for name in _cells(path, number, line)]
    places = {name: _place(path, number, header, name) for name in (*COUNTS, SECONDS)}
    steps = []
    for number, line in source:
        cells = _cells(path, number, line)
        if len(cells) != len(header):
            expected = f"expected {len(header)} cells, as in the header"
            msg = f"{path}:{number}: {expected}, got {len(cells)}"
            raise InputError(msg)
        row = {name: cells[place].strip() for name, place in places.items()}
        prefill, decode, context = (
            _count(f"{path}:{number}: {name}", row[name]) for name in COUNTS
        )
        time = picoseconds(_seconds(f"{path}:{number}: {SECONDS}", row[SECONDS]), SECONDS)
        steps.append(MeasuredStep(number, prefill, decode, context, time))
    if not steps:
        msg = f"{path}: no rows after the header"
        raise InputError(msg)
    return steps


def write_steps(file: TextIO, steps: Iterable[MeasuredStep]) -> None:
    """Write steps as `read_steps` reads them, times to the nanosecond."""
    file.write(",".join((*COUNTS, SECONDS)) + "\n")
    for step in steps:
        seconds, rest = divmod(step.time // PICOSECONDS, NANOSECONDS)
        file.write(",".join(map(str, step.counts)) + f",{seconds}.{rest:09d}\n")


def _cells(path: Path, number: int, line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode().rstrip("\r\n")], strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        msg = f"{path}:{number}: not CSV in UTF-8: {error}"
        raise InputError(msg) from error


def _place(path: Path, number: int, header: list[str], name: str) -> int:
    if header.count(name) != 1:
        problem = "is there twice" if name in header else "is missing"
        msg = (
            f"{path}:{number}: column {name!r} {problem}; expected a header with "
            f"{_listed((*COUNTS, SECONDS))}, got {_listed(header)}"
        )
        raise InputError(msg)
    return header.index(name)


def _count(where: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < len(str(LIMIT))):
        msg = f"{where}: expected a whole number, at least 0 and below 10^18, got {text!r}"
        raise InputError(msg)
    return int(text)


def _seconds(where: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (isfinite(seconds) and SHORTEST <= seconds <= LONGEST):
        msg = f"{where}: expected seconds, above 0 and up to 10^6, such as 0.0125, got {text!r}"
        raise InputError(msg)
    return seconds


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
