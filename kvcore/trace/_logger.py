"""The structlog logger of a trace: one event, one dict, one line of JSON, one buffered write.

In a module of its own because structlog takes longer to import than the rest of kvcore.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from typing import Any, BinaryIO

import structlog
from orjson import OPT_APPEND_NEWLINE, dumps

from kvcore.trace.fields import encode_runs


class TraceLogger(structlog.BoundLoggerBase):
    """Bound once a trace to the file, one processor, and the counts of events so far.

    Attributes:
        lines: how many were written.
        time: of the last line, in ns.
    """

    lines = 0
    time = 0

    def write(self, line: dict[str, Any]) -> None:
        """Write one line. Costs about 0.5 µs, twice what orjson alone takes.

        An array of block ids, which JSON has no word for, is written as runs. (Not by
        orjson's `default`: what is raised in there, an interrupt say, comes out as a
        TypeError.)
        """
        (encode,) = self._processors
        line["n"] = self.lines
        if "runs" in line and type(line["runs"]) is array:
            line["runs"] = encode_runs(line["runs"])
        self._logger(encode(line, None, OPT_APPEND_NEWLINE))  # type: ignore[arg-type]
        self._context[line["event"]] += 1
        self.lines += 1
        self.time = line["t"]


def bind_logger(file: BinaryIO) -> TraceLogger:
    """Return a logger that writes its lines to `file`, from line 0 on."""
    return TraceLogger(file.write, (dumps,), defaultdict(int))  # type: ignore[arg-type]


def events_written(logger: TraceLogger) -> dict[str, int]:
    """Return how many lines of each event `logger` wrote, in order of first appearance."""
    return dict(structlog.get_context(logger))
