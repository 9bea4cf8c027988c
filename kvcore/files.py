"""Files: atomic ones, which are whole or absent, compressed and temporary ones."""

from __future__ import annotations

import io
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from errno import EISDIR
from functools import cache
from itertools import count
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, TypeAlias
from weakref import finalize, ref

from kvcore.errors import InputError, StorageError
from kvcore.untrusted import EXPANDED_BYTES

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from typing_extensions import Buffer


DATA = Path(__file__).parent / "data"
"""The folder of the data that comes with kvcore: traces, models, devices, times of steps."""

CHUNK_BYTES = 1 << 16

STEP_BYTES = {"gzip": 1 << 12, "zstd": 1 << 8}
"""Compressed bytes in one call of a decoder, which expand to 4 and 8 MiB at most."""

STDIN = "-"
"""The name of standard input in place of that of an input file."""

_NAMES_OF_STDIN = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")


class CutError(Exception):
    """A compressed stream that stops before its end."""


class DamageError(Exception):
    """A compressed stream that cannot be decompressed, or is followed by other bytes."""


class Compressor:
    """A streaming compressor that can flush its buffer without ending the stream.

    Args:
        encoder: the library's compressor.
        sync_mode: the mode in which its `flush` does not end the stream.
    """

    def __init__(self, encoder: Any, sync_mode: int) -> None:
        """Begin a stream."""
        self._encoder = encoder
        self._sync_mode = sync_mode

    def compress(self, data: bytes) -> bytes:
        """Compress `data`; return the bytes of the stream that are ready."""
        ready: bytes = self._encoder.compress(data)
        return ready

    def sync(self) -> bytes:
        """Return the bytes needed to decompress all data so far. Costs some bytes."""
        rest: bytes = self._encoder.flush(self._sync_mode)
        return rest

    def finish(self) -> bytes:
        """Return the rest of the stream."""
        rest: bytes = self._encoder.flush()
        return rest


Codec: TypeAlias = tuple[str, Callable[[], Any], type[Exception]]
"""(name of the format, factory of decoders, their exception for damaged data)."""


def input_path(name: str | os.PathLike[str]) -> Path:
    """Return the path of an input file that can be read several times.

    `-` is standard input. Standard input and pipes can be read once: the first call in a
    process copies them into a temporary file, removed at its end, and later calls return that
    copy, whatever has come since. Its path prints as `-`, or as the name of the pipe.

    Raises:
        StorageError: the copy cannot be written.
    """
    path = Path(name)
    if os.fspath(name) in (STDIN, *_NAMES_OF_STDIN):
        return _copy(None)
    with suppress(OSError, ValueError):
        if path.is_fifo():
            return _copy(path)
    return path


class _CopiedPath(type(Path())):  # type: ignore[misc]
    """The path of a temporary copy, which prints as that of the original."""

    def __str__(self) -> str:
        """Return the name of the source, which is the same in every run."""
        return str(self.name)

    def __fspath__(self) -> str:
        """Return the path of the copy, for functions that open it."""
        return str(super().__str__())


def is_copy(value: object) -> bool:
    """Return True for the path of a pipe's temporary copy, which only this process knows."""
    return isinstance(value, _CopiedPath)


def as_path(name: Any) -> Path:
    """Return the path of a name; if it is a path, the same object."""
    return name if isinstance(name, Path) else Path(name)


# An option has the type of its field, unless the converter of the field has an annotation.
del as_path.__annotations__["name"]


@cache
def _copy(source: Path | None) -> Path:
    """Return a temporary copy of a pipe, or (None) of standard input."""
    from multiprocessing.util import Finalize  # noqa: PLC0415 - for pipes alone
    from shutil import copyfileobj, rmtree  # noqa: PLC0415 - likewise
    from tempfile import mkdtemp  # noqa: PLC0415 - likewise

    folder = mkdtemp(prefix="kvcore-")
    Finalize(None, rmtree, (folder, True), exitpriority=0)  # not in a forked process
    path = _CopiedPath(folder, STDIN if source is None else source.name)
    piped = nullcontext(sys.stdin.buffer) if source is None else source.open("rb")
    with piped as file, storage_errors(str(path)), path.open("wb") as copied:
        copyfileobj(file, copied)
    return path


