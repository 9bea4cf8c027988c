"""The trace: every decision as a line of JSON, read back and checked."""

from kvcore.trace.check import Report, replay, residency
from kvcore.trace.events import EVENTS, SCHEMA, decode_runs, encode_runs
from kvcore.trace.reader import TraceReader, TraceWorkload, read_events, read_request
from kvcore.trace.state import CacheState
from kvcore.trace.writer import Trace

__all__ = [
    "EVENTS",
    "SCHEMA",
    "CacheState",
    "Report",
    "Trace",
    "TraceReader",
    "TraceWorkload",
    "decode_runs",
    "encode_runs",
    "read_events",
    "read_request",
    "replay",
    "residency",
]
