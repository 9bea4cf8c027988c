"""Recordings of KV events: JSONL files, written from a subscription or from batches, and read.

Files of JSON events, as TensorRT-LLM and Dynamo write them, are read as recordings too.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, TypeAlias

import attrs
import msgspec
import orjson

from kvcore.errors import InputError, StorageError, TraceError
from kvcore.files import (
    CutError,
    DamageError,
    decompressed,
    part_path,
)
from kvcore.trace.fields import version
from kvcore.trace.jsonl_file import SealedWriter
from kvcore.untrusted import (
    BYTES_OF_LINE,
    FREE_LINES,
    RECORDING_EXPANSION,
    line_fault,
    parse_json,
)
from kvcore.workloads.files import lines
from kvcore_events.formats import (
    FORMATS,
    decode,
    json_format,
    read_value,
    write_value,
)
from kvcore_events.model import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Count,
    DecodeError,
    EventBatch,
    PagesStored,
    UnparsedEvent,
    parse,
)
from kvcore_events.sequencer import Delivery, Gap, InvalidMessage, Restart, StreamItem
from kvcore_events.subscriber import Subscriber
from kvcore_plugins.traces.sealed import SealedReader

__all__ = [
    "Lost",
    "Received",
    "RecordingReader",
    "RecordingWriter",
    "Restarted",
    "Skipped",
    "Tally",
    "is_recording",
    "record",
    "unparsed_reasons",
]

SCHEMA = 1
"""The schema that this version writes, and the only one it reads."""

BUFFER_BYTES = 1 << 16

FLUSH_SECONDS = 1.0
"""Seconds between two flushes of a live recording, in case the process is killed."""

MOST_WARNINGS = 5
"""Most warnings about unparsed events of one batch."""

NO_RECORDING = (
    "no recording of KV events: its first line is neither RECORDING, nor an event of "
    "TensorRT-LLM or Dynamo"
)


@attrs.frozen
class Received:
    """A batch of a recording, with its number and its publisher in the transport."""

    batch: EventBatch
    seq: int | None
    publisher: int | None


class _Line(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True
):
    publisher: Count | None = None


class Lost(_Line, frozen=True, kw_only=True, tag="GAP"):
    """`count` batches from number `first` on are lost."""

    first: Count
    count: Count
    why: str | None = None


class Restarted(_Line, frozen=True, tag="RESTART"):
    """A publisher has restarted."""


class Skipped(_Line, frozen=True, kw_only=True, tag="GARBAGE"):
    """A message that was no batch was skipped."""

    why: str


class _Batch(_Line, frozen=True, kw_only=True, tag="BATCH"):
    value: list[Any] | dict[str, Any]
    seq: Count | None = None
    format: str | None = None


class _End(_Line, frozen=True, kw_only=True, tag="END"):
    lines: dict[str, int]
    digest: str


_HEAD = 48
"""Bytes of a line that include its kind, after a number of up to 20 digits."""

_KINDS: tuple[type[_Line], ...] = (_Batch, Lost, Restarted, Skipped, _End)
_LINES = {str(kind.__struct_config__.tag): kind for kind in _KINDS}

RecordedItem: TypeAlias = Received | Lost | Restarted | Skipped


class RecordingWriter(SealedWriter):
    """Writes batches to a JSONL file as they come, compressed if it is named `.gz` or `.zst`.

    Close it at the end of the stream, best by a `with` block: only then has the file its name.
    An exception, such as that of a full disk, and a killed process leave `<path>.part`,
    readable at least up to the last `flush`; an exception before the first batch leaves no
    file.

    Lines are numbered (`n`). The first is RECORDING: schema, version, format, engine. Then
    come BATCH (publisher, number, and what the payload unpacks to), GAP (publisher, first
    number missing, how many, why), RESTART (publisher) and GARBAGE (publisher, why); at the
    end END, with the number of lines of each kind and the digest of all before it.

    With `rotate_bytes` or `rotate_seconds` the recording is in pieces, each a complete file,
    named by `piece_path` with the next free number.

    Args:
        file: the path.
        format: format of most batches; lines of other batches name theirs.
        engine: name of the publishing engine, for readers.
        rotate_bytes: size of its file at which `rotate` ends a piece; None: no size.
        rotate_seconds: age at which `rotate` ends a piece; None: no age.

    Attributes:
        lines: number of lines by kind; with pieces, of the present one.
        pieces: number of complete files.

    Raises:
        InputError: the file cannot be opened, or another process writes `<path>.part`.
        StorageError: the disk is full (from any method).
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        *,
        format: str = "msgpack",  # noqa: A002 - what it is called in the file
        engine: str | None = None,
        rotate_bytes: int | None = None,
        rotate_seconds: float | None = None,
    ) -> None:
        """Open the file and write RECORDING."""
        self._path = Path(file)
        self._format, self._engine = format, engine
        self._rotates = (rotate_bytes, rotate_seconds) != (None, None)
        self._most_bytes = math.inf if rotate_bytes is None else rotate_bytes
        self._most_seconds = math.inf if rotate_seconds is None else rotate_seconds
        self.pieces = 0
        self._begin()

    def _begin(self) -> None:
        path = next_piece(self._path) if self._rotates else self._path
        super().__init__(path, kind="recording", buffer_bytes=BUFFER_BYTES)
        self.lines: dict[str, int] = {}
        self._begun = monotonic()
        self._line(
            "RECORDING",
            schema=SCHEMA,
            kvcore=version(),
            format=self._format,
            engine=self._engine,
        )

    def rotate(self) -> None:
        """Start a new piece if this one is open, has a batch, and is large or old enough."""
        if self._closed or "BATCH" not in self.lines:
            return
        large = self._sink.size >= self._most_bytes
        if large or monotonic() - self._begun >= self._most_seconds:
            self.close()
            self._begin()

    def close(self) -> None:
        """Write END and give the file its name; discard a later piece that is empty.

        A second call does nothing.

        Raises:
            StorageError: the disk is full; `<path>.part` is kept.
        """
        if self._closed:
            return
        if self.pieces and len(self.lines) == 1:
            self.discard()
            return
        super().close()
        self.pieces += 1

    def give_up(self, error: BaseException | None) -> None:
        """Finish the file without END because of `error`; keep it if it has a batch.

        Raises:
            StorageError: `error` is one; says what is kept, and how to read it.
        """
        part = part_path(Path(self.name))
        if "BATCH" not in self.lines or part == Path(self.name):
            self.discard()
            return
        self.keep()
        if isinstance(error, StorageError) and part.exists():
            msg = (
                f"{error}. {part} keeps what was written before, {_count_batches(part):,} "
                f"batches: 'kvcore replay {part}' shows them"
            )
            raise StorageError(msg) from error

    def batch(
        self, batch: EventBatch, seq: int | None = None, publisher: int | None = None
    ) -> None:
        """Write a batch, with its number and its publisher in the transport.

        Raises:
            InputError: its format cannot express what it holds, or its line would be larger
                than readers take: 16 MiB and 2^20 values. Nothing is written.
        """
        other = None if batch.format == self._format else batch.format
        value = to_json(write_value(batch))
        self._line("BATCH", publisher=publisher, seq=seq, format=other, value=value)

    def gap(
        self, first: int, count: int, publisher: int | None = None, why: str | None = None
    ) -> None:
        """Write that `count` batches from number `first` on are lost."""
        self._line("GAP", publisher=publisher, first=first, count=count, why=why)

    def restart(self, publisher: int | None = None) -> None:
        """Write that a publisher has restarted."""
        self._line("RESTART", publisher=publisher)

    def invalid_message(self, why: str, publisher: int | None = None) -> None:
        """Write that a message was no batch."""
        self._line("GARBAGE", publisher=publisher, why=why)

    def _write_end(self) -> None:
        self._line("END", lines=dict(self.lines), digest=self._digest_so_far())

    def _line(self, kind: str, **fields: Any) -> None:
        if self._closed:
            msg = f"{kind} after the end: the recording {self.name} is closed"
            raise InputError(msg)
        present = {name: value for name, value in fields.items() if value is not None}
        line = orjson.dumps({"n": sum(self.lines.values()), "kind": kind, **present})
        if fault := line_fault(line):
            msg = f"{kind} cannot be read again: {fault}"
            raise InputError(msg)
        self._buffer.write(line + b"\n")
        self.lines[kind] = self.lines.get(kind, 0) + 1


