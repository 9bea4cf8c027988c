"""The trace: every decision as a line of JSON."""

from kvcore.trace.writer import Trace

__all__ = ["Trace"]
