"""How long blocks rested in a recorded run, told from the lines of its trace alone."""

from __future__ import annotations

import os

from kvcore.cache import Residency
from kvcore.errors import TraceError
from kvcore.trace.reader import Line, TraceReader
from kvcore.trace.replay import advanced
from kvcore.trace.state import CacheState
from kvcore.trace.tables import path


def residency(file: str | os.PathLike[str]) -> Residency:
    """Return what a `Residency` would have been told in the run that a trace has recorded.

    The state before each line says how old its blocks are: a HIT ages the spans on its path,
    a COMMIT stores, an EVICT of scope `cache` ends lives, and the halves of a SPLIT have one
    birth. Every line is checked, as by `replay`. Costs some 10 µs a line.

    Raises:
        InputError: the file cannot be opened.
        TraceError: a line is damaged, contradicts what came before, or the file is cut.
    """
    reader = TraceReader(file)
    state: CacheState | None = None
    listener: _Listener | None = None
    for line in reader:
        if listener is not None:
            listener.hear(line)
        state = advanced(reader, state, line)
        listener = listener or _Listener(line, state)
    if listener is None or not reader.complete:
        msg = f"{reader.file}: incomplete: {reader.cut_reason}"
        raise TraceError(msg)
    return listener.seen


class _Listener:
    """Tells a `Residency` of each line before it is checked; a wrong one ends it all."""

    def __init__(self, header: Line, state: CacheState) -> None:
        self.seen = Residency(header["blocks"])
        self._state = state
        self._ratio = max(1, header["key_tokens"] // header["block_size"])
        self._born: dict[int, int] = {}

    def hear(self, line: Line) -> None:
        """Take in a line."""
        event = line["event"]
        if event == "HIT" and "again" not in line:
            self._hit(line)
        elif event == "SPLIT":
            self._born[line["upper"]] = self._born.get(line["span"], 0)
        elif event == "COMMIT" and line["how"] in ("new", "grown"):
            self._stored(line)
        elif event == "EVICT" and line["scope"] == "cache":
            self._evicted(line)

    def _hit(self, line: Line) -> None:
        span = self._state.spans.get(line["span"])
        if span is not None:
            for each in path(span):
                self.seen.aged(line["t"] - each.last_access, len(each.ids))

    def _stored(self, line: Line) -> None:
        self._born.setdefault(line["span"], line["t"])
        seq, first = self._state.sequences.get(line["seq"]), line["first"]
        if seq is not None:
            self.seen.entered(seq.prompt.keys, first, first + line["blocks"], self._ratio)

    def _evicted(self, line: Line) -> None:
        span = self._state.spans.get(line["span"])
        if span is None:
            return
        blocks = sum(abs(count) for _, count in line["runs"])
        rested = line["age"], line["t"] - self._born[span.id], line["hits"]
        place = span.keys, span.end - blocks, span.end, self._ratio
        self.seen.left(*place, rested, line["reason"])
        if blocks == len(span.ids):
            del self._born[span.id]
