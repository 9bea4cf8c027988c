"""A trace without names: who asked what is known by keyed hashes alone."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import orjson

from kvcore.progress import Tick, ticked, unseen
from kvcore.trace.jsonl_file import SealedWriter
from kvcore_plugins.traces.keyed import KeyedNames
from kvcore_plugins.traces.reader import read_events

NAMES = ("salt", "tenant", "session", "tool")
"""Fields with names of people, applications and conversations."""

REQUESTS = ("id", "request", "for", "after")
"""Fields with the id of a request, which may be any text."""

KEYS = ("keys", "output_keys")
"""Fields with keys of blocks, which are hashes of prompts."""


class _TraceCopy(SealedWriter):
    """Writes the lines of a trace again, with their numbers and an END of its own."""

    def __init__(self, file: str | os.PathLike[str]) -> None:
        super().__init__(file, kind="trace")
        self.counts: Counter[str] = Counter()
        self._time = 0

    def write(self, line: dict[str, Any]) -> None:
        """Write a line that is not END."""
        self.counts[line["event"]] += 1
        self._time = line["t"]
        self._buffer.write(orjson.dumps(line) + b"\n")

    def _write_end(self) -> None:
        lines = self.counts.total()
        end = {"n": lines, "t": self._time, "event": "END", "lines": lines}
        end |= {"events": dict(self.counts), "digest": self._digest_so_far()}
        self._buffer.write(orjson.dumps(end) + b"\n")


def anonymise(trace: Path, out: Path, names: KeyedNames, tick: Tick = unseen) -> int:
    """Write a trace with hashed names, without its workload; return how many lines it has.

    Lengths, times and decisions stay, and the options of plugins in the header.

    Raises:
        TraceError: the trace is damaged or cut off.
        StorageError: the disk is full.
    """
    reader = read_events(trace)
    with _TraceCopy(out) as copy:
        for event in ticked(reader, tick):
            line = event.as_dict()
            if event.event == "HEADER":
                line["workload"] = None  # its digest tells a file of prompts
                line["anonymised"] = True
            elif event.event != "END":
                _hash_names(line, names)
            if event.event != "END":
                copy.write(line)
        reader.require_complete()
    return copy.counts.total() + 1  # with END


def _hash_names(line: dict[str, Any], names: KeyedNames) -> None:
    """Replace the names in a line."""
    for field in NAMES:
        if field in line:
            line[field] = names.name(field, line[field])
    for field in REQUESTS:
        if isinstance(line.get(field), str):
            line[field] = names.name("request", line[field])
    for field in KEYS:
        if field in line:
            line[field] = [key.hex() for key in names.keys(line[field])]
