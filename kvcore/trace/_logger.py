"""The structlog logger of a trace: an event is a dict and a line of JSON, written in batches.

In a module of its own because structlog takes longer to import than the rest of kvcore.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, repeat
from operator import itemgetter
from typing import Any, BinaryIO

import structlog
from orjson import OPT_APPEND_NEWLINE, Fragment, dumps

from kvcore.cache.pool import Ids
from kvcore.trace.fields import render_all_runs

BATCH_LINES = 128
"""Lines that are rendered at once: few enough to be gone before the next collection."""

GROWN = 4096
"""Blocks of a GROW to which none are added."""

BATCH_BLOCKS = 1 << 18
"""Blocks in the lines of a batch, above which the batch is rendered."""


class TraceLogger(structlog.BoundLoggerBase):
    """Logger of one trace, bound to the `write` of its file and to its processors.

    A processor has the signature of structlog's, and gets a batch of lines in place of one
    event: its call costs little for each line.

    Attributes:
        lines: number of rendered lines, as a reader yields them.
        events: number of rendered lines of each event, in order of first appearance.
        time: time of the last rendered line, in ns.
        batch_lines: largest number of lines that are rendered at once.
        on_lines: called with lines before they are written; None: not called.
    """

    lines = 0
    time = 0
    batch_lines = BATCH_LINES
    on_lines: Callable[[bytes], object] | None = None

    def __init__(self, *bound: Any) -> None:
        """Start with an empty batch."""
        super().__init__(*bound)
        self.events: Counter[str] = Counter()
        self._batch: list[dict[str, Any]] = []
        self._blocks = 0
        # What EVICT lines have evicted since the last other line with blocks.
        self._evicted: list[Ids] = []

    def write(self, line: dict[str, Any]) -> None:
        """Add one line to the batch, which is rendered when it is full. Costs 0.2 µs."""
        batch = self._batch
        batch.append(line)
        if "runs" in line and (runs := line["runs"]).__class__ is array:
            # A copy: the sequence goes on writing into its array.
            line["runs"] = ids = runs[:]
            self._blocks += len(ids)
            if line["event"] == "EVICT":
                self._evicted.append(ids)
            elif self._evicted:
                self._leave_out_evicted(line, ids)
            if self._blocks > BATCH_BLOCKS:
                self.flush(all_lines=False)
        if len(batch) >= self.batch_lines:
            self.flush(all_lines=False)

    def _leave_out_evicted(self, line: dict[str, Any], ids: Ids) -> None:
        """Leave out the blocks of an ALLOC that are those of the EVICT lines before it."""
        evicted, self._evicted = b"".join(self._evicted), []
        blocks = len(evicted) // ids.itemsize
        if line["event"] != "ALLOC" or "group" in line or not 0 < blocks <= len(ids):
            return
        if ids[-blocks:].tobytes() == evicted:
            line["runs"], line["evicted"] = ids[:-blocks], blocks

    def extend(self, line: dict[str, Any]) -> bool:
        """Add the blocks of a GROW to the line before it, if that is one with room for them."""
        last = self._batch[-1] if self._batch else None
        if last is None or last["event"] != "GROW" or len(last["grown"]) >= GROWN:
            return False
        victims = line.get("victims", [])
        if "victims" in last:
            if len(line.get("for", ())) < len(line["grown"]):
                return False  # free blocks do not follow those of victims
            if victims[0][0] == last["victims"][-1][0]:
                span, blocks, hits, accessed = last["victims"].pop()
                victims[0] = span, blocks + victims[0][1], hits, accessed
            last["victims"] += victims
            last["for"] += line["for"]
        elif victims:
            last |= {"by": line["by"], "victims": victims, "for": line["for"]}
        last["grown"] += line["grown"]
        return True

    def flush(self, *, all_lines: bool = True) -> None:
        """Render the batch and write it to the file. Costs about 0.6 µs a line.

        A GROW at its end is left in the batch, unless it is to be of `all_lines`.
        """
        batch, self._batch, self._blocks = self._batch, [], 0
        if not all_lines and batch and batch[-1]["event"] == "GROW":
            self._batch = [batch.pop()]
        if not batch:
            return
        counts, counted, n, event = self.events, 0, self.lines, itemgetter("event")
        for index, line in enumerate(batch):
            line["n"] = n
            n += 1
            if "grown" in line:
                # It stands for an ALLOC of each block, and an EVICT of each victim's block.
                lines = ["ALLOC"] * len(line["grown"]) + ["EVICT"] * len(line.get("for", ()))
                counts.update(chain(map(event, batch[counted:index]), lines))
                counted = index + 1
                n += len(lines) - 1
        counts.update(map(event, batch[counted:]))
        self.lines = n
        last = batch[-1]
        self.time = last["grown"][-1][0] if last["event"] == "GROW" else last["t"]
        rendered: Any = batch
        # structlog's own way to its processors copies what is bound into each event; here the
        # lines are complete, and pass together.
        for process in self._processors:
            rendered = process(self._logger, "write", rendered)
        if self.on_lines is not None:
            self.on_lines(rendered)
        self._logger(rendered)

    def discard(self) -> None:
        """Drop the lines that are not rendered yet."""
        self._batch = []

    def __del__(self) -> None:
        """Write the lines that are not rendered yet, as an unclosed buffer does."""
        with suppress(Exception):
            self.flush()


def find_runs(_: Any, __: str, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace arrays of block ids by their runs, as JSON."""
    with_ids = [line for line in batch if "runs" in line and line["runs"].__class__ is array]
    rendered = render_all_runs(line["runs"] for line in with_ids)
    for line, runs in zip(with_ids, rendered, strict=True):
        line["runs"] = Fragment(runs)
    return batch


def render_lines(_: Any, __: str, batch: list[dict[str, Any]]) -> bytes:
    """Return a batch as lines of JSON."""
    return b"".join(map(dumps, batch, repeat(None), repeat(OPT_APPEND_NEWLINE)))


def bind_logger(file: BinaryIO, on_lines: Callable[[bytes], object] | None) -> TraceLogger:
    """Return a logger that writes to `file`; with `on_lines`, that gets each line at once."""
    logger = TraceLogger(file.write, (find_runs, render_lines), {})
    if on_lines is not None:
        logger.on_lines, logger.batch_lines = on_lines, 1
    return logger