def piece_path(file: Path, number: int) -> Path:
    """Return the path of a piece of a recording: the first is `r-000001.jsonl.gz`."""
    stem, suffixes = _split_name(file)
    return file.with_name(f"{stem}-{number:06}{suffixes}")


def _split_name(file: Path) -> tuple[str, str]:
    """Return the name of a file and its suffixes, such as `.jsonl.gz`."""
    compression = file.suffix if file.suffix in (".gz", ".zst") else ""
    plain = Path(file.name.removesuffix(compression))
    return plain.stem, plain.suffix + compression


def next_piece(file: Path) -> Path:
    """Return the path of the piece after the last one that is a file or a `.part`."""
    stem, suffixes = map(re.escape, _split_name(file))
    names = re.compile(rf"{stem}-(\d{{6,}}){suffixes}(?:\.part.*)?")
    matches = (names.fullmatch(other.name) for other in file.parent.glob("*"))
    return piece_path(file, 1 + max((int(match[1]) for match in matches if match), default=0))


def _count_batches(part: Path) -> int:
    """Return the number of batches of an unfinished recording, without decoding them."""
    batches, head = 0, b""
    with suppress(OSError, CutError, DamageError), part.open("rb") as file:
        for piece in decompressed(file):
            first, *others = piece.split(b"\n")
            # Only the heads of lines are kept: a line may be long.
            lines = [head + first, *others]
            batches += sum(b'"kind":"BATCH"' in line[:_HEAD] for line in lines[:-1])
            head = lines[-1][:_HEAD]
    return batches


