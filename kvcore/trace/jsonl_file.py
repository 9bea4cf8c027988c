r"""Sealed JSONL files: lines of JSON, and an END with the digest of all before it.

Traces and recordings of KV events are such files. `SealedWriter` and `SealedReader` handle the
file: compression by name, the `.part` file, the digest, the numbers of lines, a cut. Their
subclasses write and parse the lines::

    class Writer(SealedWriter):
        def _write_end(self):
            self._buffer.write(orjson.dumps({..., "digest": self._digest_so_far()}) + b"\n")

    class Reader(SealedReader[Item]):
        kind = "recording"

        def _parse(self, raw):
            line = ...  # decode and check; `self.fail(reason)` raises with file and line number
            if line is END:
                self._expect_end({...})  # its fields but the digest, as the writer orders them
            return item

The way of a written line, and what becomes of the file::

    _buffer (1 MiB) -> BackgroundFile, whose thread digests and compresses -> <path>.part
    close      END is written          <path>.part becomes <path>
    discard    a run has failed        <path>.part is removed
    keep       it cannot be repeated   <path>.part stays, readable up to the cut
"""

from __future__ import annotations

import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Generic, NoReturn, Self, TypeVar

import orjson

from kvcore.blake2 import blake2b
from kvcore.errors import InputError, StorageError, TraceError
from kvcore.files import (
    AtomicFile,
    Compressor,
    CutError,
    DamageError,
    as_path,
    compressor,
    decompressed,
    storage_errors,
    unreadable_reason,
)
from kvcore.untrusted import LONGEST_LINE, TRACE_EXPANSION, line_fault, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from typing_extensions import Buffer

DIGEST_BYTES = 16

BUFFER_BYTES = 1 << 20

ODD_BYTES = re.compile(rb"[ \\\r\t]")
"""Bytes between values, and those in texts that may be written in several ways."""

NOT_AS_WRITTEN = (
    "the line is not written as kvcore writes it: a name stands in an object twice, there are "
    "blanks between values, or a text or a number could be shorter"
)

_T = TypeVar("_T")
_Item = TypeVar("_Item")


class BackgroundFile(io.RawIOBase):
    """The raw file below a write buffer; a thread does its work.

    The thread digests, compresses (`.gz`, `.zst`) and writes one buffer while the next one is
    filled; an error it meets is raised by the next call. A path is written as an `AtomicFile`,
    a file object is written to as it is.

    Args:
        file: the path, or the file object.
        kind: the word for the file in errors, before its name.

    Attributes:
        size: number of bytes written to the file so far.

    Raises:
        InputError: the path cannot be opened for writing.
        StorageError: a write failed (from `write`, `hexdigest` and `finish`).
    """

    def __init__(self, file: str | os.PathLike[str] | BinaryIO, *, kind: str) -> None:
        """Open `file`, if it is a path."""
        super().__init__()
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (10 ms)

        self._file: AtomicFile | BinaryIO
        self._compressor = None
        if isinstance(file, (str, os.PathLike)):
            self.name = os.fspath(file)
            self._what = f"the {kind} {self.name}"
            self._file = AtomicFile(Path(file), self._what)
            self._compressor = compressor(Path(file))
        else:
            self.name = str(getattr(file, "name", "a file object"))
            self._what = f"the {kind} {self.name}"
            self._file = file
        self._digest = blake2b(digest_size=DIGEST_BYTES)
        self._worker = ThreadPoolExecutor(1, "kvcore-trace")
        self._job: Future[None] | None = None
        self._discarded = False
        self.size = 0

    def writable(self) -> bool:
        """Return True, for `io.BufferedWriter`."""
        return True

    def write(self, data: Buffer, /) -> int:
        """Pass a write buffer to the thread; return its size."""
        view = memoryview(data)
        # A copy: the caller fills its buffer again while the thread works.
        self._submit(self._put, bytes(view))
        return len(view)

    def sync(self) -> None:
        """Flush the compressor, so that all bytes so far can be read from the file."""
        if self._compressor is not None:
            self._submit(self._flush_compressor, self._compressor)

    def hexdigest(self) -> str:
        """Return the BLAKE2b digest of all bytes written so far."""
        self._wait()
        return self._digest.hexdigest()

    def finish(self) -> None:
        """Flush the compressor, close the file, and give it its name."""
        self._wait()
        self._worker.shutdown()
        with storage_errors(self._what):
            if self._compressor is not None:
                self._write_all(self._compressor.finish())
            if isinstance(self._file, AtomicFile):
                self._file.finish()
            else:
                self._file.flush()

    def discard(self) -> None:
        """Drop all later writes, and remove the unfinished file. Never raises."""
        self._drop_writes()
        if isinstance(self._file, AtomicFile):
            self._file.discard()

    def keep(self) -> None:
        """Drop all later writes, and leave the unfinished file. Never raises."""
        self._drop_writes()
        if isinstance(self._file, AtomicFile):
            with suppress(OSError):
                self._file.close()

    def _drop_writes(self) -> None:
        self._discarded = True
        self._worker.shutdown()

    def _submit(self, job: Callable[[_T], None], argument: _T) -> None:
        """Pass a job to the thread, once it has finished the one before."""
        if self._discarded:
            return
        self._wait()
        try:
            self._job = self._worker.submit(job, argument)
        except RuntimeError:
            # The interpreter is shutting down, and starts no thread.
            job(argument)

    def _flush_compressor(self, compressor: Compressor) -> None:
        """Flush the compressor (in the thread)."""
        self._write_all(compressor.sync())

    def _put(self, data: bytes) -> None:
        """Digest, compress and write `data` (in the thread)."""
        self._digest.update(data)
        if self._compressor is not None:
            data = self._compressor.compress(data)
        self._write_all(data)

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = self._file.write(view)
            self.size += written
            view = view[written:]

    def _wait(self) -> None:
        """Wait until the thread is done; raise its error."""
        if self._job is not None:
            with storage_errors(self._what):
                self._job.result()


