"""What the cache asks of a trace: one line a decision."""

from __future__ import annotations

from typing import Any, Protocol

from kvcore.request import Request


class Recorder(Protocol):
    """Somewhere decisions are written down; `kvcore.Trace` is the one that writes JSONL."""

    def begin(self, **fields: Any) -> None:
        """Write the header, with what the cache is made of."""

    def request(self, request: Request, now: int) -> None:
        """Write that `request` arrived, the first time it is heard of."""

    def line(self, event: str, now: int, **fields: Any) -> None:
        """Write one event at `now` (ns)."""