class RecordingReader(SealedReader["RecordedItem | None"]):
    """Reads a recording once, line by line; compression is recognised by the first bytes.

    Iteration yields batches, gaps, restarts and skipped messages, in order. A file without END
    is *incomplete*: all items before the cut are yielded, then iteration ends. A file of
    events in JSON has no END and needs none.

    The placeholder tokens of an exported run compress a hundredfold; they cost time to read
    but no memory. To bound the cost of lines too, a file may have 100,000 lines, and one more
    for each 4 of its bytes.

    Attributes:
        file: the path, as given.
        line: line number, from 1, of the item yielded last.
        header: the line RECORDING, once it is read; of other files only the format.
        complete: whether nothing is missing at the end of the file.
        cut_reason: where and how the file ends, if it is incomplete.

    Raises:
        InputError: the file cannot be opened.
        TraceError: it is no recording, or a line is damaged: file, line number, reason.
    """

    kind: ClassVar[str] = "recording"
    expansion: ClassVar[int] = RECORDING_EXPANSION

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Store the path; iteration opens it."""
        super().__init__(file)
        self._most_lines = FREE_LINES
        self.header: dict[str, Any] = {}
        self._kinds: dict[str, int] = {}

    def __iter__(self) -> Iterator[RecordedItem]:
        """Yield the items."""
        with suppress(OSError):
            self._most_lines = FREE_LINES + self.file.stat().st_size // BYTES_OF_LINE
        for item in super().__iter__():
            if item is not None:
                yield item
        if not self.header:
            self.cut_reason = self.cut_reason or "the file is empty"
            self.complete = False

    @property
    def _sealed(self) -> bool:
        return "schema" in self.header

    def _parse(self, raw: bytes) -> RecordedItem | None:
        """Return the item of a line; None for RECORDING and END."""
        if self.line > self._most_lines:
            self.fail(
                f"a file of this size has at most {self._most_lines:,} lines; if you trust it, "
                "decompress it first"
            )
        try:
            line = parse_json(raw)
        except orjson.JSONDecodeError as error:
            what = f"not JSON: {error.msg}, at column {error.colno}"
            self.fail(what if self.header else f"{NO_RECORDING} ({what})")
        if type(line) is not dict:
            self.fail("a line must be a JSON object" if self.header else NO_RECORDING)
        if self._sealed or line.get("kind") == "RECORDING":
            self._must_be_as_written(raw, line)
        return self._item(line) if self.header else self._header(line)

    def _header(self, line: dict[str, Any]) -> RecordedItem | None:
        name = _first_line_format(line)
        if name is None:
            self.fail(NO_RECORDING)
        if line.get("kind") != "RECORDING":
            self.header = {"format": name}
            return self._item(line)
        if line.get("schema") != SCHEMA:
            self.fail(f"schema {line.get('schema')!r}; this version reads schema {SCHEMA}")
        if name not in FORMATS:
            self.fail(f"format {name!r} is not known; there are: {', '.join(FORMATS)}")
        self.header = line
        self._kinds["RECORDING"] = 1
        return None

    def _item(self, value: dict[str, Any]) -> RecordedItem | None:
        if not self._sealed:
            return Received(self._batch(value, self.header["format"]), None, None)
        match line := self._line(value):
            case _Batch():
                batch = self._batch(line.value, line.format or self.header["format"])
                return Received(batch, line.seq, line.publisher)
            case Lost() | Restarted() | Skipped():
                return line
        self._expect_end({"n": self.line - 1, "kind": "END", "lines": self._kinds})
        return None

    def _line(self, value: dict[str, Any]) -> _Line:
        """Return a line by its kind, after checking its fields and its number."""
        kind = value.get("kind")
        if type(kind) is not str or kind not in _LINES:
            self.fail(f"unknown kind of line {kind!r}; there are: {', '.join(_LINES)}")
        n = value.pop("n", None)
        if n != self.line - 1:
            self.fail(f"this line has n = {n}; {self.line - 1} stand before it")
        try:
            line = parse(value, _LINES[kind], kind)
        except DecodeError as error:
            self.fail(str(error))
        if kind != "END":
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
        return line

    def _batch(self, value: Any, name: str) -> EventBatch:
        try:
            return read_value(from_json(value) if self._sealed else value, name)
        except (InputError, ValueError, RecursionError) as error:
            self.fail(str(error))


def first_json(path: Path) -> Any:
    """Return the JSON value of the first line of a file; None if it is not JSON.

    Raises:
        InputError: as `lines` does.
    """
    with closing(lines(path)) as source, suppress(orjson.JSONDecodeError):
        return parse_json(next(source)[1])
    return None


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Return True if a file begins as a recording, or as events in JSON do.

    A file that can be read only once, such as a pipe, is not read: the answer is False.
    """
    try:
        file = Path(path)
        return file.is_file() and _first_line_format(first_json(file)) is not None
    except (OSError, InputError):
        return False


