"""The residency statistics of a recorded run, rebuilt from its trace."""

from __future__ import annotations

import os

from kvcore.cache import Residency
from kvcore.trace import events
from kvcore.trace.events import methods_by_event
from kvcore_replay.state.cache import CacheState, path, run_blocks, take_by
from kvcore_replay.state.replicas import ServerReader


def rebuild_residency(
    file: str | os.PathLike[str], replica: int | str | None = None
) -> Residency:
    """Return the residency statistics of the run that a trace has recorded.

    They follow from the state before each line: HIT accesses the spans on its path, COMMIT
    stores blocks, EVICT of scope `cache` removes them, and the halves of a SPLIT were stored
    together. Costs about 5 µs a line.

    Args:
        file: path of the trace.
        replica: the replica of a cluster, as for `ServerReader`.

    Raises:
        InputError: the file cannot be opened.
        TraceError: a line is damaged, or the file is cut.
    """
    reader = ServerReader(file, replica)
    rebuilt = reader.feed(_RebuiltResidency)
    reader.require_complete()
    return rebuilt.residency


class _RebuiltResidency:
    """Feeds a `Residency` from the events of a trace."""

    def __init__(self, header: events.Header) -> None:
        self.residency = Residency(header.blocks)
        self._state = CacheState(header)
        self._stored: dict[int, int] = {}
        self._record = methods_by_event(self, "HIT", "SPLIT", "COMMIT", "EVICT")

    def take(self, event: events.Event) -> None:
        """Record an event, and apply it to the state."""
        take_by(self._record, event)
        self._state.apply(event)

    def _hit(self, event: events.Hit) -> None:
        if event.again:
            return
        for span in path(self._state.span(event.span)):
            self.residency.record_hit(event.t - span.last_access, len(span.ids))

    def _split(self, event: events.Split) -> None:
        self._stored[event.upper] = self._stored.get(event.span, 0)

    def _commit(self, event: events.Commit) -> None:
        if event.how in ("new", "grown"):
            self._stored.setdefault(event.span, event.t)
            keys, end = self._state.keys_of(event), event.first + event.blocks
            self.residency.record_store(keys, event.first, end, self._state.layout.ratio)

    def _evict(self, event: events.Evict | events.Drop) -> None:
        if event.scope == "sequence":
            return
        span, blocks = self._state.span(event.span), run_blocks(event.runs)
        rested = event.age, event.t - self._stored[span.id], event.hits
        content = span.keys, span.end - blocks, span.end, self._state.layout.ratio
        self.residency.record_evict(*content, rested, event.reason)
        if blocks == len(span.ids):
            del self._stored[span.id]
