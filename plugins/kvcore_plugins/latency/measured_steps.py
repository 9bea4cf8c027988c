"""Measured steps, and the CSV files that have them."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import TextIO

import attrs

from kvcore.errors import InputError
from kvcore.models.cost import attended_pairs
from kvcore.serving.latency import StepWork, Windows
from kvcore.units import NS_PER_S, PS_PER_NS, PS_PER_S
from kvcore.untrusted import parse_digits
from kvcore.workloads.files import lines
from kvcore_plugins.csv_rows import split_row

COUNTS = ("prefill_tokens", "decode_sequences", "context_tokens")
"""Columns with the work of a step."""


PAIRS = "attended_pairs"
"""A column that may be there: (query, key) pairs of the prompt tokens."""

SECONDS = "seconds"
"""The column with the time of a step."""


SHORTEST, LONGEST = 1e-9, 1e6
"""Least and most seconds of a step; `write_steps` writes whole nanoseconds."""


@attrs.frozen
class MeasuredStep:
    """A row of a CSV file: the work of a step, and the time that it took.

    Attributes:
        line: number of the line in the file, from 1.
        prefill: number of prompt tokens.
        decode: number of sequences that generated a token.
        context: number of tokens that these attended to, of all sequences together.
        time: time of the step in picoseconds.
        pairs: number of (query, key) pairs of the prompt tokens; by default of one chunk at
            the start of a prompt.
    """

    line: int
    prefill: int
    decode: int
    context: int
    time: int
    pairs: int = attrs.field()

    @pairs.default
    def _one_chunk(self) -> int:
        return attended_pairs(0, self.prefill)

    @property
    def counts(self) -> tuple[int, int, int]:
        """The work of the step, in the order of `COUNTS`."""
        return self.prefill, self.decode, self.context

    @property
    def kind(self) -> str:
        """`prefill`, `decode` or `mixed`."""
        if self.prefill:
            return "mixed" if self.decode else "prefill"
        return "decode"

    def work(self, windows: Windows = (None,)) -> StepWork:
        """Return the work of the step.

        For attention in a window, the prompt tokens are taken for one chunk, as far behind
        the start of its prompt as the pairs say, and contexts for equally long.
        """
        before = max(self.pairs - attended_pairs(0, self.prefill), 0) // max(self.prefill, 1)
        pairs, contexts = [], []
        for window in windows:
            if window is None:
                pairs.append(self.pairs)
                contexts.append(self.context)
            else:
                pairs.append(attended_pairs(before, self.prefill, window))
                contexts.append(min(self.context, self.decode * window))
        return StepWork(self.prefill, tuple(pairs), self.decode, tuple(contexts))


def read_steps(path: Path) -> list[MeasuredStep]:
    """Read a CSV file with the columns of `COUNTS` and `SECONDS`, in any order.

    `PAIRS` is read if it is there. Other columns are skipped, blank lines too. The file may be
    compressed.

    Raises:
        InputError: the file cannot be read, a column is missing or named twice, or a cell
            cannot be read; the error names file, line and column.
    """
    source = lines(path)
    line_number, line = next(source)
    header = [name.strip() for name in _cells(path, line_number, line)]
    columns = [*COUNTS, *([PAIRS] if PAIRS in header else []), SECONDS]
    columns_at = {name: _place(path, line_number, header, name) for name in columns}
    steps = []
    for line_number, line in source:
        cells = _cells(path, line_number, line)
        if len(cells) != len(header):
            expected = f"expected {len(header)} cells, as in the header"
            msg = f"{path}:{line_number}: {expected}, got {len(cells)}"
            raise InputError(msg)
        row = {name: cells[place].strip() for name, place in columns_at.items()}
        prefill, decode, context, *pairs = (
            _count(f"{path}:{line_number}: {name}", row[name]) for name in columns[:-1]
        )
        seconds = _seconds(f"{path}:{line_number}: {SECONDS}", row[SECONDS])
        time = round(seconds * PS_PER_S)
        steps.append(MeasuredStep(line_number, prefill, decode, context, time, *pairs))
    if not steps:
        msg = f"{path}: no rows after the header"
        raise InputError(msg)
    return steps


def write_steps(file: TextIO, steps: Iterable[MeasuredStep]) -> None:
    """Write steps with their pairs in the format of `read_steps`, to the nanosecond."""
    file.write(",".join((*COUNTS, PAIRS, SECONDS)) + "\n")
    for step in steps:
        seconds, rest = divmod(step.time // PS_PER_NS, NS_PER_S)
        counts = ",".join(map(str, (*step.counts, step.pairs)))
        file.write(f"{counts},{seconds}.{rest:09d}\n")


def _cells(path: Path, line_number: int, line: bytes) -> list[str]:
    try:
        return split_row(line.decode())
    except (UnicodeDecodeError, csv.Error) as error:
        msg = f"{path}:{line_number}: not CSV in UTF-8: {error}"
        raise InputError(msg) from error


def _place(path: Path, number: int, header: list[str], name: str) -> int:
    if header.count(name) != 1:
        problem = "is there twice" if name in header else "is missing"
        msg = (
            f"{path}:{number}: column {name!r} {problem}; expected a header with "
            f"{', '.join((*COUNTS, SECONDS))}, got {', '.join(header)}"
        )
        raise InputError(msg)
    return header.index(name)


def _count(where: str, text: str) -> int:
    count = parse_digits(text)
    if count is None:
        msg = f"{where}: expected a whole number, at least 0 and below 10^18, got {text!r}"
        raise InputError(msg)
    return count


def _seconds(where: str, text: str) -> Fraction:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (isfinite(seconds) and SHORTEST <= seconds <= LONGEST):
        msg = (
            f"{where}: expected seconds, at least {SHORTEST:g} and up to {LONGEST:,.0f}, such "
            f"as 0.0125, got {text!r}"
        )
        raise InputError(msg)
    return Fraction(Decimal(text))
