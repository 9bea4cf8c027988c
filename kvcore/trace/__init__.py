"""The trace: every decision as a line of JSON, read back and checked."""

from kvcore.errors import StorageError
from kvcore.trace.reader import TraceReader, read_events
from kvcore.trace.replay import Report, replay
from kvcore.trace.requests import TraceWorkload, read_request
from kvcore.trace.residency import residency
from kvcore.trace.runs import decode_runs, encode_runs
from kvcore.trace.schema import EVENTS, SCHEMA
from kvcore.trace.state import CacheState
from kvcore.trace.writer import Trace

__all__ = [
    "EVENTS",
    "SCHEMA",
    "CacheState",
    "Report",
    "StorageError",
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