def _first_line_format(line: Any) -> str | None:
    """Return the format that a first line names; None: it is no recording."""
    if type(line) is dict and line.get("kind") == "RECORDING":
        name = line.get("format")
        return name if type(name) is str else None
    return json_format(line)


@attrs.define
class Tally:
    """Running counts of a recording.

    Attributes:
        batches: number of written batches; `replayed`: of those from a replay.
        stored, removed: number of blocks in the events; one that is stored twice counts twice.
        cleared: number of events that dropped all blocks.
        unread: number of events that cannot be parsed; they are written unchanged.
        gaps: number of gaps; `missing`: of batches in them, or that cannot be decoded.
        restarts: number of restarts of publishers.
        garbage: number of messages that were no batch.
    """

    batches: int = 0
    replayed: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    unread: int = 0
    gaps: int = 0
    missing: int = 0
    restarts: int = 0
    garbage: int = 0

    def add(self, batch: EventBatch) -> None:
        """Count a batch and its events."""
        self.batches += 1
        for event in batch.events:
            match event:
                case BlockStored(hashes=blocks) | PagesStored(pages=blocks):
                    self.stored += len(blocks)
                case BlockRemoved(hashes=hashes):
                    self.removed += len(hashes)
                case AllBlocksCleared():
                    self.cleared += 1
                case UnparsedEvent():
                    self.unread += 1