def decompressed(file: BinaryIO, expansion: int | None = None) -> Iterator[bytes]:
    """Yield the content of `file`, decompressed if it is gzip or zstd, in pieces of 64 KiB.

    There may be several gzip members or zstd frames. Memory: about 20 MiB at most, and the
    window of a zstd frame.

    Args:
        file: a file open for reading.
        expansion: maximum of bytes for each compressed byte on average, beyond 16 MiB; None:
            any number.

    Raises:
        CutError: a compressed stream stops early. All bytes before the cut were yielded.
        DamageError: a compressed stream is damaged, is followed by other bytes, or expands to
            more than `expansion`; or the file has a format that is not read, such as xz: the
            message has a remedy.
    """
    data = file.read(CHUNK_BYTES)
    for magic, (what, remedy) in FOREIGN.items():
        if data.startswith(magic):
            msg = f"it is {what}, which is not read: {remedy}"
            raise DamageError(msg)
    codec = next((make() for magic, make in _CODECS.items() if data.startswith(magic)), None)
    if codec is None:
        while data:
            yield data
            data = file.read(CHUNK_BYTES)
        return
    yield from _expanded(file, data, codec, expansion)


def _expanded(
    file: BinaryIO, data: bytes, codec: Codec, expansion: int | None
) -> Iterator[bytes]:
    """Yield the content of a compressed `file`, of which `data` has been read."""
    kind, new, failure = codec
    step_bytes = STEP_BYTES[kind]
    decoder: Any = None
    read = size = 0
    while data:
        read, start = read + len(data), 0
        content: list[bytes] = []
        while start < len(data):
            if decoder is None and kind == "gzip" and not data[start]:
                start = len(data) - len(data[start:].lstrip(b"\0"))  # padding, of a tape
                continue
            decoder = decoder or new()
            step = data[start : start + step_bytes]
            try:
                piece = decoder.decompress(step)
            except failure as error:
                msg = f"the {kind} stream is damaged: {error}"
                raise DamageError(msg) from error
            start, size = start + len(step) - len(decoder.unused_data), size + len(piece)
            if expansion is not None and size > EXPANDED_BYTES + expansion * read:
                msg = (
                    f"the {kind} stream expands to more than {expansion} times its size; if "
                    "you trust it, decompress it first"
                )
                raise DamageError(msg)
            if decoder.eof:
                decoder = None
            content.append(piece)
            # Small pieces are joined; a large one is yielded at once, to bound the memory.
            if decoder is None or start == len(data) or len(piece) > CHUNK_BYTES:
                joined = b"".join(content)
                content.clear()
                for offset in range(0, len(joined), CHUNK_BYTES):
                    yield joined[offset : offset + CHUNK_BYTES]
                del joined  # before the next one is made
        data = file.read(CHUNK_BYTES)
    if decoder is not None:
        msg = f"the {kind} stream stops early"
        raise CutError(msg)


def compressor(path: Path) -> Compressor | None:
    """Return the compressor for a file with the suffix `.gz` or `.zst`; None for another one.

    Equal content gives equal files.
    """
    make = _COMPRESSORS.get(path.suffix)
    return None if make is None else make()


_AS_GZIP = "give plain lines, or compress them with gzip or zstd: `{} FILE | gzip > FILE.gz`"

FOREIGN: dict[bytes, tuple[str, str]] = {
    b"BZh": ("compressed with bzip2", _AS_GZIP.format("bzip2 -dc")),
    b"\xfd7zXZ\0": ("compressed with xz", _AS_GZIP.format("xz -dc")),
    b"\x04\x22\x4d\x18": ("compressed with lz4", _AS_GZIP.format("lz4 -dc")),
    b"PK\x03\x04": ("a zip archive", _AS_GZIP.format("unzip -p")),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", _AS_GZIP.format("7z x -so")),
    b"PAR1": ("a Parquet file", "write its rows as lines of JSON or CSV"),
    b"\xff\xfe": ("UTF-16 text", "write it as UTF-8: `iconv -f UTF-16 -t UTF-8 FILE`"),
    b"\xfe\xff": ("UTF-16 text", "write it as UTF-8: `iconv -f UTF-16 -t UTF-8 FILE`"),
}
"""Formats that are not read, by their first bytes: a description, and a remedy."""


def _gzip() -> Codec:
    return "gzip", lambda: zlib.decompressobj(wbits=31), zlib.error


def _zstd() -> Codec:
    if sys.version_info >= (3, 14):
        from compression import zstd  # noqa: PLC0415 - for one kind of file

        return "zstd", zstd.ZstdDecompressor, zstd.ZstdError
    import zstandard  # noqa: PLC0415 - 18 ms, for one kind of file

    return "zstd", zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError


def _to_gzip() -> Compressor:
    # zlib's own gzip header has no name and the time 0.
    return Compressor(zlib.compressobj(wbits=31), zlib.Z_SYNC_FLUSH)


