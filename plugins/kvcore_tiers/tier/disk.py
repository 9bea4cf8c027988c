"""A tier in files on a disk, which outlive the process."""

from __future__ import annotations

import logging
import os
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from errno import ELOOP
from hashlib import blake2b
from itertools import count
from pathlib import Path
from shutil import disk_usage
from typing import ClassVar

import attrs
import orjson

from kvcore import InputError, StorageError
from kvcore.cache.tiers import StoredBlock, Tier, TierStore, bandwidth
from kvcore.files import as_path, make_directory
from kvcore.units import format_bytes
from kvcore_tiers.tier._sealing import HEADER_BYTES, Sealer

if sys.platform != "win32":
    import fcntl

SCHEMA = 1
"""The version of the file format; files of other versions are not read or changed."""

CHUNK_BYTES = 1 << 20
"""Bytes in one write or read: they stay in the caches of the CPU while they are hashed."""


@attrs.define(eq=False, kw_only=True)
class Disk(Tier):
    """Store blocks in files on a disk, which the next process can use.

    The defaults of its link are those of one NVMe disk on four lanes of PCI Express 4.0.

    In a run on tensors each model has two files of its own in the directory: slots, which use
    disk space as they are written, and their headers, with checksums. A block that does not
    match its header is computed again. A header is written after its K/V, so a killed process
    leaves no partial block.

    Attributes:
        path: the directory of its files, which one process can use at a time; None: for
            simulations alone.
        sync: whether K/V are flushed to the disk before their headers are written. Without it,
            the default, a crash of the machine (not of the process) may leave headers without
            their K/V, which the checksums detect.
    """

    name: ClassVar[str] = "disk"

    path: Path | None = attrs.field(default=None, converter=attrs.converters.optional(as_path))
    sync: bool = False
    read_bandwidth: int | str = bandwidth("7GB")
    write_bandwidth: int | str = bandwidth("5GB")
    latency: float = 1e-4

    def open(self, slots: int, slot_bytes: int, identity: bytes) -> TierStore:
        """Return a store in files in `path`, with the blocks of earlier runs.

        Raises:
            InputError: there is no `path`, it cannot be written, or another process uses it.
            StorageError: its file system has too little room for all slots.
        """
        if self.path is None:
            msg = "tier disk: a run on tensors needs a directory: disk:path=DIR,memory=..."
            raise InputError(msg)
        return DiskStore(self.path, slots, slot_bytes, identity, sync=self.sync)


