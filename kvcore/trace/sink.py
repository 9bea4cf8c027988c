"""Where the bytes of a trace go: digested and compressed by a thread, renamed when whole."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from errno import EISDIR
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from kvcore.errors import InputError, KvcoreError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from typing_extensions import Buffer

DIGEST_BYTES = 16


class StorageError(KvcoreError):
    """The disk refused what was written: it is full, or gone."""

    exit_code = 3


class Compressor(Protocol):
    """A streaming compressor, as `zlib` and `zstandard` make them."""

    def compress(self, data: bytes, /) -> bytes:
        """Take bytes; return those of the compressed stream that are ready."""

    def flush(self) -> bytes:
        """Return the rest of the stream."""


def _gzip() -> Compressor:
    # zlib's own gzip header has no name and the time 0: equal traces are equal files.
    return zlib.compressobj(wbits=31)


def _zstd() -> Compressor:
    import zstandard  # noqa: PLC0415  (18 ms, for one kind of file)

    return zstandard.ZstdCompressor(write_checksum=True).compressobj()


COMPRESSORS: dict[str, Callable[[], Compressor]] = {".gz": _gzip, ".zst": _zstd}


class Sink(io.RawIOBase):
    """The raw file below a trace's write buffer.

    A thread digests, compresses (`.gz`, `.zst`) and writes, one buffer behind the writer;
    what it meets is raised by the next call. A path is written as `<path>.part` and
    renamed by `finish`, so that what stands at `path` is always whole; what is no regular
    file (a device, a pipe) is written in place. A file object is written to as it is.

    Raises:
        InputError: the path cannot be opened for writing.
        StorageError: a write failed (from `write`, `hexdigest` and `finish`).
    """

    def __init__(self, file: str | os.PathLike[str] | BinaryIO) -> None:
        """Open `file`, if it is a path."""
        super().__init__()
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (10 ms)

        self._file: Any
        self._path: Path | None = None
        self._part: Path | None = None
        self._compressor: Compressor | None = None
        if isinstance(file, (str, os.PathLike)):
            self.name = os.fspath(file)
            self._path = Path(file)
            self._part, self._file = _open(self._path)
            if self._path.suffix in COMPRESSORS:
                self._compressor = COMPRESSORS[self._path.suffix]()
        else:
            self.name = str(getattr(file, "name", "a file object"))
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
        if not self._dead:
            self._wait()
            try:
                self._job = self._worker.submit(self._put, bytes(view))
            except RuntimeError:
                # The interpreter is going down, and its threads with it.
                self._put(bytes(view))
        return len(view)

    def hexdigest(self) -> str:
        """Return the BLAKE2b digest of all that was written so far."""
        self._wait()
        return self._digest.hexdigest()

    def finish(self) -> None:
        """Write what the compressor still holds, close, and give the file its name."""
        self._wait()
        self._worker.shutdown()
        try:
            if self._compressor is not None:
                _write_all(self._file, self._compressor.flush())
            if self._path is None or self._part is None:
                self._file.flush()
                return
            self._file.close()
            if self._part != self._path:
                self._part.replace(self._path)
        except OSError as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        """Drop what comes from now on, and remove the unfinished file. Never raises."""
        self._dead = True
        self._worker.shutdown()
        if self._part is not None:
            # The error that led here says more than a failed clean-up.
            with suppress(OSError):
                self._file.close()
                if self._part != self._path:
                    self._part.unlink(missing_ok=True)

    def _put(self, data: bytes) -> None:
        """Digest, compress and write: what the thread does."""
        self._digest.update(data)
        if self._compressor is not None:
            data = self._compressor.compress(data)
        _write_all(self._file, data)

    def _wait(self) -> None:
        """Wait until the thread is done; raise what it met."""
        if self._job is not None:
            try:
                self._job.result()
            except OSError as error:
                raise self._failed(error) from error

    def _failed(self, error: OSError) -> StorageError:
        reason = error.strerror or str(error)
        return StorageError(f"cannot write the trace {self.name}: {reason}")


def _part_of(path: Path) -> Path:
    """Return where `path` is written until it is whole: in place if it is a device."""
    special = path.exists() and not path.is_file()
    return path if special else path.with_name(path.name + ".part")


def _open(path: Path) -> tuple[Path, io.FileIO]:
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, "it is a directory; name a file in it")
        part = _part_of(path)
        return part, io.FileIO(part, "w")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        msg = f"cannot write the trace {path}: {reason}"
        raise InputError(msg) from error


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
