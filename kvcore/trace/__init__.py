"""The trace: every decision as a line of JSON, read back and checked."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore.trace.check import Report, check_trace, replay
    from kvcore.trace.fields import SCHEMA, EvictionDigest, decode_runs, encode_runs
    from kvcore.trace.reader import (
        TraceReader,
        TraceWorkload,
        json_schema,
        read_events,
        read_request,
    )
    from kvcore.trace.replicas import ServerReader
    from kvcore.trace.residency import rebuild_residency
    from kvcore.trace.server_check import TraceChecker
    from kvcore.trace.state import CacheState
    from kvcore.trace.writer import Trace
else:
    __getattr__, __dir__ = deferred(
        __name__,
        {
            "check": "Report check_trace replay",
            "fields": "SCHEMA EvictionDigest decode_runs encode_runs",
            "reader": "TraceReader TraceWorkload json_schema read_events read_request",
            "replicas": "ServerReader",
            "residency": "rebuild_residency",
            "server_check": "TraceChecker",
            "state": "CacheState",
            "writer": "Trace",
        },
    )

__all__ = [
    "SCHEMA",
    "CacheState",
    "EvictionDigest",
    "Report",
    "ServerReader",
    "Trace",
    "TraceChecker",
    "TraceReader",
    "TraceWorkload",
    "check_trace",
    "decode_runs",
    "encode_runs",
    "json_schema",
    "read_events",
    "read_request",
    "rebuild_residency",
    "replay",
]
