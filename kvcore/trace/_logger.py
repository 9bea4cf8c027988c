"""The structlog logger of a trace: an event is a dict and a line of JSON, written in batches.

In a module of its own because structlog takes longer to import than the rest of kvcore.
"""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import suppress
from itertools import repeat
from operator import itemgetter
from typing import Any, BinaryIO

import structlog
from orjson import OPT_APPEND_NEWLINE, dumps

from kvcore.trace.fields import encode_all_runs, encode_runs

BATCH_LINES = 64
"""Lines that are rendered at once: few enough to be gone before the next collection."""

BATCH_BLOCKS = 1 << 18
"""Blocks in the long lines of a batch, above which the batch is rendered."""

LONG = 128
"""Blocks of a line above which its runs are found together with those of other lines."""

_event = itemgetter("event")


class TraceLogger(structlog.BoundLoggerBase):
    """Logger of one trace, bound to its file, its processors and its counts of events.

    A processor has the signature of structlog's, and gets a batch of lines in place of one
    event: its call costs little for each line.

    Attributes:
        lines: number of rendered lines, as a reader yields them.
        time: time of the last rendered line, in ns.
        batch_lines: largest number of lines that are rendered at once.
    """

    lines = 0
    time = 0
    batch_lines = BATCH_LINES

    def __init__(self, *bound: Any) -> None:
        """Start with an empty batch."""
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
                # A copy: the sequence goes on writing into its array.
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
        counts, n = self._context, self.lines
        counts.update(map(_event, batch))
        grows = counts.pop("GROW", 0)
        for line in batch:
            line["n"] = n
            n += 1
            if grows and line["event"] == "GROW":
                # It stands for an ALLOC of each block, and an EVICT of each that a victim had.
                blocks, evictions = len(line["grown"]), len(line.get("for", ()))
                counts["ALLOC"] += blocks
                if evictions:
                    counts["EVICT"] += evictions
                n += blocks + evictions - 1
        self.lines = n
        last = batch[-1]
        self.time = last["t"] + (last["grown"][-1][0] if last["event"] == "GROW" else 0)
        rendered: Any = batch
        for process in self._processors:
            rendered = process(self._logger, "write", rendered)
        self._logger(rendered)

    def discard(self) -> None:
        """Drop the lines that are not rendered yet."""
        self._batch = []

    def __del__(self) -> None:
        """Write the lines that are not rendered yet, as an unclosed buffer does."""
        with suppress(Exception):
            self.flush()


def find_runs(_: Any, __: str, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace arrays of block ids by their runs, for JSON."""
    with_ids = [line for line in batch if type(line.get("runs")) is array]
    encoded = encode_all_runs([line["runs"] for line in with_ids])
    for line, runs in zip(with_ids, encoded, strict=True):
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
