"""The structlog logger of a trace: one event, one dict, one line of JSON; written in batches.

In a module of its own because structlog takes longer to import than the rest of kvcore.
"""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import suppress
from itertools import count, repeat
from operator import itemgetter
from typing import Any, BinaryIO

import structlog
from orjson import OPT_APPEND_NEWLINE, dumps

from kvcore.trace.fields import encode_all_runs, encode_runs

BATCH_LINES = 64
"""Lines that are rendered at once. More would live so long that the collector looks at them."""

BATCH_BLOCKS = 1 << 18
"""Blocks in the long lines of a batch, of which it may have a few more."""

LONG = 128
"""Blocks of a line from which on their runs are found together with those of other lines."""

_event = itemgetter("event")


class TraceLogger(structlog.BoundLoggerBase):
    """Bound once a trace to the file, the processors, and the counts of events so far.

    A processor has the signature that those of structlog have, and takes a batch of lines in
    the place of one event: what is called once a batch costs a line nothing.

    Attributes:
        lines: how many were rendered.
        time: of the last of them, in ns.
        batch_lines: how many lines are rendered at once, at most.
    """

    lines = 0
    time = 0
    batch_lines = BATCH_LINES

    def __init__(self, *bound: Any) -> None:
        """Begin with an empty batch."""
        super().__init__(*bound)
        self._batch: list[dict[str, Any]] = []
        self._blocks = 0

    def write(self, line: dict[str, Any]) -> None:
        """Add one line to the batch, which is rendered when it is full. Costs 0.2 µs."""
        runs = line.get("runs")
        batch = self._batch
        batch.append(line)
        if type(runs) is array:
            blocks = len(runs)
            if blocks == 1:
                line["runs"] = [(runs[0], 1)]
            elif blocks <= LONG:
                line["runs"] = encode_runs(runs)
            else:
                # A copy, for the sequence goes on writing into its array.
                line["runs"] = runs[:]
                self._blocks += blocks
                if self._blocks > BATCH_BLOCKS:
                    self.flush()
                    return
        if len(batch) >= self.batch_lines:
            self.flush()

    def flush(self) -> None:
        """Render the batch and write it to the file. Costs about 0.6 µs a line."""
        batch, self._batch, self._blocks = self._batch, [], 0
        if not batch:
            return
        for number, line in zip(count(self.lines), batch, strict=False):
            line["n"] = number
        self._context.update(map(_event, batch))
        self.lines += len(batch)
        self.time = batch[-1]["t"]
        rendered: Any = batch
        for process in self._processors:
            rendered = process(self._logger, "write", rendered)
        self._logger(rendered)

    def discard(self) -> None:
        """Drop the lines that are not rendered yet."""
        self._batch = []

    def __del__(self) -> None:
        """Write what is left, as a buffer does that nobody has closed."""
        with suppress(Exception):
            self.flush()


def find_runs(_: Any, __: str, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace arrays of block ids by their runs, which JSON can hold."""
    with_ids = [line for line in batch if type(line.get("runs")) is array]
    found = encode_all_runs([line["runs"] for line in with_ids])
    for line, runs in zip(with_ids, found, strict=True):
        line["runs"] = runs
    return batch


def render_lines(_: Any, __: str, batch: list[dict[str, Any]]) -> bytes:
    """Return a batch as lines of JSON."""
    return b"".join(map(dumps, batch, repeat(None), repeat(OPT_APPEND_NEWLINE)))


def bind_logger(file: BinaryIO, batch_lines: int = BATCH_LINES) -> TraceLogger:
    """Return a logger that writes its lines to `file`, from line 0 on."""
    logger = TraceLogger(file.write, (find_runs, render_lines), Counter[str]())
    logger.batch_lines = batch_lines
    return logger


def events_written(logger: TraceLogger) -> dict[str, int]:
    """Return how many lines of each event `logger` wrote, in order of first appearance."""
    return dict(structlog.get_context(logger))
