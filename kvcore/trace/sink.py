"""Where the bytes of a trace go: digested and compressed by a thread, renamed when whole."""

from __future__ import annotations

import io
import os
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from kvcore.compression import Compressor, compressor
from kvcore.files import WholeFile, storing

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from typing_extensions import Buffer

_T = TypeVar("_T")

DIGEST_BYTES = 16


class Sink(io.RawIOBase):
    """The raw file below a write buffer.

    A thread digests, compresses (`.gz`, `.zst`) and writes, one buffer behind the writer;
    what it meets is raised by the next call. A path is a `WholeFile`, a file object is written
    to as it is.

    Args:
        file: the path, or the file object.
        kind: what errors call it, with its name.

    Raises:
        InputError: the path cannot be opened for writing.
        StorageError: a write failed (from `write`, `hexdigest` and `finish`).
    """

    def __init__(self, file: str | os.PathLike[str] | BinaryIO, *, kind: str = "trace") -> None:
        """Open `file`, if it is a path."""
        super().__init__()
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (10 ms)

        self._file: WholeFile | BinaryIO
        self._compressor = None
        if isinstance(file, (str, os.PathLike)):
            self.name = os.fspath(file)
            self._what = f"the {kind} {self.name}"
            self._file = WholeFile(Path(file), self._what)
            self._compressor = compressor(Path(file))
        else:
            self.name = str(getattr(file, "name", "a file object"))
            self._what = f"the {kind} {self.name}"
            self._file = file
        self._digest = blake2b(digest_size=DIGEST_BYTES)
        self._worker = ThreadPoolExecutor(1, "kvcore-trace")
        self._job: Future[None] | None = None
        self._dead = False

    def writable(self) -> bool:
        """Say yes: `io.BufferedWriter` asks."""
        return True

    def write(self, data: Buffer, /) -> int:
        """Take all of a write buffer."""
        view = memoryview(data)
        self._do(self._put, bytes(view))
        return len(view)

    def sync(self) -> None:
        """Write what the compressor holds, so that all up to here can be read from the file."""
        if self._compressor is not None:
            self._do(self._sync, self._compressor)

    def hexdigest(self) -> str:
        """Return the BLAKE2b digest of all that was written so far."""
        self._wait()
        return self._digest.hexdigest()

    def finish(self) -> None:
        """Write what the compressor still holds, close, and give the file its name."""
        self._wait()
        self._worker.shutdown()
        with storing(self._what):
            if self._compressor is not None:
                _write_all(self._file, self._compressor.finish())
            if isinstance(self._file, WholeFile):
                self._file.finish()
            else:
                self._file.flush()

    def discard(self) -> None:
        """Drop what comes from now on, and remove the unfinished file. Never raises."""
        self._dead = True
        self._worker.shutdown()
        if isinstance(self._file, WholeFile):
            self._file.discard()

    def _do(self, job: Callable[[_T], None], given: _T) -> None:
        """Let the thread do a job, once it is done with the one before."""
        if self._dead:
            return
        self._wait()
        try:
            self._job = self._worker.submit(job, given)
        except RuntimeError:
            # The interpreter is going down, and its threads with it.
            job(given)

    def _sync(self, compressor: Compressor) -> None:
        """Write what the compressor holds: what the thread does."""
        _write_all(self._file, compressor.sync())

    def _put(self, data: bytes) -> None:
        """Digest, compress and write: what the thread does."""
        self._digest.update(data)
        if self._compressor is not None:
            data = self._compressor.compress(data)
        _write_all(self._file, data)

    def _wait(self) -> None:
        """Wait until the thread is done; raise what it met."""
        if self._job is not None:
            with storing(self._what):
                self._job.result()


def _write_all(file: WholeFile | BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