def record(
    subscriber: Subscriber,
    writer: RecordingWriter,
    *,
    seconds: float | None = None,
    batches: int | None = None,
    warn: Callable[[str], None] = lambda _: None,
    progress: Callable[[Tally], None] = lambda _: None,
) -> Tally:
    """Record the batches that a subscriber receives, until `stop` or a limit is reached.

    At `stop` and after `seconds` the batches received by then are written, for at most five
    seconds: the recording ends before those that are unread then, and `warn` is told. A batch
    that cannot be decoded is written as a gap of one. The file is flushed each second. The
    writer is left open.

    Args:
        subscriber: the source of the items.
        writer: the recording.
        seconds: time limit in seconds; None: no limit.
        batches: most batches to write; None: no limit.
        warn: called with a sentence for each item that is no batch, and each unparsed event.
        progress: called with the tally after each item.

    Returns:
        The tally of the written items.

    Raises:
        StorageError: the disk is full.
    """
    tally = Tally()

    def take(item: StreamItem) -> bool:
        """Write an item; return True if no further batch is to be written."""
        for sentence in _write(item, writer, tally):
            warn(sentence)
        progress(tally)
        writer.rotate()
        return tally.batches == batches

    end = math.inf if seconds is None else monotonic() + seconds
    while not subscriber.stopped and (left := end - monotonic()) > 0:
        with closing(subscriber.items(min(left, FLUSH_SECONDS))) as items:
            for item in items:
                if take(item):
                    return tally
        writer.flush()
        writer.rotate()
    for item in subscriber.drain():
        if take(item):
            return tally
    if subscriber.unread:
        came = f"{subscriber.unread:,} messages that came last were not read in time"
        warn(f"{came}: the recording ends before them")
    return tally


def _write(item: StreamItem, writer: RecordingWriter, tally: Tally) -> list[str]:
    """Write and count an item; return the warnings."""
    match item:
        case Delivery(rank, sequence, payload, replayed):
            try:
                batch = decode(payload)
                writer.batch(batch, seq=sequence, publisher=rank)
            except (TraceError, InputError) as error:
                lost = Gap(rank, sequence, sequence, f"it cannot be read: {error}")
                return _write(lost, writer, tally)
            tally.add(batch)
            tally.replayed += replayed
            where = f"rank {rank}: batch {sequence}: an event cannot be read"
            reasons = unparsed_reasons(batch)
            if (others := len(reasons) - MOST_WARNINGS) > 0:
                reasons[MOST_WARNINGS:] = [f"and {others:,} others of the batch"]
            return [f"{where}: {reason}" for reason in reasons]
        case Gap(rank, first, _, reason):
            writer.gap(first, item.batches, publisher=rank, why=reason)
            tally.gaps += 1
            tally.missing += item.batches
        case Restart(rank):
            writer.restart(publisher=rank)
            tally.restarts += 1
        case InvalidMessage(rank, reason):
            writer.invalid_message(reason, publisher=rank)
            tally.garbage += 1
    return [str(item)]


def unparsed_reasons(batch: EventBatch) -> list[str]:
    """Return the reasons of the unparsed events of a batch."""
    return [event.reason for event in batch.events if isinstance(event, UnparsedEvent)]


def to_json(value: Any) -> Any:
    """Return `value` for JSON: bytes as `{"$bytes": hex}`, infinities as `{"$float": text}`.

    Names that begin with `$` get a second `$`. A NaN is read as a NaN again.
    """
    match value:
        case bytes():
            return {"$bytes": value.hex()}
        case float() if not math.isfinite(value):
            return {"$float": str(value)}
        case dict():
            return {_escaped(name): to_json(item) for name, item in value.items()}
        case list() | tuple():
            return value if _all_plain(value) else [to_json(item) for item in value]
    return value


def from_json(value: Any) -> Any:
    """Return the value that `to_json` encoded, with lists in place of tuples.

    Raises:
        ValueError: a name begins with `$`, and `to_json` writes no such name.
    """
    match value:
        case {"$bytes": str() as text} if len(value) == 1:
            return bytes.fromhex(text)
        case {"$float": str() as text} if len(value) == 1:
            return float(text)
        case dict():
            return {_unescaped(name): from_json(item) for name, item in value.items()}
        case list():
            return value if _all_plain(value) else [from_json(item) for item in value]
    return value


def _all_plain(values: list[Any] | tuple[Any, ...]) -> bool:
    """Return True if JSON holds all items as they are, as it does those of most long lists."""
    return set(map(type, values)) <= {int, str, bool, type(None)}


def _escaped(name: str) -> str:
    return f"${name}" if name.startswith("$") else name


def _unescaped(name: str) -> str:
    if not name.startswith("$"):
        return name
    if not name.startswith("$$"):
        msg = f"the name {name!r} is none that a recording has"
        raise ValueError(msg)
    return name[1:]
