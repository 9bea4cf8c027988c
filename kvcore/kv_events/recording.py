"""Reading recordings, and files of JSON events as engines and routers write them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn, TypeAlias

import attrs
import orjson

from kvcore.errors import InputError, TraceError
from kvcore.files import CutError, DamageError, decoded, refusal
from kvcore.kv_events import dynamo as router
from kvcore.kv_events import tensorrt_llm as polled
from kvcore.kv_events.codecs import FORMATS, MOST_BYTES, decode, encode, read_value, write_value
from kvcore.kv_events.fields import WrongError
from kvcore.kv_events.json_values import from_json, to_json
from kvcore.kv_events.model import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    PagesStored,
    Unread,
)
from kvcore.kv_events.subscriber import Delivery, Gap, Garbage, Item, Restart, Subscriber
from kvcore.trace.jsonl_file import DIGEST_BYTES, SealedWriter
from kvcore.trace.writer import version

NO_RECORDING = (
    "no recording of KV events: its first line is neither RECORDING, nor an event of "
    "TensorRT-LLM or Dynamo"
)


@attrs.frozen
class Received:
    """A batch of a recording, with what the transport knew of it."""

    batch: Batch
    seq: int | None
    publisher: int | None


@attrs.frozen
class Lost:
    """A gap: `count` batches from number `first` on."""

    publisher: int | None
    first: int
    count: int
    why: str | None


@attrs.frozen
class Restarted:
    """A publisher began anew."""

    publisher: int | None


@attrs.frozen
class Skipped:
    """A message was no batch."""

    publisher: int | None
    why: str


RecordedItem: TypeAlias = Received | Lost | Restarted | Skipped


LINES: dict[str, dict[str, tuple[type[Any], ...]]] = {
    "BATCH": {"value": (list, dict)},
    "GAP": {"first": (int,), "count": (int,)},
    "RESTART": {},
    "GARBAGE": {"why": (str,)},
    "END": {"lines": (dict,), "digest": (str,)},
}
"""By kind of line: the fields that it must have, and their types."""


COMMON = {"publisher": (int,), "seq": (int,), "format": (str,), "why": (str,)}
"""Fields that a line may have."""


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Say whether a file begins as a recording, or as events in JSON do.

    What can be read only once, such as a pipe, is left unread, and said to be none.
    """
    head = bytearray()
    try:
        if not Path(path).is_file():
            return False
        with Path(path).open("rb") as file:
            for piece in decoded(file):
                head += piece
                if b"\n" in piece or len(head) > MOST_BYTES:
                    break
    except (OSError, ValueError, CutError, DamageError):
        return False
    try:
        line = orjson.loads(head.partition(b"\n")[0])
    except orjson.JSONDecodeError:
        return False
    return _format(line) is not None