class DiskStore(TierStore):
    """Keeps blocks in files: `write` and `read` make a system call for up to 1 MiB.

    The files are not mapped into memory: so a full disk or a truncated file is an error of a
    call, where it would end a process that maps the file.

    Attributes:
        damaged: number of headers that `recover` could not use.
    """

    def __init__(
        self, path: Path, slots: int, slot_bytes: int, identity: bytes, *, sync: bool
    ) -> None:
        """Lock the directory, and open the files of this identity."""
        if sys.platform == "win32":
            msg = "tier disk: its locks and its files need Linux or macOS"
            raise InputError(msg)
        self._sealer = Sealer(identity, slot_bytes)
        self._slots, self._size, self._sync = slots, slot_bytes, sync
        self._files: list[int] = []
        self.damaged = 0
        about = {"kvcore_tier": SCHEMA, "slot_bytes": slot_bytes, "identity": identity.hex()}
        first = orjson.dumps(about)
        name = blake2b(first, digest_size=8).hexdigest()
        # The identity may be longer than a header, so the header has a hash of it.
        first = orjson.dumps(about | {"identity": name}).ljust(HEADER_BYTES)
        make_directory(path, 0o700)
        try:
            _refuse_shared(path)
            self._lock(path)
            self._data, self._headers = self._open(path, name, first)
            self._fit(path, first)
        except OSError as error:
            self.close()
            msg = f"tier disk: {error.filename or path} cannot be used: {error.strerror}"
            raise InputError(msg) from error
        except BaseException:
            self.close()
            raise

    def _lock(self, path: Path) -> None:
        """Lock the directory for this process, until `close` or its end."""
        file = self._file(path / "lock")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
            msg = f"tier disk: {path} is in use by {owner}: wait for its end, or name another"
            if owner == _process():
                msg = f"tier disk: {path} is in use by this process: each tier needs its own"
            raise InputError(msg) from None
        os.ftruncate(file, 0)
        os.pwrite(file, f"{_process()}\n".encode(), 0)

    def _file(self, path: Path) -> int:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            file = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno == ELOOP:
                error.strerror = "it is a link; give the directory that it points into"
            raise
        self._files.append(file)
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            why = "it is no file, or has another name elsewhere (a hard link)"
            msg = f"tier disk: {path} cannot be used: {why}: remove it, or name another path"
            raise InputError(msg)
        return file

    def _open(self, path: Path, name: str, first: bytes) -> tuple[int, int]:
        """Return the files of slots and of headers, whose first header is `first`."""
        paths = path / f"{name}.slots", path / f"{name}.headers"
        data, headers = map(self._file, paths)
        header = os.pread(headers, HEADER_BYTES, 0)
        if header and header != first:
            serial = next(n for n in count(1) if not Path(f"{paths[1]}.damaged-{n}").exists())
            for file in paths:
                file.rename(f"{file}.damaged-{serial}")
            _warn("%s was damaged: it is kept as %s.damaged-%d", paths[1], paths[1], serial)
            data, headers = map(self._file, paths)
        others = [file.stat().st_blocks for file in path.glob("*.slots*") if file != paths[0]]
        if any(others):
            size = format_bytes(512 * sum(others))
            _warn("tier disk: %s also has %s of other models or layouts", path, size)
        return data, headers

    def _fit(self, path: Path, first: bytes) -> None:
        """Extend both files to the length of all slots, if the disk has room."""
        wanted = self._slots * self._size
        room = disk_usage(path).free + os.fstat(self._data).st_blocks * 512
        if wanted > room:
            msg = (
                f"tier disk: {path} has room for {format_bytes(room)}, and is to take "
                f"{format_bytes(wanted)}: give it less memory, or another path"
            )
            raise StorageError(msg)
        kept = os.fstat(self._headers).st_size // HEADER_BYTES - 1
        # 1: the slot may have a header.
        self._used = bytearray(b"\1" * min(kept, self._slots)).ljust(self._slots, b"\0")
        os.ftruncate(self._data, wanted)
        os.ftruncate(self._headers, HEADER_BYTES * (self._slots + 1))
        os.pwrite(self._headers, first, 0)

    def write(self, blocks: Sequence[StoredBlock], data: memoryview) -> None:
        """Overwrite the old headers of the slots, then write K/V, then the new headers."""
        data, size = data.cast("B"), self._size
        self.drop([block.slot for block in blocks])
        headers: list[bytes] = []
        for start, end in self._runs(blocks):
            # Hashing brings the data into the caches of the CPU, where the write finds it.
            headers += (
                self._sealer.seal(blocks[index], data[index * size : (index + 1) * size])
                for index in range(start, end)
            )
            _write(self._data, data[start * size : end * size], blocks[start].slot * size)
        if self._sync:
            _sync(self._data)
        for start, end in self._runs(blocks):
            first = blocks[start].slot
            self._used[first : first + end - start] = b"\1" * (end - start)
            joined = b"".join(
                header.ljust(HEADER_BYTES, b"\0") for header in headers[start:end]
            )
            self._write_headers(first, joined)

    def read(self, blocks: Sequence[StoredBlock], into: memoryview) -> int:
        """Read blocks, up to the first that does not match its header."""
        into, size = into.cast("B"), self._size
        for start, end in self._runs(blocks):
            first, count = blocks[start].slot, end - start
            headers = os.pread(self._headers, count * HEADER_BYTES, self._header_at(first))
            _read(self._data, into[start * size : end * size], first * size)
            for index in range(start, end):
                header = headers[(index - start) * HEADER_BYTES :][:HEADER_BYTES]
                block_bytes = into[index * size : (index + 1) * size]
                if not self._sealer.matches(blocks[index], header, block_bytes):
                    return index
        return len(blocks)

    def drop(self, slots: Sequence[int]) -> None:
        """Overwrite the headers of `slots`; their K/V keep their disk space."""
        for slot in slots:
            if self._used[slot]:
                self._write_headers(slot, bytes(HEADER_BYTES))
                self._used[slot] = 0

    def recover(self) -> Iterator[StoredBlock]:
        """Yield the blocks with intact headers. Their K/V are checked when they are read.

        Reads all headers, 512 bytes a slot.
        """
        self.damaged = 0
        step = CHUNK_BYTES // HEADER_BYTES
        for first in range(0, self._slots, step):
            headers = os.pread(self._headers, CHUNK_BYTES, self._header_at(first))
            for begin in range(0, len(headers), HEADER_BYTES):
                header = headers[begin : begin + HEADER_BYTES]
                slot = first + begin // HEADER_BYTES
                if not any(header):
                    self._used[slot] = 0
                    continue
                block = self._sealer.unseal(header)
                if block is None or block.slot != slot or block.key is None:
                    self.damaged += block is None or block.slot != slot
                    self.drop([slot])
                else:
                    yield block
        if self.damaged:
            _warn("tier disk: %d headers are damaged: their blocks are dropped", self.damaged)

    def close(self) -> None:
        """Close the files, and unlock the directory."""
        while self._files:
            os.close(self._files.pop())

    def _runs(self, blocks: Sequence[StoredBlock]) -> Iterator[tuple[int, int]]:
        """Yield the ranges `[start, end)` of blocks in adjacent slots, up to 1 MiB each."""
        longest = max(1, CHUNK_BYTES // self._size)
        start = 0
        for index in range(1, len(blocks) + 1):
            if (
                index == len(blocks)
                or index - start == longest
                or blocks[index].slot != blocks[index - 1].slot + 1
            ):
                yield start, index
                start = index

    def _header_at(self, slot: int) -> int:
        return HEADER_BYTES * (slot + 1)

    def _write_headers(self, slot: int, headers: bytes) -> None:
        _write(self._headers, memoryview(headers), self._header_at(slot))


def _refuse_shared(path: Path) -> None:
    """Raise InputError for a directory in which others may write: they would choose the K/V."""
    mode = path.stat()
    if mode.st_mode & 0o022 or mode.st_uid not in (os.geteuid(), 0):
        msg = (
            f"tier disk: {path} can be written by others (mode {mode.st_mode & 0o777:o}), who "
            "could choose the K/V of later runs: `chmod go-w` it, or name another path"
        )
        raise InputError(msg)


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _read(file: int, into: memoryview, offset: int) -> None:
    """Fill `into` from `offset` on, up to the end of the file."""
    while into:
        got = os.preadv(file, [into], offset)
        if not got:
            return
        into, offset = into[got:], offset + got


def _sync(file: int) -> None:
    (os.fdatasync if sys.platform == "linux" else os.fsync)(file)


def _process() -> str:
    """Return the name of this process in the lock file of its directory."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _warn(text: str, *about: object) -> None:
    logging.getLogger("kvcore").warning("kvcore: %s", text % about)