class SealedWriter(ABC):
    """Writes lines through a buffer; the file gets its name once END is in it.

    Args:
        file: a path, or a binary file object (written to as it is, and left open).
        kind: the word for the file in errors, before its name.
        buffer_bytes: number of bytes that are buffered before they are written.

    Attributes:
        name: name of the file.

    Raises:
        InputError: the path cannot be opened for writing.
        StorageError: the disk is full (from any method that writes).
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | BinaryIO,
        *,
        kind: str,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Open the file."""
        self._sink = BackgroundFile(file, kind=kind)
        self._buffer = io.BufferedWriter(self._sink, buffer_bytes)
        self._closed = False
        self.name = self._sink.name

    def flush(self) -> None:
        """Write all buffered lines, which stay readable if the process is killed later.

        Each call makes a compressed file some bytes longer.
        """
        self._buffer.flush()
        self._sink.sync()

    def close(self) -> None:
        """Write END and give the file its name. A second call does nothing.

        Raises:
            InputError: there are no lines. The file is given up.
            StorageError: the disk is full. The file is given up.
        """
        if self._closed:
            return
        try:
            self._write_end()
            self._buffer.flush()
            self._sink.finish()
        except BaseException as error:
            self.give_up(error)
            raise
        self._shut()

    def give_up(self, error: BaseException | None) -> None:
        """Discard the file, because of `error`."""
        del error
        self.discard()

    def discard(self) -> None:
        """Remove the unfinished file. A second call does nothing."""
        if not self._closed:
            self._sink.discard()
            self._shut()

    def keep(self) -> None:
        """Leave the unfinished file, with all lines that can still be written.

        A second call does nothing.
        """
        if not self._closed:
            with suppress(StorageError):
                self.flush()
            self._sink.keep()
            self._shut()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Close the file, or give it up if the block raised."""
        if kind is None:
            self.close()
        elif not self._closed:
            self.give_up(error)

    @abstractmethod
    def _write_end(self) -> None:
        """Write END to the buffer, with `_digest_so_far` as its last field."""

    def _digest_so_far(self) -> str:
        """Return the digest of all lines written so far."""
        self._buffer.flush()
        return self._sink.hexdigest()

    def _shut(self) -> None:
        """Refuse all later lines."""
        self._closed = True
        self._buffer.close()


class SealedReader(ABC, Generic[_Item]):
    """Reads a sealed file once; `.gz` and `.zst` are recognised by their first bytes.

    Iterating yields an item a line, checked by `_parse`, and at END the digest. A file without
    END is *incomplete*: all items before the cut are yielded, then iteration just ends.

    A line has at most 16 MiB and 2^20 values, and a compressed file expands to at most
    `expansion` times its size past the first 16 MiB, so the size of a file bounds its cost.
    Traces expand 6 to 9 times, and 16 times from the level 19 of zstd.

    Attributes:
        kind: the word for the file in errors, before its name.
        expansion: largest number of bytes that a compressed byte expands to.
        file: the path.
        line: line number in the file, from 1, of the item yielded last.
        position: number of bytes of the file, compressed or not, that were read so far.
        complete: whether the file ends with END and its newline.
        cut_reason: where and how an incomplete file ends, once iteration is over.

    Raises:
        InputError: the file cannot be opened.
        TraceError: a line is damaged; the message has file, line number and reason.
    """

    kind: ClassVar[str]
    expansion: ClassVar[int] = TRACE_EXPANSION

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Store the path; the file is opened when iteration starts."""
        self.file = as_path(file)
        self.line = self.position = 0
        self.complete = False
        self.cut_reason: str | None = None
        self._end: Mapping[str, Any] | None = None
        self._digest = blake2b(digest_size=DIGEST_BYTES)
        self._odd_bytes = False

    def __iter__(self) -> Iterator[_Item]:
        """Yield the items."""
        try:
            with self._open() as file:
                yield from self._items(self._pieces(file))
        except OSError as error:
            reason = unreadable_reason(self.file, error)
            msg = f"cannot read the {self.kind} {self.file}: {reason}"
            raise InputError(msg) from error

    def fail(self, reason: str) -> NoReturn:
        """Raise TraceError for the line read last."""
        msg = f"{self.file}:{self.line}: {reason}"
        raise TraceError(msg)

    def require_complete(self) -> None:
        """Raise TraceError unless END was reached, once iteration is over."""
        if not self.complete:
            msg = f"{self.file}: incomplete: {self.cut_reason}"
            raise TraceError(msg)

    @abstractmethod
    def _parse(self, raw: bytes) -> _Item:
        """Return the item of line number `line`, once the line is checked by itself.

        Calls `fail` for a wrong line, and `_expect_end` for END.
        """

    def _expect_end(self, fields: Mapping[str, Any]) -> None:
        """Record that the line just parsed is END, and its fields before the digest."""
        self._end = fields

    def _open(self) -> BinaryIO:
        """Open the file for reading."""
        return self.file.open("rb")

    def _pieces(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the content of `file`, and keep `position` up to date."""
        for piece in decompressed(file, self.expansion):
            self.position = file.tell()
            yield piece

    @property
    def _sealed(self) -> bool:
        """Whether the file must have an END, once its first line is read."""
        return True

    def _items(self, pieces: Iterable[bytes]) -> Iterator[_Item]:
        # The pieces of an unfinished line: joined once, since joining each costs its square.
        begun: list[bytes] = []
        length, cut = 0, None
        try:
            for piece in pieces:
                block, newline, tail = piece.rpartition(b"\n")
                if newline:
                    begun.append(block)
                    block = b"".join(begun)
                    begun, length = [], 0
                    yield from self._block(block)
                begun.append(tail)
                length += len(tail)
                if length > LONGEST_LINE:
                    break
        except CutError as error:
            cut = str(error)
        except DamageError as error:
            self.line += 1
            self.fail(str(error))
        yield from self._tail(b"".join(begun))
        self.cut_reason = self.cut_reason or cut
        self.complete = self.cut_reason is None

    def _block(self, block: bytes) -> Iterator[_Item]:
        """Yield the items of whole lines, `block`, whose last newline is left out."""
        self._look_at(block)
        for raw in block.split(b"\n"):
            item = self._next(raw)
            if self._end is not None:
                self._digest.update(block[: block.find(raw)])
                self._check_end(raw, self._end)
            yield item
        # Once for each block: an update for each line would cost more than its check.
        self._digest.update(block)
        self._digest.update(b"\n")

    def _tail(self, rest: bytes) -> Iterator[_Item]:
        """Yield the item after the last newline if its line is whole; store `cut_reason`."""
        ended = self._end is not None
        if not rest:
            if self._sealed and not ended:
                where = f"ends after line {self.line}" if self.line else "is empty"
                self.cut_reason = f"the file {where}, without END"
            return
        self._look_at(rest)
        if not ended and not _is_json(rest):
            self.cut_reason = f"the file ends inside line {self.line + 1}"
            return
        item = self._next(rest)
        if self._end is not None:
            self._check_end(rest, self._end)
        if self._sealed:
            self.cut_reason = f"the file ends before the newline of line {self.line}"
        yield item

    def _look_at(self, block: bytes) -> None:
        """Refuse lines that are too large to be parsed; store whether there are `ODD_BYTES`."""
        # A block comes in pieces of 64 KiB: only its first line can be too large.
        if fault := line_fault(block.partition(b"\n")[0]):
            self.line += 1
            self.fail(fault)
        self._odd_bytes = any(byte in block for byte in (b" ", b"\\", b"\r", b"\t"))

    def _must_be_as_written(self, raw: bytes, line: Any) -> None:
        """Refuse the line `raw` unless kvcore writes its value, `line`, by the same bytes."""
        try:
            written = orjson.dumps(line)
        except TypeError as error:
            self.fail(f"the line cannot be written again: {error}")
        if raw != written:
            self.fail(NOT_AS_WRITTEN)

    def _next(self, raw: bytes) -> _Item:
        self.line += 1
        if self._end is not None:
            self.fail("a line follows END")
        return self._parse(raw)

    def _check_end(self, raw: bytes, fields: Mapping[str, Any]) -> None:
        """Check END, which no digest covers: there is one way to write it."""
        expected = {**fields, "digest": self._digest.hexdigest()}
        line = parse_json(raw)
        for field, value in expected.items():
            if line.get(field) != value:
                self.fail(
                    f"END has {field} {line.get(field)!r}; the lines before it make {value!r}"
                )
        if raw != orjson.dumps(expected):
            self.fail("END is not written as kvcore writes it")


def _is_json(raw: bytes) -> bool:
    try:
        parse_json(raw)
    except orjson.JSONDecodeError:
        return False
    return True
