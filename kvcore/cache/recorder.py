"""What the cache asks of a trace: one line a decision."""

from __future__ import annotations

from typing import Any, Protocol

from kvcore.request import Request


class Recorder(Protocol):
    """Somewhere decisions are written down; `kvcore.Trace` is the one that writes JSONL."""

    def begin(self, **fields: Any) -> None:
        """Take what the cache is made of, for the header."""

    def describe(self, **fields: Any) -> None:
        """Take more of the header, before the first line is written."""

    def request(self, request: Request, now: int) -> None:
        """Write that `request` arrived, the first time it is heard of."""

    def line(self, event: str, now: int, **fields: Any) -> None:
        """Write one event at `now` (ns)."""
