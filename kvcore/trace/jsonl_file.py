r"""Sealed JSONL files: lines of JSON, and an END with the digest of all before it.

Traces and recordings of KV events are such files. `SealedWriter` handles the file: compression
by name, the `.part` file, the digest. Its subclasses write the lines::

    class Writer(SealedWriter):
        def _write_end(self):
            self._buffer.write(orjson.dumps({..., "digest": self._digest_so_far()}) + b"\n")

The way of a written line, and what becomes of the file::

    _buffer (1 MiB) -> BackgroundFile, whose thread digests and compresses -> <path>.part
    close      END is written          <path>.part becomes <path>
    discard    a run has failed        <path>.part is removed
    keep       it cannot be repeated   <path>.part stays, readable up to the cut
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self, TypeVar

from kvcore.blake2 import blake2b
from kvcore.errors import StorageError
from kvcore.files import AtomicFile, Compressor, compressor, storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from typing_extensions import Buffer

DIGEST_BYTES = 16

BUFFER_BYTES = 1 << 20

_T = TypeVar("_T")


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
        self._process, self._discarded = os.getpid(), False
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
        """Flush the compressor and the thread: all bytes so far can be read from the file."""
        if self._compressor is not None:
            self._submit(self._flush_compressor, self._compressor)
        self._wait()

    def hexdigest(self) -> str:
        """Return the BLAKE2b digest of all bytes written so far."""
        self._wait()
        return self._digest.hexdigest()

    def finish(self) -> None:
        """Flush the compressor, close the file, and give it its name."""
        self._wait()
        self._worker.shutdown()
        with storage_errors(self._what):
            compressor, self._compressor = self._compressor, None  # it can be finished once
            if compressor is not None:
                self._write_all(compressor.finish())
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
        """Wait until the thread is done, which a forked process has not; raise its error."""
        if self._job is not None and self._process == os.getpid():
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
