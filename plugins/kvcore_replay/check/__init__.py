"""The check of a trace: its lines must describe a run that could have happened."""

from kvcore_replay.check.trace import Report, check_trace, replay

__all__ = ["Report", "check_trace", "replay"]