class RecordingReader:
    """Reads a recording once, line by line; `.gz` and `.zst` by their first bytes.

    Iterating yields batches, gaps, restarts and what was skipped, in their order. A file
    without END is *incomplete*: all before the cut is yielded, then iteration just ends.
    A file of events in JSON has no END and needs none.

    Attributes:
        file: the path, as given.
        line: the line number, from 1, of what was yielded last.
        header: RECORDING, once the first line is read; of other files only the format.
        complete, cut_reason: whether nothing is missing; where and how the file ends, if so.

    Raises:
        InputError: the file cannot be opened.
        TraceError: it is no recording, or a line is damaged: file, line number, reason.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Take the path; it is opened when iteration starts."""
        self.file = Path(file)
        self.line = 0
        self.header: dict[str, Any] = {}
        self.complete = False
        self.cut_reason: str | None = None
        self._kinds: dict[str, int] = {}
        self._digest = blake2b(digest_size=DIGEST_BYTES)

    def __iter__(self) -> Iterator[RecordedItem]:
        """Yield the items."""
        for raw in self._raw_lines():
            line = self._parsed(raw)
            item = self._header(line) if self.line == 1 else self._item(line)
            self._digest.update(raw + b"\n")
            if item is not None:
                yield item
        if self.cut_reason is None and self._sealed and "END" not in self._kinds:
            self.cut_reason = f"the file ends after line {self.line}, without END"
        if not self.header:
            self.cut_reason = self.cut_reason or "the file is empty"
        self.complete = self.cut_reason is None

    @property
    def _sealed(self) -> bool:
        return "schema" in self.header

    def fail(self, reason: str) -> NoReturn:
        """Raise TraceError for the line read last."""
        msg = f"{self.file}:{self.line}: {reason}"
        raise TraceError(msg)

    def _raw_lines(self) -> Iterator[bytes]:
        """Yield whole lines; note where the file is cut."""
        rest, cut = b"", None
        try:
            with self.file.open("rb") as file:
                for piece in decoded(file):
                    *whole, rest = (rest + piece).split(b"\n")
                    for raw in whole:
                        self.line += 1
                        yield raw
        except CutError as error:
            cut = str(error)
        except DamageError as error:
            self.line += 1
            self.fail(str(error))
        except OSError as error:
            msg = f"cannot read the recording {self.file}: {refusal(self.file, error)}"
            raise InputError(msg) from error
        if rest and not self._sealed and _is_json(rest):
            self.line += 1
            yield rest
        elif rest:
            cut = f"the file ends inside line {self.line + 1}"
        self.cut_reason = cut

    def _parsed(self, raw: bytes) -> dict[str, Any]:
        try:
            line = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            what = f"not JSON: {error.msg}, at column {error.colno}"
            self.fail(what if self.header else f"{NO_RECORDING} ({what})")
        if type(line) is not dict:
            self.fail("a line must be a JSON object" if self.header else NO_RECORDING)
        return line

    def _header(self, line: dict[str, Any]) -> RecordedItem | None:
        name = _format(line)
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

    def _item(self, line: dict[str, Any]) -> RecordedItem | None:
        if not self._sealed:
            return Received(self._batch(line, self.header["format"]), None, None)
        kind = self._checked(line)
        publisher, why = line.get("publisher"), line.get("why")
        match kind:
            case "BATCH":
                name = line.get("format", self.header["format"])
                return Received(self._batch(line["value"], name), line.get("seq"), publisher)
            case "GAP":
                return Lost(publisher, line["first"], line["count"], why)
            case "RESTART":
                return Restarted(publisher)
            case "GARBAGE":
                return Skipped(publisher, line["why"])
        self._check_end(line)
        return None

    def _checked(self, line: dict[str, Any]) -> str:
        """Return the kind of a line, after every check of its fields and number."""
        kind = line.get("kind")
        if type(kind) is not str or kind not in LINES:
            self.fail(f"unknown kind of line {kind!r}; there are: {', '.join(LINES)}")
        if "END" in self._kinds:
            self.fail("a line follows END")
        if line.get("n") != self.line - 1:
            self.fail(f"this line has n = {line.get('n')}; {self.line - 1} stand before it")
        required = LINES[kind]
        for name, value in line.items():
            types = required.get(name) or COMMON.get(name)
            if name in ("n", "kind"):
                continue
            negative = type(value) is int and value < 0
            if types is None or type(value) not in types or negative:
                self.fail(f"{kind} has a field {name!r} of {value!r:.60}")
        for name in required:
            if name not in line:
                self.fail(f"{kind} has no field {name!r}")
        if kind != "END":
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
        return kind

    def _batch(self, value: Any, name: str) -> Batch:
        try:
            return read_value(from_json(value) if self._sealed else value, name)
        except (WrongError, InputError, ValueError, RecursionError) as error:
            self.fail(str(error))

    def _check_end(self, line: dict[str, Any]) -> None:
        expected = {"lines": self._kinds, "digest": self._digest.hexdigest()}
        for name, value in expected.items():
            if line[name] != value:
                self.fail(f"END has {name} {line[name]!r}; the lines before it make {value!r}")
        self._kinds = {**self._kinds, "END": 1}


def _format(line: Any) -> str | None:
    """Return the format that a first line tells; None: it is no recording's."""
    if type(line) is not dict:
        return None
    if line.get("kind") == "RECORDING" and type(line.get("format")) is str:
        return str(line["format"])
    if polled.is_ours(line):
        return "trtllm"
    return "dynamo" if router.is_ours(line) else None


