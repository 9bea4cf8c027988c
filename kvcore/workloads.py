"""Reading workloads: lines of any compression, which format a file has, what it promises."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import orjson

from kvcore.errors import InputError
from kvcore.policy.workload import Workload
from kvcore.request import Key, Request

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 16


class _Decoder(Protocol):
    """A streaming decompressor, as `zlib` and `zstandard` make them."""

    @property
    def eof(self) -> bool:
        """Whether its member or frame is complete."""

    @property
    def unused_data(self) -> bytes:
        """What came after the end of it."""

    def decompress(self, data: bytes, /) -> bytes:
        """Return all that can be decoded so far."""


class _DamagedError(Exception):
    """Compressed data that cannot be decoded, as opposed to data that just stops."""


class _Decoded(io.RawIOBase):
    """The content of a compressed file, however many gzip members or zstd frames it has.

    Raises EOFError where one of them is cut off; zstandard's own reader takes a file that
    is cut for a shorter one.
    """

    def __init__(
        self, file: BinaryIO, decoder: Callable[[], _Decoder], error: type[Exception]
    ) -> None:
        self._file = file
        self._new = decoder
        self._error = error
        self._decoder: _Decoder | None = None
        self._unread = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._ready:
            chunk = self._unread or self._file.read(_CHUNK)
            if not chunk and self._decoder is not None:
                raise EOFError
            if not chunk:
                return 0
            decoder = self._decoder or self._new()
            try:
                self._ready = memoryview(decoder.decompress(chunk))
            except self._error as error:
                raise _DamagedError(error) from error
            self._unread = decoder.unused_data
            self._decoder = None if decoder.eof else decoder
        target = memoryview(buffer)
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def lines(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """Yield the lines of a file that are not blank, with their numbers from 1.

    Plain, gzip and zstd files are told apart by their first bytes. Memory: one line and a
    buffer.

    Raises:
        InputError: the file cannot be read, has no line, or its compressed data is damaged
            or cut off; names the line from which on nothing could be read.
    """
    number, empty = 0, True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_decoded(file), 1):
                if not line.isspace():
                    empty = False
                    yield number, line
    except EOFError:
        msg = f"{path}:{number + 1}: the compressed file is cut off here"
        raise InputError(msg) from None
    except _DamagedError as error:
        msg = f"{path}:{number + 1}: the compressed data is damaged here: {error}"
        raise InputError(msg) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if empty:
        msg = f"{path}: the file is empty: expected one row a line"
        raise InputError(msg)


def file_digest(path: Path, **options: Any) -> str:
    """Return the 128-bit BLAKE2b digest, in hex, of a file's bytes followed by `options`.

    Give the options on which the requests depend; without any, the digest is what
    `b2sum -l 128` prints.

    Raises:
        InputError: the file cannot be read.
    """
    state = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                state.update(chunk)
    except OSError as error:
        raise _unreadable(path, error) from error
    if options:
        state.update(orjson.dumps(options, option=orjson.OPT_SORT_KEYS))
    return state.hexdigest()


def recognise(path: Path, candidates: Iterable[type[Workload]]) -> Workload:
    """Return the workload that reads `path`, of the one class that knows its first line.

    Raises:
        InputError: the file cannot be read, or no class or several recognise it.
    """
    with closing(lines(path)) as source:
        first_line = next(source)[1]
    readers = [cls for cls in candidates if _reads_files(cls)]
    found = sorted((cls for cls in readers if cls.recognises(first_line)), key=_name)
    if len(found) == 1:
        return found[0].from_file(path)
    if found:
        names = " and ".join(map(_name, found))
        msg = (
            f"{path}: {names} all recognise it; say which, as in '{found[0].name}:path={path}'"
        )
        raise InputError(msg)
    names = ", ".join(sorted(map(_name, readers))) or "none"
    msg = (
        f"{path}: no known workload format: its first line begins {first_line[:60]!r}; "
        f"formats: {names}"
    )
    raise InputError(msg)


def checked(workload: Workload) -> Iterator[Request]:
    """Yield the requests of `workload` as they come, checking what it promises of them.

    Memory grows with the distinct keys and ids; cost is one dict look-up a key.

    Raises:
        InputError: an arrival before the one before it, an id for the second time, or a
            prompt key after another parent than before.
    """
    root = object()
    parents: dict[Key, Hashable] = {}
    ids: set[int | str] = set()
    now = 0
    for request in workload:
        where = f"workload {workload.name}: request {request.id!r}"
        if request.arrival < now:
            msg = (
                f"{where}: arrives at {request.arrival} ns, after one that arrives at {now} ns"
            )
            raise InputError(msg)
        if request.id in ids:
            msg = f"{where}: an earlier request has the same id"
            raise InputError(msg)
        now = request.arrival
        ids.add(request.id)
        parent: Hashable = root
        for key in request.keys:
            known = parents.setdefault(key, parent)
            if known != parent:
                here, there = (
                    "at the start" if place is root else f"after key {place!r}"
                    for place in (parent, known)
                )
                msg = (
                    f"{where}: key {key!r} stands {here}, in an earlier request {there}: "
                    "equal keys must mean equal prefixes"
                )
                raise InputError(msg)
            parent = key
        yield request


def _decoded(file: io.BufferedReader) -> io.BufferedReader:
    magic = file.peek(len(_ZSTD))
    if magic.startswith(_GZIP):
        raw = _Decoded(file, lambda: zlib.decompressobj(wbits=31), zlib.error)
    elif magic.startswith(_ZSTD):
        import zstandard  # noqa: PLC0415 - 18 ms, for one kind of file

        make = zstandard.ZstdDecompressor().decompressobj
        raw = _Decoded(file, make, zstandard.ZstdError)
    else:
        return file
    return io.BufferedReader(raw, _CHUNK)


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read: {error.strerror or error}")


def _reads_files(cls: type[Workload]) -> bool:
    return any("recognises" in vars(base) for base in cls.__mro__ if base is not Workload)


def _name(cls: type[Workload]) -> str:
    return cls.name