def _to_zstd() -> Compressor:
    if sys.version_info >= (3, 14):
        from compression import zstd  # noqa: PLC0415 - as above

        checked = zstd.ZstdCompressor(options={zstd.CompressionParameter.checksum_flag: 1})
        return Compressor(checked, checked.FLUSH_BLOCK)
    import zstandard  # noqa: PLC0415 - as above

    encoder = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return Compressor(encoder, zstandard.COMPRESSOBJ_FLUSH_BLOCK)


_CODECS: dict[bytes, Callable[[], Codec]] = {b"\x1f\x8b": _gzip, b"\x28\xb5\x2f\xfd": _zstd}
_COMPRESSORS: dict[str, Callable[[], Compressor]] = {".gz": _to_gzip, ".zst": _to_zstd}


class AtomicFile(io.FileIO):
    """A raw file that is written as `<path>.part`, and renamed to `path` when it is finished.

    An older file at `path` stays until then. A `<path>.part` that a living process writes is
    locked, and never changed. A `<path>.part` of a killed process may be the only output of its
    run: it is renamed to `<path>.part-1`, or the next free number, and a warning is logged. A
    path that is no regular file (a device, a pipe) is written in place. A forked process leaves
    the file to its parent. Errors call the file `what`, such as "the trace run.jsonl".

    Raises:
        InputError: it cannot be opened for writing, or another process writes `<path>.part`.
        StorageError: `write` or `finish` failed.
    """

    def __init__(self, path: Path, what: str) -> None:
        """Open the file."""
        self._what, self._process = what, os.getpid()
        self._path = self._part = path
        try:
            if path.is_dir():
                raise IsADirectoryError(EISDIR, "it is a directory; name a file in it")
            self._part = part_path(path)
            opener = None if self._part == path else _open_locked
            super().__init__(self._part, "w", opener=opener)
        except BlockingIOError as error:
            msg = (
                f"cannot write {what}: {self._part} is being written by another run: wait for "
                "its end, or name another file"
            )
            raise InputError(msg) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            msg = f"cannot write {what}: {reason}"
            raise InputError(msg) from error
        except (KeyboardInterrupt, SystemExit):  # of a signal, when the file was just made
            with suppress(OSError):
                if self._part != path:  # a pipe would wait for its reader once more
                    super().__init__(self._part, "w", opener=_open_locked)
                    self.discard()
            raise

    def close(self) -> None:
        """Close the file; remove an unfinished one that is empty, as a signal may leave it."""
        with suppress(OSError, ValueError):  # of a file that is closed
            if self._is_unfinished() and not os.fstat(self.fileno()).st_size:
                self._part.unlink()
        super().close()

    def write(self, data: Buffer, /) -> int:
        """Write bytes of `data`, perhaps not all; return their number."""
        if os.getpid() != self._process:  # a buffer that was forked with the file
            return memoryview(data).nbytes
        with storage_errors(self._what):
            return super().write(data)

    def finish(self) -> None:
        """Rename the file to its path, and close it."""
        with storage_errors(self._what):
            # Before it is closed, since closing releases its lock.
            if self._is_unfinished():
                if self._path.exists():  # a power cut is to leave that file, or a whole new one
                    os.fsync(self.fileno())
                self._part.replace(self._path)
                self._part = self._path
            self.close()

    def discard(self) -> None:
        """Close the file and remove it. Never raises."""
        # The error that led here matters more than a failed clean-up.
        with suppress(OSError):
            if self._is_unfinished():
                self._part.unlink(missing_ok=True)
                # From now on a file of that name belongs to another run.
                self._part = self._path
        with suppress(OSError):
            self.close()

    def _is_unfinished(self) -> bool:
        return self._part != self._path and self._process == os.getpid()


