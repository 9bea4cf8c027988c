"""The structlog logger of a trace: one event, one dict, one line of JSON, one buffered write.

In a module of its own because structlog takes longer to import than the rest of kvcore.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from typing import Any, BinaryIO, cast

import orjson
import structlog

from kvcore.trace.runs import encode_runs


class TraceLogger(structlog.BoundLoggerBase):
    """Bound once a trace. Its context is what has been written: `n`, `t`, `events`."""

    def line(self, event: str, now: int, /, **fields: Any) -> None:
        """Write one line. Costs 0.7 µs, twice what orjson alone takes."""
        written = self._context
        record = {"n": written["n"], "t": now, "event": event, **fields}
        (encode,) = self._processors
        self._logger.write(encode(self._logger, event, record))
        written["n"] += 1
        written["t"] = now
        written["events"][event] += 1


def bind_logger(file: BinaryIO) -> TraceLogger:
    """Return a logger that writes its lines to `file`, from line 0 on."""
    logger = structlog.wrap_logger(
        file,
        processors=[_encode],
        wrapper_class=TraceLogger,
        context_class=dict,
        cache_logger_on_first_use=False,
    )
    return cast("TraceLogger", logger.bind(n=0, t=0, events=defaultdict(int)))


def written(logger: TraceLogger) -> tuple[int, int, dict[str, int]]:
    """Return how many lines `logger` wrote, the time of the last, and events by name."""
    context = structlog.get_context(logger)
    return context["n"], context["t"], dict(context["events"])


def _encode(_: object, __: str, record: Any) -> bytes:
    return orjson.dumps(record, _other, orjson.OPT_APPEND_NEWLINE)


def _other(value: object) -> object:
    """Turn what JSON has no word for into what the schema wants: ids into runs."""
    if type(value) is array:
        return encode_runs(value)
    raise TypeError
