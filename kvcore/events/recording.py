"""Recordings of KV events: JSON lines, a batch each, written to a file that is whole or not."""

from __future__ import annotations

import os
from typing import Any

import orjson

from kvcore.errors import InputError
from kvcore.events.codecs import write_value
from kvcore.events.model import Batch, Unread
from kvcore.events.plain import to_json
from kvcore.trace.sealed import SealedFile
from kvcore.trace.sink import Sink
from kvcore.trace.writer import version

SCHEMA = 1
"""The schema that this version writes, and the only one it reads."""

BUFFER_BYTES = 1 << 16


class RecordingWriter(SealedFile):
    """Writes batches to a JSONL file, `.gz` and `.zst` by name, as they come.

    Close it when the stream is over, best by a `with` block: only then the file appears
    under its name. An exception leaves nothing; a process that is killed leaves
    `<path>.part`, readable at least up to the last `flush`.

    Lines are numbered (`n`). The first is RECORDING: schema, version, format, engine. Then
    come BATCH (publisher, number, and what the payload unpacks to), GAP (publisher, first
    number missing, how many, why), RESTART (publisher) and GARBAGE (publisher, why); at the
    end END, with the number of lines of each kind and the digest of all before it.

    Args:
        file: the path.
        format: of most of the batches; others say theirs.
        engine: what published them, if that is known: told to readers, no more.

    Attributes:
        lines: written so far, by kind.

    Raises:
        InputError: the file cannot be opened, or `<path>.part` is there.
        StorageError: the disk is full (from any method).
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        *,
        format: str = "msgpack",  # noqa: A002 - what it is called in the file
        engine: str | None = None,
    ) -> None:
        """Open the file and write RECORDING."""
        self.lines: dict[str, int] = {}
        self._format = format
        super().__init__(Sink(file, kind="recording"), BUFFER_BYTES)
        self._line("RECORDING", schema=SCHEMA, kvcore=version(), format=format, engine=engine)

    def batch(self, batch: Batch, seq: int | None = None, publisher: int | None = None) -> None:
        """Write a batch; `seq` and `publisher` are what the transport knows of it.

        Raises:
            InputError: its format cannot say what it holds. Nothing is written.
        """
        about = {"publisher": publisher, "seq": seq, "format": batch.format}
        if batch.format == self._format:
            del about["format"]
        about = {name: value for name, value in about.items() if value is not None}
        self._line("BATCH", **about, value=to_json(write_value(batch)))

    def gap(
        self, first: int, count: int, publisher: int | None = None, why: str | None = None
    ) -> None:
        """Write that `count` batches from number `first` on are lost."""
        self._line("GAP", publisher=publisher, first=first, count=count, why=why)

    def restart(self, publisher: int | None = None) -> None:
        """Write that a publisher began anew."""
        self._line("RESTART", publisher=publisher)

    def garbage(self, why: str, publisher: int | None = None) -> None:
        """Write that a message was no batch."""
        self._line("GARBAGE", publisher=publisher, why=why)

    def flush(self) -> None:
        """Hand on what is held back, so that a process that is killed a moment later leaves it.

        Costs a file that is compressed some bytes.
        """
        self._buffer.flush()
        self._sink.sync()

    def _end(self) -> None:
        self._buffer.flush()
        self._line("END", lines=dict(self.lines), digest=self._sink.hexdigest())

    def _line(self, kind: str, **fields: Any) -> None:
        if self._closed:
            msg = f"{kind} after the end: the recording {self._sink.name} is closed"
            raise InputError(msg)
        given = {name: value for name, value in fields.items() if value is not None}
        line = orjson.dumps({"n": sum(self.lines.values()), "kind": kind, **given})
        self._buffer.write(line + b"\n")
        self.lines[kind] = self.lines.get(kind, 0) + 1


def unread(batch: Batch) -> list[str]:
    """Return why events of a batch could not be read; none: all were."""
    return [event.reason for event in batch.events if isinstance(event, Unread)]