def _open_locked(path: str, flags: int) -> int:
    """Open and lock a file; one that a killed process has left is renamed before.

    Raises:
        BlockingIOError: a living process writes the file.
    """
    if sys.platform == "win32":  # without such locks
        return os.open(path, flags | os.O_EXCL)
    while True:
        # Without O_TRUNC: until it is locked it may belong to another process. With O_NONBLOCK,
        # so that a pipe does not block.
        file = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            _lock(file)
            if os.path.samestat(os.fstat(file), Path(path).stat()):
                if not os.fstat(file).st_size:
                    return file
                _keep_aside(Path(path))
        except FileNotFoundError:
            pass  # another process has finished the file meanwhile
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _lock(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # without locks any content may belong to another run
        if isinstance(error, BlockingIOError) or os.fstat(file).st_size:
            raise BlockingIOError from None


def _keep_aside(part: Path) -> None:
    """Rename the `.part` of a killed process, and log its new name."""
    import logging  # noqa: PLC0415 - rarely needed

    names = (part.with_name(f"{part.name}-{serial}") for serial in count(1))
    aside = next(name for name in names if not name.exists())
    part.rename(aside)
    logging.getLogger("kvcore").warning(
        "kvcore: %s was left by a run that was killed: it is kept as %s", part, aside
    )


class Spool:
    """A temporary file for data that would fill memory, stored once and read by offset.

    It has no name, and is removed with the object. Threads may share one.

    Attributes:
        process: id of the process that made it.
    """

    def __init__(self) -> None:
        """Open the file.

        Raises:
            OSError: it cannot be opened, or this system cannot write at an offset.
        """
        from tempfile import TemporaryFile  # noqa: PLC0415 - for long runs alone

        if not hasattr(os, "pwrite"):
            msg = "no file can be written at a place"
            raise OSError(msg)
        file = TemporaryFile(prefix="kvcore-", buffering=0)  # noqa: SIM115 - kept open
        finalize(self, file.close)
        self._file = file
        self.process = os.getpid()
        self._end = 0
        self._lock = Lock()

    @classmethod
    def shared(cls) -> Spool:
        """Return the object of this process, which exists while there is a reference to it.

        Raises:
            OSError: the file cannot be opened.
        """
        global _spool  # noqa: PLW0603 - one file, however many columns there are
        spool = _spool() if _spool is not None else None
        # A forked process must not write at the offsets of its parent.
        if spool is None or spool.process != os.getpid():
            spool = cls()
            _spool = ref(spool)
        return spool

    def store(self, data: bytes) -> int:
        """Append `data`; return its offset.

        Raises:
            OSError: the disk is full.
        """
        with self._lock:
            offset, rest = self._end, memoryview(data)
            while rest:
                written = os.pwrite(self._file.fileno(), rest, self._end)
                self._end += written
                rest = rest[written:]
        return offset

    def load(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on."""
        return os.pread(self._file.fileno(), size, offset)


_spool: ref[Spool] | None = None


@contextmanager
def atomic_file(path: Path) -> Iterator[TextIO]:
    """Open a text file for writing, which is renamed to `path` at the end of the body.

    If the body raises, an older file at `path` stays as it is.

    Raises:
        InputError: it cannot be opened for writing.
        StorageError: it cannot be written, as on a full disk.
    """
    raw = AtomicFile(path, str(path))
    try:
        file = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", newline="")
        yield file
        file.flush()
        raw.finish()
    except BaseException:
        raw.discard()
        raise


def to_json(value: Any, fault: str, *, indent: bool = False) -> bytes:
    """Return a value as JSON; raise InputError that begins with `fault` if it has none."""
    import orjson  # noqa: PLC0415 - for what writes JSON alone

    try:
        return orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else None)
    except TypeError as error:
        msg = f"{fault}: {error}"
        raise InputError(msg) from error


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Raise a StorageError for an OSError of the body, which writes `what`."""
    try:
        yield
    except OSError as error:
        msg = f"cannot write {what}: {error.strerror or error}"
        raise StorageError(msg) from error


def unreadable_reason(path: Path, error: OSError) -> str:
    """Return the reason why `path` cannot be read, with the target of a dangling link."""
    if path == Path():
        return "empty path, or the working directory; name a file"
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return f"{reason}: it is a link to {path.readlink()}"
    return reason


def part_path(path: Path) -> Path:
    """Return the path of the file while it is written: `<path>.part`; for a device `path`."""
    special = path.exists() and not path.is_file()
    return path if special else path.with_name(f"{path.name}.part")


def file_bytes(path: Path) -> int | None:
    """Return the size of the file at `path`; None if there is none, or it has no size."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def refuse_overwrite(path: str | os.PathLike[str], sources: Iterable[object]) -> None:
    """Check that writing `path` overwrites no file from which requests are read.

    The paths in `sources` are checked; other values, such as options of a workload, are not.

    Raises:
        InputError: a source is this file, or its `part_path`.
    """
    target = Path(path)
    for source in sources:
        if isinstance(source, Path) and any(
            _same(source, written) for written in (target, part_path(target))
        ):
            msg = f"cannot write {path}: the requests come from {source}; name another file"
            raise InputError(msg)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Create the directory `path` with that mode, and its parents, unless it exists.

    Raises:
        InputError: it cannot be created, or is a file.
    """
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a NUL is in no name
        reason = getattr(error, "strerror", None) or error
        reason = "it is a file" if isinstance(error, FileExistsError) else reason
        msg = f"{path}: cannot be made a directory: {reason}; name another one"
        raise InputError(msg) from error


def _same(source: Path, written: Path) -> bool:
    try:
        if is_copy(source) and str(source) == STDIN:  # a terminal or device loses nothing
            return written.is_file() and os.path.samestat(os.fstat(0), written.stat())
        return source.samefile(written)
    except OSError:
        return False