def _is_json(raw: bytes) -> bool:
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError:
        return False
    return True


FLUSH_SECONDS = 1.0
"""How often what is held back is handed on, for the case that the process is killed."""


@attrs.define
class Tally:
    """What was recorded so far.

    Attributes:
        batches: written; `replayed`: those of them that were asked for.
        stored, removed: blocks, in their events; a block that is stored twice counts twice.
        cleared: events that said that all blocks were dropped.
        unread: events that could not be read, kept as they were.
        gaps: in the numbers; `missing`: batches in them, and batches that are unreadable.
        restarts: of publishers.
        garbage: messages that were no batch.
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

    def add(self, batch: Batch) -> None:
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
                case Unread():
                    self.unread += 1


def record(
    subscriber: Subscriber,
    writer: RecordingWriter,
    *,
    seconds: float | None = None,
    batches: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
    tick: Callable[[Tally], None] = lambda _: None,
) -> Tally:
    """Write what is heard until `subscriber.stop`, for `seconds`, or so many `batches`.

    A batch that cannot be decoded is written as a gap of one. The writer is left open.

    Args:
        subscriber: what hears.
        writer: what writes.
        seconds: to listen; None: without end.
        batches: to write; None: without end.
        tell: is called with a sentence for whatever is no batch, and for unread events.
        tick: is called with the tally after each item.

    Raises:
        PluginError: msgspec is not installed.
        StorageError: the disk is full.
    """
    encode(Batch(0.0, ()))  # Fails at once where msgspec is missing, not at the first batch.
    tally = Tally()
    end = math.inf if seconds is None else monotonic() + seconds
    while not subscriber.stopped and (left := end - monotonic()) > 0:
        with closing(subscriber.items(min(left, FLUSH_SECONDS))) as items:
            for item in items:
                for sentence in _write(item, writer, tally):
                    tell(sentence)
                tick(tally)
                if tally.batches == batches:
                    return tally
        writer.flush()
    return tally


def _write(item: Item, writer: RecordingWriter, tally: Tally) -> list[str]:
    """Write and count an item; return what there is to tell of it."""
    match item:
        case Delivery(rank, sequence, payload, replayed):
            try:
                batch = decode(payload)
            except TraceError as error:
                lost = Gap(rank, sequence, sequence, f"it cannot be read: {error}")
                return _write(lost, writer, tally)
            writer.batch(batch, seq=sequence, publisher=rank)
            tally.add(batch)
            tally.replayed += replayed
            where = f"rank {rank}: batch {sequence}: an event cannot be read"
            return [f"{where}: {reason}" for reason in unread(batch)]
        case Gap(rank, first, _, reason):
            writer.gap(first, item.batches, publisher=rank, why=reason)
            tally.gaps += 1
            tally.missing += item.batches
        case Restart(rank):
            writer.restart(publisher=rank)
            tally.restarts += 1
        case Garbage(rank, reason):
            writer.garbage(reason, publisher=rank)
            tally.garbage += 1
    return [str(item)]


SCHEMA = 1
"""The schema that this version writes, and the only one it reads."""


BUFFER_BYTES = 1 << 16


class RecordingWriter(SealedWriter):
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
        super().__init__(file, kind="recording", buffer_bytes=BUFFER_BYTES)
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
        super().flush()

    def _write_end(self) -> None:
        self._line("END", lines=dict(self.lines), digest=self._digest_so_far())

    def _line(self, kind: str, **fields: Any) -> None:
        if self._closed:
            msg = f"{kind} after the end: the recording {self.name} is closed"
            raise InputError(msg)
        given = {name: value for name, value in fields.items() if value is not None}
        line = orjson.dumps({"n": sum(self.lines.values()), "kind": kind, **given})
        self._buffer.write(line + b"\n")
        self.lines[kind] = self.lines.get(kind, 0) + 1


def unread(batch: Batch) -> list[str]:
    """Return why events of a batch could not be read; none: all were."""
    return [event.reason for event in batch.events if isinstance(event, Unread)]
