"""The trace: every decision as a line of JSON, read back and checked."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore.trace.check import Report, check_trace, replay
    from kvcore.trace.fields import (
        SCHEMA,
        EvictionDigest,
        decode_runs,
        encode_runs,
        read_request,
    )
    from kvcore.trace.reader import (
        ServerReader,
        TraceReader,
        TraceWorkload,
        json_schema,
        read_events,
    )
    from kvcore.trace.server_check import TraceChecker
    from kvcore.trace.state import CacheState, rebuild_residency
    from kvcore.trace.writer import Trace
else:
    __getattr__, __dir__ = deferred(
        __name__,
        {
            "check": "Report check_trace replay",
            "fields": "SCHEMA EvictionDigest decode_runs encode_runs read_request",
            "reader": "ServerReader TraceReader TraceWorkload json_schema read_events",
            "server_check": "TraceChecker",
            "state": "CacheState rebuild_residency",
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
